"""MIFA: Gu et al., "Fast Federated Learning in the Presence of Arbitrary Device Unavailability", NeurIPS 2021."""

from fedcore.algorithms.algorithm import Algorithm, Cohort, Step


class MIFA(Algorithm):
    """x' = x - gamma v, v = (1/N) sum over ALL clients of the last mean gradient heard from each.

    The total T is the sum of all rows, in float64: T' = T + sum over the cohort of (h_i - r_i), v = T' / N. Rows are
    gradients: no rate multiplies them, so today's rate multiplies old ones too. A round without clients still steps
    along the remembered mean. T follows the rows to float64 rounding, so a row 10^16 times the others' length leaves a
    trace of it behind.

    Args:
        wait: x stays until each client was heard once (the paper's form; rows fill and rounds count meanwhile).
            False starts at once, from rows of zero.
    """

    adds = "h - r"
    keeps_total = True
    steps_without_clients = True

    def __init__(self, wait: bool = True) -> None:
        self.wait = wait

    def step(self, cohort: Cohort) -> Step:
        """T' = T + A, v = T' / N."""
        return Step(from_sum=1 / cohort.N, from_total=1 / cohort.N, keep_sum=1)

    def moves(self, cohort: Cohort) -> bool:
        """Once every client has a row, where x waits for that."""
        return cohort.rows == cohort.N or not self.wait
