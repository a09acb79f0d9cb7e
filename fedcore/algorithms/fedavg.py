"""FedAvg: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017."""

from typing import Literal

from fedcore.algorithms.algorithm import F64, Algorithm, Claims, Cohort, Step, choose


class FedAvg(Algorithm):
    """x' = x - gamma v, v = sum_i w_i h_i / W over the cohort.

    Without a server rate this is the average of the clients' models, x' = x + sum_i (w_i / W) (y_i - x).

    Args:
        weights: "examples", w_i = n_i (McMahan), or "uniform", w_i = 1 (MimiC paper, eq. 4-5).
    """

    averages_models = True

    def __init__(self, weights: Literal["uniform", "examples"] = "examples") -> None:
        choose("weights", weights, ("uniform", "examples"))
        self.weights = weights

    @property
    def weighs_claims(self) -> bool:
        """Where it weighs by examples."""
        return self.weights == "examples"

    def weigh(self, claims: Claims) -> F64:
        """w_i, once for each time that the client was drawn."""
        return claims.examples * claims.counts if self.weights == "examples" else claims.counts

    def step(self, cohort: Cohort) -> Step:
        """v = A / W."""
        return Step(from_sum=1 / cohort.W)
