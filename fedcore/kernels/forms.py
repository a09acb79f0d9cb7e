"""Linear forms, the coefficients in a method's table."""

from typing import NamedTuple


class Terms(NamedTuple):
    """The coefficients of a linear form over the vectors of a client's update. Default: 0.

    >>> Terms(row=1, r=-1)
    Terms(r=-1, row=1)
    """

    h: float = 0.0
    """The client's update, in the method's unit."""
    r: float = 0.0
    """The client's old row, zero if the client has no row."""
    q: float = 0.0
    """The anchor, a vector stored with the row or sent to all clients."""
    row: float = 0.0
    """The client's new row as stored; not allowed in the form of the new row itself."""

    def __repr__(self) -> str:
        return _shown(self)


class Linear(NamedTuple):
    """The coefficients of a linear form over a round's sums, in the papers' notation. Default: 0.

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
    """The direction of the previous round."""
    v: float = 0.0
    """The direction of this round; not allowed in the form of v itself."""

    def __repr__(self) -> str:
        return _shown(self)


H, CHANGE = Terms(h=1), Terms(row=1, r=-1)
"""The usual forms: the new row is h, or the sum adds h; and the sum adds the change of the row."""
ANCHORED = CHANGE._replace(q=1)
"""The form that adds the change of the row and the anchor."""
KEPT = Linear(T=1)
"""The form of an unchanged running total."""


def _shown(form: Terms | Linear) -> str:
    given = ", ".join(f"{name}={value!r}" for name, value in form._asdict().items() if value)
    return f"{type(form).__name__}({given})"
