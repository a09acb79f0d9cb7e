"""FedExP: Jhunjhunwala, Wang, Joshi, "FedExP: Speeding Up Federated Averaging via Extrapolation", ICLR 2023.

arXiv 2301.09604.
"""

from dataclasses import dataclass

from fedcore.algorithms.algorithm import Algorithm, Step
from fedcore.algorithms.cohort import Cohort
from fedcore.arguments import real
from fedcore.kernels import Linear


@dataclass(frozen=True)
class FedExP(Algorithm):
    """x' = x - gamma D, D = (1/S) sum of d_i, d_i = x - y_i; gamma = max(1, sum |d_i|^2 / (2 S (|D|^2 + epsilon))).

    The more the clients' moves cancel, the longer the server's step. It is FedAvg of uniform weights where they agree.
    So two clients that send long opposite moves lengthen it at will: bound them (``Server(max_norm_ratio=)``).
    The paper judges the mean of the last two models, which oscillate less.

    Args:
        epsilon: keeps the step short where D is small, in [1e-9, 1e9]; the paper takes values from 1e-3 to 0.1.
    """

    epsilon: float = 1e-3

    unit = "model"
    takes_server_rate = False

    def __post_init__(self) -> None:
        real("epsilon", self.epsilon, "[1e-9, 1e9]")

    def step(self, cohort: Cohort) -> Step:
        """v = D = A / W, W = S draws."""
        S = cohort.W
        extrapolated = float(cohort.squares @ cohort.weights) / (2 * S * (cohort.sum_square / S**2 + self.epsilon))
        return Step(v=Linear(A=1 / S), gamma=max(1.0, extrapolated))
