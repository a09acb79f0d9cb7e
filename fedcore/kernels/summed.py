"""summed: a weighted sum with the norms that came from the same pass."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.float_mode import ieee


@dataclass(frozen=True, eq=False)
class Summed:
    """A weighted sum and, from the same pass, how long it and its rows are; h_i is row i, or base - row i.

    Attributes:
        sum: sum_i w_i h_i, an array or the list of a model's arrays.
        squared_norms: float64[k], |h_i|^2.
        squared_norm_of_sum: |sum_i w_i h_i|^2, before the sum is rounded to 16 bits.
        weights: float64[k], w_i.
    """

    sum: Any
    squared_norms: npt.NDArray[np.float64]
    squared_norm_of_sum: float
    weights: npt.NDArray[np.float64] = field(repr=False)

    @property
    def finite(self) -> npt.NDArray[np.bool_]:
        """bool[k], whether each |h_i|^2 is: then h_i is, and the other way round unless float64 rows pass 1e154."""
        return np.isfinite(self.squared_norms)

    @property
    @ieee
    def diversity(self) -> float | None:
        """The weighted gradient diversity sum_i q_i |h_i|^2 / |sum_i q_i h_i|^2, q_i = w_i / sum w.

        1 where all h_i are one vector, large where they cancel; None where it is undefined: the weights or the h_i
        add up to zero, or something is not finite.

        Reference: Haddadpour and Mahdavi, On the Convergence of Local Descent Methods in Federated Learning, 2019,
        eq. 7.
        """
        if not (self.finite.all() and 0 < self.squared_norm_of_sum < np.inf):
            return None
        total = float(self.weights.sum())
        diversity = total * float(self.weights @ self.squared_norms) / self.squared_norm_of_sum
        return diversity if total != 0 and np.isfinite(diversity) else None

    @classmethod
    @ieee
    def of(cls, sum: Any, squares: npt.NDArray[np.float64], weights: Any) -> "Summed":
        """From float64[k + 1], the rows' squared norms and the sum's."""
        return cls(sum, squares[:-1], float(squares[-1]), np.array(weights, np.float64))
