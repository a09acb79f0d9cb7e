"""forms: linear forms over what a fold, or a round's end, has at hand; the coefficients of a method's table."""

from typing import NamedTuple


class Terms(NamedTuple):
    """A linear form over what the fold of one client's update has at hand: its coefficients, 0 where not given.

    >>> Terms(row=1, r=-1)
    Terms(r=-1, row=1)
    """

    h: float = 0.0
    """What the client sent, in the method's unit."""
    r: float = 0.0
    """Its row before, zero if it was never written."""
    q: float = 0.0
    """The anchor: a vector that goes with the row, or that all clients were sent."""
    row: float = 0.0
    """Its row after, as it is stored; not in what a row becomes."""

    def __repr__(self) -> str:
        return _shown(self)


class Linear(NamedTuple):
    """A linear form over a round's sums, by the papers' letters: its coefficients, 0 where not given.

    >>> Linear(A=0.5, T=0.1)
    Linear(A=0.5, T=0.1)
    """

    A: float = 0.0
    """The sum over the cohort of what its updates add."""
    B: float = 0.0
    """The sum of what the cohort's rows change by."""
    T: float = 0.0
    """The running total."""
    g: float = 0.0
    """The direction of the round before."""
    v: float = 0.0
    """That of this round; not in v itself."""

    def __repr__(self) -> str:
        return _shown(self)


def _shown(form: Terms | Linear) -> str:
    given = ", ".join(f"{name}={value!r}" for name, value in form._asdict().items() if value)
    return f"{type(form).__name__}({given})"
