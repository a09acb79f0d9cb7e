"""FedDyn: Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, arXiv 2111.04263."""

from dataclasses import dataclass

from fedcore.algorithms.algorithm import Algorithm, Direction, Step
from fedcore.algorithms.cohort import Cohort
from fedcore.arguments import real
from fedcore.kernels import Linear, Terms


@dataclass(frozen=True)
class FedDyn(Algorithm):
    """A client steps along grad(y) - l_i + alpha (y - x), and then l_i' = l_i + alpha (x - y_i).

    The server keeps H' = H + (alpha/N) sum over the cohort of (x - y_i), and x' = (1/S) sum of y_i - H' / alpha. Rows
    are r_i = l_i / alpha, lengths of models, so that H / alpha is the mean of ALL rows, T / N. At a fixed point l_i is
    client i's gradient there, and their sum is zero.

    Args:
        alpha: the weight of the regulariser, > 0; the paper takes 0.1, 0.01 and 0.001.
    """

    alpha: float = 0.1

    row = Terms(h=1, r=1)
    adds = Terms(row=1, r=-1)
    keeps_total = True
    unit = "model"
    takes_server_rate = False

    def __post_init__(self) -> None:
        real("alpha", self.alpha, "(0, 1e6]")

    @property
    def direction(self) -> Direction:
        """grad(y) - alpha r_i + alpha (y - x)."""
        return Direction(mu=self.alpha, from_row=-self.alpha)

    def step(self, cohort: Cohort) -> Step:
        """v = A / S + T' / N, T' = T + A."""
        return Step(v=Linear(A=1 / cohort.S + 1 / cohort.N, T=1 / cohort.N), T=Linear(T=1, A=1))
