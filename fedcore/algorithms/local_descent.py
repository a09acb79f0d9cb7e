"""LFGD and LFSGD: Haddadpour and Mahdavi, "On the Convergence of Local Descent Methods in Federated Learning", 2019.

arXiv 1910.14425, Algorithm 1.
"""

from fedcore.algorithms.algorithm import Algorithm, Cohort, Step


class LocalDescent(Algorithm):
    """x' = the plain mean of the drawn clients' models: (1/K) sum over the draws of y_j.

    Clients are drawn WITH replacement with probabilities q; one that is drawn twice counts twice (``count``).
    Rates are those of the theorems, in ``fedcore.algorithms.rates``.

    Args:
        full_gradient: local steps along the client's full gradient (LFGD) instead of minibatches (LFSGD).
    """

    averages_models = True

    def __init__(self, full_gradient: bool = False) -> None:
        self.full_gradient = full_gradient
        self.local_rule = "full gradient" if full_gradient else "sgd"

    def step(self, cohort: Cohort) -> Step:
        """v = A / K, K the draws."""
        return Step(from_sum=1 / cohort.W)
