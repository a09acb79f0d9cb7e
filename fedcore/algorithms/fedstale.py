"""FedStale: Rodio, Neglia, "FedStale: leveraging stale client updates in federated learning", 2024.

arXiv 2405.04171.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedcore.algorithms.algorithm import Algorithm, Step
from fedcore.algorithms.cohort import Claims, Cohort
from fedcore.arguments import real
from fedcore.errors import RangeError
from fedcore.kernels import Linear, Terms
from fedcore.typing import F64


@dataclass(frozen=True)
class FedStale(Algorithm):
    """x' = x - gamma v, v = (1/N) [sum over the cohort of (h_i - beta r_i) / p_i + beta sum over ALL clients of r_i].

    p_i is the chance that client i is heard in a round, r_i its last mean gradient (r_i' = h_i). ``beta`` weighs what
    is remembered: 0 is FedAvg without the bias of uneven chances, 1 is FedVARP. The sum over all is of before the
    round.

    Args:
        beta: in [0, 1].
        chances: p_i, where they are known: one number in (0, 1] for all, or one for each of the clients 0..N-1; a round
            without clients then steps along what is remembered. None takes S / N, and such a round changes nothing. A
            client that has none, as one that arrives, ends the round: make a server with its chance first.
    """

    beta: float = 0.5
    chances: float | Sequence[float] | None = None

    row = Terms(h=1)
    keeps_total = True
    sums_changes = True  # A weighs them, T must not

    def __post_init__(self) -> None:
        real("beta", self.beta, "[0, 1]")
        if isinstance(self.chances, Sequence):
            listed = tuple(real("chances", chance, "(0, 1]") for chance in self.chances)
            if not listed:
                raise RangeError("chances: expected one for each client, got none: leave it out")
            object.__setattr__(self, "chances", listed)
        elif self.chances is not None:
            real("chances", self.chances, "(0, 1]")

    @property
    def adds(self) -> Terms:
        """h - beta r."""
        return Terms(row=1, r=-self.beta)

    @property
    def weighs_claims(self) -> bool:
        """False: the chances are the server's own."""
        return False

    @property
    def steps_without_clients(self) -> bool:
        """Along beta T / N, where the chances are known."""
        return self.chances is not None

    def weigh(self, claims: Claims) -> F64:
        """1 / p_i, where they are known."""
        if self.chances is None:
            return np.ones(len(claims.steps))
        if not isinstance(self.chances, Sequence):
            return np.full(len(claims.steps), 1 / self.chances)
        assert claims.clients is not None
        known = range(len(self.chances))
        for client in claims.clients:
            if client not in known:
                raise RangeError(f"chances: expected one of client {client!r}, got those of the clients 0..{known[-1]}")
        return 1 / np.array([self.chances[int(client)] for client in claims.clients], np.float64)

    def step(self, cohort: Cohort) -> Step:
        """v = A / N + beta T / N, or A / S + beta T / N; T' = T + B, the sum of all rows."""
        of_cohort = cohort.S if self.chances is None else cohort.N
        return Step(v=Linear(A=1 / of_cohort, T=self.beta / cohort.N), T=Linear(T=1, B=1))
