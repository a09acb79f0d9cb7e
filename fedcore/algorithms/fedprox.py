"""FedProx: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020."""

from dataclasses import dataclass

from fedcore.algorithms.algorithm import Direction
from fedcore.algorithms.fedavg import WeightedMean, Weights
from fedcore.arguments import real


@dataclass(frozen=True)
class FedProx(WeightedMean):
    """FedAvg's server; a client steps along grad(y) + mu (y - x).

    Args:
        mu: the weight of the proximal term; 0 is FedAvg.
        weights: as for FedAvg.
    """

    mu: float = 0.01
    weights: Weights = "examples"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mu != 0:
            real("mu", self.mu, "(0, 1e6]")

    @property
    def direction(self) -> Direction:
        """grad(y) + mu (y - x)."""
        return Direction(mu=self.mu)
