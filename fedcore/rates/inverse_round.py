"""The rate of a theorem on clients that do a part of their work."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedcore.arguments import real, whole


@dataclass(frozen=True)
class InverseRound:
    """eta_t = 16 E / (mu w) / ((t - t0) E + gamma), t counted from the last shift of the objective.

    Args:
        mu: the strong convexity of the clients' objectives.
        E: the local steps of a complete round.
        work: w = E[sum_k p_t^k s_t^k], what a round's coefficients times the steps done come to on average: E for
            scheme C where nobody is left without work, sum_k p^k E[s^k] for scheme B.
        gamma: > 0, the constant of the bound (M D + V) / (t E + gamma), which grows with E L / (mu w); it sets how long
            the rate stays near its first value, and is the caller's: the theorem's own is not offered.
        restarts: the rounds in which it begins anew (Corollary 3.2.1), as for ``Staircase``.

    Reference: Ruan et al., "Towards Flexible Device Participation in Federated Learning", AISTATS 2021, Theorem 3.1.

    >>> rate = InverseRound(mu=0.5, E=4, work=4.0, gamma=320.0, restarts=[2])
    >>> [round(rate(t), 4) for t in range(4)]
    [0.1, 0.0988, 0.1, 0.0988]
    """

    mu: float
    E: int
    work: float
    gamma: float
    restarts: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name in ("mu", "work", "gamma"):
            real(name, getattr(self, name), "(0, inf)")
        whole("E", self.E, 1)
        given = [self.restarts] if isinstance(self.restarts, str) else self.restarts  # a str's signs are no rounds
        object.__setattr__(self, "restarts", tuple(sorted({whole("restarts", round, 0) for round in given})))

    def __call__(self, round: int) -> float:
        """The rate of that round."""
        began = max((restart for restart in self.restarts if restart <= round), default=0)
        return 16 * self.E / (self.mu * self.work) / ((round - began) * self.E + self.gamma)

    def restarted(self, round: int) -> "InverseRound":
        """The same, which also begins anew in that round."""
        return InverseRound(self.mu, self.E, self.work, self.gamma, (*self.restarts, round))
