"""A server rate that follows the number of clients heard."""

from collections.abc import Callable
from dataclasses import dataclass

from fedcore.arguments import real
from fedcore.rates.rate import Rate


@dataclass(frozen=True)
class PerCohort:
    """gamma_t = c |S_t| / (t + beta), a server rate that follows the number of clients heard.

    It is a rule of the round and the cohort's size; ``over`` makes a rate of it. A participation pattern knows a
    round's cohort beforehand: ``Server(..., server_lr=rule.over(lambda t: len(pattern.active(t))))``. An empty cohort
    counts as one client, since a rate is positive; the models that such a round leaves alone do not see it.

    Args:
        c: the rate for each client; any, for the largest that the analysis allows (its eq. 54) is not offered.
        beta: > 0; it sets how long the rate stays near its first value.

    Reference: Sun, Mao, Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central Updates",
    2023, the decaying server rate of its convergence analysis.

    >>> PerCohort(c=0.5, beta=5.0)(5, 4)
    0.2
    """

    c: float
    beta: float

    def __post_init__(self) -> None:
        real("c", self.c, "(0, inf)")
        real("beta", self.beta, "(0, inf)")

    def __call__(self, round: int, S: int) -> float:
        """The rate of a round with S clients."""
        return self.c * max(S, 1) / (round + self.beta)

    def over(self, sizes: Callable[[int], int]) -> Rate:
        """The rate that asks ``sizes`` for the number of clients of a round."""
        return lambda round: self(round, sizes(round))
