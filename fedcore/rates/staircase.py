"""The rate eta_0 / t, with restarts."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedcore.arguments import real, whole


@dataclass(frozen=True)
class Staircase:
    """eta_0 / t, which begins anew when the objective shifts: eta_0 / (t - t0) after a shift at t0.

    The paper counts rounds from 1, so round 0 has eta_0 / 1; and what shifts at its t0 shows first in its round
    t0 + 1, which is round t0 here.

    Args:
        initial: eta_0.
        restarts: the rounds that have eta_0 / 1 again, such as those in which a ``Schedule`` has somebody arrive.

    Reference: Ruan et al., "Towards Flexible Device Participation in Federated Learning", AISTATS 2021: the rate
    eta_0 / t of its experiments, and the restart of Sec. 4.2.

    >>> rate = Staircase(1.0, restarts=[3])
    >>> [round(rate(t), 2) for t in range(6)]
    [1.0, 0.5, 0.33, 1.0, 0.5, 0.33]
    """

    initial: float
    restarts: Sequence[int] = ()

    def __post_init__(self) -> None:
        real("initial", self.initial, "(0, inf)")
        given = [self.restarts] if isinstance(self.restarts, str) else self.restarts  # a str's signs are no rounds
        rounds = {whole("restarts", round, 0) for round in given}
        object.__setattr__(self, "restarts", tuple(sorted(rounds)))

    def __call__(self, round: int) -> float:
        """The rate of that round."""
        began = max((restart for restart in self.restarts if restart <= round), default=0)
        return self.initial / (round + 1 - began)

    def restarted(self, round: int) -> "Staircase":
        """The same, which also begins anew in that round."""
        return Staircase(self.initial, (*self.restarts, round))
