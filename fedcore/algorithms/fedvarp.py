"""FedVARP: Jhunjhunwala, Sharma, Nagarkatti, Joshi, "FedVARP: Tackling the Variance Due to Partial Client
Participation in Federated Learning", UAI 2022, arXiv 2207.14130.
"""

from dataclasses import dataclass

from fedcore.algorithms.algorithm import Algorithm, Step
from fedcore.algorithms.cohort import Cohort
from fedcore.kernels import Linear, Terms


@dataclass(frozen=True)
class FedVARP(Algorithm):
    """x' = x - gamma v, v = (1/S) sum over the cohort of (h_i - r_i) + (1/N) sum over ALL clients of r_i; r_i' = h_i.

    A client that is not heard is stood for by its last mean gradient r_i, zero if it was never heard; the cohort
    corrects the mean of those. A round without clients changes nothing.
    """

    row = Terms(h=1)
    adds = Terms(row=1, r=-1)
    keeps_total = True

    def step(self, cohort: Cohort) -> Step:
        """v = A / S + T / N, T of before the round; T' = T + A."""
        return Step(v=Linear(A=1 / cohort.S, T=1 / cohort.N), T=Linear(T=1, A=1))
