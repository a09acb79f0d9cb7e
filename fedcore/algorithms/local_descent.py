"""LFGD and LFSGD: Haddadpour and Mahdavi, "On the Convergence of Local Descent Methods in Federated Learning", 2019.

arXiv 1910.14425, Algorithm 1.
"""

from dataclasses import dataclass

from fedcore.algorithms.algorithm import Algorithm, Step
from fedcore.algorithms.cohort import Cohort
from fedcore.kernels import Linear
from fedcore.local_rules import FullGradient, LocalRule, Sgd


@dataclass(frozen=True)
class LocalDescent(Algorithm):
    """x' = the plain mean of the drawn clients' models: (1/K) sum over the draws of y_j.

    Clients are drawn WITH replacement with probabilities q; one that is drawn twice counts twice (``count``).
    Rates are those of the theorems, in ``fedcore.rates``.

    Args:
        full_gradient: local steps along the client's full gradient (LFGD) instead of minibatches (LFSGD).
    """

    full_gradient: bool = False

    unit = "model"

    @property
    def local_rule(self) -> LocalRule:
        """Full gradients, where they are asked for."""
        return FullGradient() if self.full_gradient else Sgd()

    def step(self, cohort: Cohort) -> Step:
        """v = A / K, K the draws."""
        return Step(v=Linear(A=1 / cohort.W))
