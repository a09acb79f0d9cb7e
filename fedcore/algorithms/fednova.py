"""FedNova: Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization".

NeurIPS 2020, arXiv 2007.07481.
"""

from dataclasses import dataclass

from fedcore.algorithms.algorithm import Algorithm, Step
from fedcore.algorithms.cohort import Claims, Cohort
from fedcore.arguments import real
from fedcore.kernels import Linear
from fedcore.typing import F64


@dataclass(frozen=True)
class FedNova(Algorithm):
    """x' = x - (sum p_i eta_i a_i) sum_i p_i (x - y_i) / (eta_i a_i), p_i = n_i / sum of the cohort's n.

    a_i is the length of client i's accumulation: K_i for plain steps, so that the sums are over means h_i of gradients
    however many steps each does. With equal K_i this is FedAvg.

    Args:
        momentum: rho in [0, 0.9999] of the clients' local steps (``fedcore.local.LocalOptions(momentum=)``), with which
            a_i = [K_i - rho (1 - rho^K_i) / (1 - rho)] / (1 - rho).
    """

    momentum: float = 0.0

    def __post_init__(self) -> None:
        real("momentum", self.momentum, "[0, 0.9999]")

    def accumulation(self, steps: F64) -> F64:
        """a_i, float64[k]."""
        rho = self.momentum
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)

    def weigh(self, claims: Claims) -> F64:
        """n_i K_i / a_i, since h_i = (x - y_i) / (eta_i K_i)."""
        return claims.examples * claims.counts * claims.steps / self.accumulation(claims.steps)

    def step(self, cohort: Cohort) -> Step:
        """v = A / sum of n; gamma = sum of p_i eta_i a_i, K_i no longer than the server believes."""
        steps, examples = cohort.claims.steps, cohort.claims.examples * cohort.claims.counts
        lengths = cohort.eta_steps * self.accumulation(steps) / steps
        return Step(v=Linear(A=1 / examples.sum()), gamma=float(examples @ lengths / examples.sum()))
