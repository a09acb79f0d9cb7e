"""FedAvg: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from fedcore.algorithms.algorithm import Algorithm, Step, choose
from fedcore.algorithms.cohort import Claims, Cohort
from fedcore.kernels import Linear
from fedcore.typing import F64

Weights: TypeAlias = Literal["uniform", "examples"]


class WeightedMean(Algorithm):
    """v = sum_i w_i h_i / W over the cohort; a method of that kind has ``weights`` among its options."""

    weights: Weights

    unit = "model"

    def __post_init__(self) -> None:
        choose("weights", self.weights, ("uniform", "examples"))

    @property
    def weighs_claims(self) -> bool:
        """True where it weighs by examples."""
        return self.weights == "examples"

    def weigh(self, claims: Claims) -> F64:
        """w_i, once for each time that the client was drawn."""
        return claims.examples * claims.counts if self.weights == "examples" else claims.counts

    def step(self, cohort: Cohort) -> Step:
        """v = A / W."""
        return Step(v=Linear(A=1 / cohort.W))


@dataclass(frozen=True)
class FedAvg(WeightedMean):
    """x' = x - gamma v, v = sum_i w_i h_i / W over the cohort.

    Without a server rate this is the average of the clients' models, x' = x + sum_i (w_i / W) (y_i - x).

    Args:
        weights: "examples", w_i = n_i (McMahan), or "uniform", w_i = 1 (MimiC paper, eq. 4-5).
    """

    weights: Weights = "examples"
