"""What a round's step came to, as far as its report says it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """What a round's step came to."""

    gamma: float = 0.0
    """The step along v; 0 where x stayed."""
    mean_square: float | None = None
    """|sum_i (w_i / W) h_i|^2, where it is known."""
    correction_norm: float | None = None
    """See ``RoundReport``."""
    awaited: int = 0
    """See ``RoundReport``."""
    most_steps: int | None = None
    """How many steps gamma has counted of a client that claimed more; None where it counted all of everybody's."""
