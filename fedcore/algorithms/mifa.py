"""MIFA: Gu et al., "Fast Federated Learning in the Presence of Arbitrary Device Unavailability", NeurIPS 2021."""

from dataclasses import dataclass

from fedcore.algorithms.algorithm import Algorithm, Step
from fedcore.algorithms.cohort import Cohort
from fedcore.kernels import Linear, Terms


@dataclass(frozen=True)
class MIFA(Algorithm):
    """x' = x - gamma v, v = (1/N) sum over ALL clients of the last mean gradient heard from each.

    The total T is the sum of all rows, in float64: T' = T + sum over the cohort of (h_i - r_i), v = T' / N. Rows are
    gradients: no rate multiplies them, so today's rate multiplies old ones too. A round without clients still steps
    along the remembered mean. T follows the rows to float64 rounding, so a row 10^16 times the others' length leaves a
    trace of it behind; with ``Server(accumulate="exact")`` T is their sum to the last bit, and nothing leaves one.

    Args:
        wait: x stays until each client was heard once (the paper's form; rows fill and rounds count meanwhile).
            False starts at once, from rows of zero.
    """

    wait: bool = True

    row = Terms(h=1)
    adds = Terms(row=1, r=-1)
    keeps_total = True
    steps_without_clients = True

    def step(self, cohort: Cohort) -> Step:
        """T' = T + A, v = T' / N."""
        return Step(v=Linear(A=1 / cohort.N, T=1 / cohort.N), T=Linear(T=1, A=1))

    def moves(self, cohort: Cohort) -> bool:
        """Once every client has a row, where x waits for that."""
        return cohort.rows == cohort.N or not self.wait
