"""Squared norms of rows, and of vectors that are split into parts."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedcore.arrays import F64, Bools, ieee, native


@native
def squared_norms(rows: Sequence[Any], *, partials: F64 | None = None) -> F64:
    """Return the squared Euclidean norm of each row, float64[k].

    Args:
        rows: k arrays float32[n], in CPU memory or on one CUDA device.
        partials: output, float64[ceil(n / 16,384), k], the blocks' shares; see ``accumulate``.

    Determinism: float64 sums on 16 fixed lanes, added in a fixed tree.
    Cost: reads 4 k n bytes.

    >>> squared_norms([np.float32([3, 4])])
    array([25.])
    """


@ieee
def all_finite(rows: Sequence[Any]) -> Bools:
    """Return whether each row is finite, bool[k]; arguments and cost as for ``squared_norms``.

    Squares of float32 cannot overflow the float64 sum, so a row is finite if and only if its squared norm is finite.

    >>> all_finite([np.float32([3, np.inf])])
    array([False])
    """
    finite: Bools = np.isfinite(squared_norms(rows))
    return finite


@ieee
def sum_of_partials(partials: F64) -> F64:
    """Return the squared norms of whole vectors, float64[k], bit-identical to one call on the whole vectors.

    A norm is a sum over blocks of 16,384 elements. So a caller may split vectors at multiples of 16,384, call the
    kernels on each part with ``partials=``, and concatenate the parts' partials. Blocks are added in order.

    Args:
        partials: float64[blocks, k] of all blocks, as ``accumulate``, ``exchange``, ``server_step``,
            ``squared_norms``, ``combined_square`` and ``optimizer_step`` write them.

    >>> x, partials = np.ones(40_000, np.float32), np.empty((3, 1))
    >>> squared_norms([x[:32_768]], partials=partials[:2])
    array([32768.])
    >>> squared_norms([x[32_768:]], partials=partials[2:])
    array([7232.])
    >>> sum_of_partials(partials)
    array([40000.])
    """
    sums: F64 = np.cumsum(partials, axis=0)[-1] if len(partials) else np.zeros(partials.shape[1])
    return sums
