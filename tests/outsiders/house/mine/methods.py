"""FedACG as a user's method: Kim, Kim, Han, "Communication-Efficient Federated Learning with Accelerated
Client Gradient", CVPR 2024, arXiv 2201.03172.
"""

from dataclasses import dataclass

from fedcore.algorithms import Algorithm, Cohort, Direction, Linear, Step


@dataclass(frozen=True)
class Accelerated(Algorithm):
    """Clients start from z = x + lam m and step along grad(y) + beta (y - z); m' = lam m + mean (y - z), x' = x + m'.

    Args:
        lam: the weight of the momentum, in [0, 1).
        beta: of the proximal term.
    """

    lam: float = 0.85
    beta: float = 0.01

    unit = "model"
    takes_server_rate = False
    keeps_momentum = True
    looks_ahead = True

    @property
    def direction(self) -> Direction:
        """grad(y) + beta (y - z)."""
        return Direction(mu=self.beta)

    def step(self, cohort: Cohort) -> Step:
        """v = -m' = lam g + A / S, and clients are sent x' + lam m' = x' + lam (x' - x)."""
        return Step(v=Linear(A=1 / cohort.W, g=self.lam), lookahead=self.lam)
