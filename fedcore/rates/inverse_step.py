"""A rate that falls from step to step."""

from dataclasses import dataclass

from fedcore.arguments import real, whole


@dataclass(frozen=True)
class InverseStep:
    """eta_t = 4 / (mu (t + a)), a = alpha E + 4, where t counts local steps.

    It changes within a round (``of_step``). As a rate of the round it is that of the round's first step, t = round * E;
    the adapters of other frameworks, whose messages tell clients one rate a round, refuse it.

    Args:
        mu: the Polyak-Lojasiewicz constant.
        alpha: below ``largest_alpha``, as the theorem asks.
        E: the local steps of a round; the least that the theorem asks for (eq. 21) is not offered.

    Reference: Haddadpour, Mahdavi, "On the Convergence of Local Descent Methods in Federated Learning", 2019,
    Theorem 3.2 (local SGD under the Polyak-Lojasiewicz condition).

    >>> rate = InverseStep(mu=0.5, alpha=3.0, E=4)
    >>> rate(0), rate(1), rate.of_step(0, 4)
    (0.5, 0.4, 0.4)
    """

    mu: float
    alpha: float
    E: int

    def __post_init__(self) -> None:
        real("mu", self.mu, "(0, inf)")
        real("alpha", self.alpha, "(0, inf)")
        whole("E", self.E, 1)

    def __call__(self, round: int) -> float:
        """The rate of that round's first step."""
        return self.of_step(round, 0)

    def of_step(self, round: int, step: int) -> float:
        """The rate of a round's step, counted from 0."""
        return 4 / (self.mu * (round * self.E + step + self.alpha * self.E + 4))
