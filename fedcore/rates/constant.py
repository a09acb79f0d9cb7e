"""A rate that is a number."""

from dataclasses import dataclass

from fedcore.arguments import real


@dataclass(frozen=True)
class Constant:
    """``value`` in every round.

    >>> Constant(0.1)(7)
    0.1
    """

    value: float

    def __post_init__(self) -> None:
        real("rate", self.value, "(0, inf)")

    def __call__(self, round: int) -> float:
        """The rate of that round."""
        return self.value
