"""Linear forms: the coefficients of a method's table."""

from typing import NamedTuple


class Terms(NamedTuple):
    """A linear form over the vectors of one client's update: its coefficients. Default: 0.

    >>> Terms(row=1, r=-1)
    Terms(r=-1, row=1)
    """

    h: float = 0.0
    """The client's update, in the method's unit."""
    r: float = 0.0
    """Its row before, zero if the client has none."""
    q: float = 0.0
    """The anchor: a vector that goes with the row, or that all clients were sent."""
    row: float = 0.0
    """Its row after, as stored; not in the form of the new row itself."""

    def __repr__(self) -> str:
        return _shown(self)


class Linear(NamedTuple):
    """A linear form over a round's sums, with the papers' letters: its coefficients. Default: 0.

    >>> Linear(A=0.5, T=0.1)
    Linear(A=0.5, T=0.1)
    """

    A: float = 0.0
    """The sum over the cohort's updates."""
    B: float = 0.0
    """The sum of the changes of the cohort's rows."""
    T: float = 0.0
    """The running total."""
    g: float = 0.0
    """The direction of the round before."""
    v: float = 0.0
    """The direction of this round; not in the form of v itself."""

    def __repr__(self) -> str:
        return _shown(self)


def _shown(form: Terms | Linear) -> str:
    given = ", ".join(f"{name}={value!r}" for name, value in form._asdict().items() if value)
    return f"{type(form).__name__}({given})"
