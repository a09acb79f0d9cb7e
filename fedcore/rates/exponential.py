"""A rate that decays by a factor a round."""

from dataclasses import dataclass

from fedcore.arguments import real


@dataclass(frozen=True)
class Exponential:
    """``initial * decay**round``, the schedule of the MimiC paper's experiments (there 0.01 * 0.95^t).

    Reference: Sun, Mao, Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central Updates",
    2023, Sec. 7.

    >>> Exponential(0.01, 0.5)(2)
    0.0025
    """

    initial: float
    decay: float

    def __post_init__(self) -> None:
        real("initial", self.initial, "(0, inf)")
        real("decay", self.decay, "(0, 1]")

    def __call__(self, round: int) -> float:
        """The rate of that round."""
        return self.initial * self.decay**round
