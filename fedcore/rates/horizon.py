"""The rate of a run whose length is known."""

import math
from dataclasses import dataclass
from typing import ClassVar

from fedcore.arguments import real, whole


@dataclass(frozen=True)
class Horizon:
    """eta = (1 / L) sqrt(K / T), the same in every round of a run whose length is known.

    Args:
        L: the smoothness of the clients' objectives.
        K: the clients drawn a round; all p nodes of a network (Theorem 3.4).
        T: the local steps of the whole run, all rounds together.

    The rate of a long run is below ``fedcore.theory.local_sgd.largest_rate``, up to which a bound is derived.

    Reference: Haddadpour, Mahdavi, "On the Convergence of Local Descent Methods in Federated Learning", 2019,
    Theorem 3.3 (local SGD, general nonconvex objectives).

    >>> Horizon(L=2.0, K=4, T=400)(0)
    0.05
    """

    of_whole_run: ClassVar[bool] = True

    L: float
    K: int
    T: int

    def __post_init__(self) -> None:
        real("L", self.L, "(0, inf)")
        whole("K", self.K, 1)
        whole("T", self.T, 1)

    def __call__(self, round: int) -> float:
        """The rate of that round."""
        return math.sqrt(self.K / self.T) / self.L
