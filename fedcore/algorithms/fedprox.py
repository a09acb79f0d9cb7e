"""FedProx: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020."""

from typing import Literal

from fedcore.algorithms.algorithm import Direction, within
from fedcore.algorithms.fedavg import FedAvg


class FedProx(FedAvg):
    """FedAvg's server; a client steps along grad(y) + mu (y - x).

    Args:
        mu: the weight of the proximal term; 0 is FedAvg.
        weights: as for FedAvg.
    """

    def __init__(self, mu: float = 0.01, weights: Literal["uniform", "examples"] = "examples") -> None:
        super().__init__(weights)
        if mu != 0:
            within("mu", mu, 0, 1e6)
        self.mu = mu
        self.direction = Direction(mu=mu)
