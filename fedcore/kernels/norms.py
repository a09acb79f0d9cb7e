"""Squared norms of rows, and of vectors in parts."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedcore.arrays import F64, Bools, ieee
from fedcore.native import core


@ieee
def squared_norms(rows: Sequence[Any], *, partials: F64 | None = None) -> F64:
    """The squared Euclidean norm of each row.

    Args:
        rows: k arrays float32[n] of one length, in CPU memory or on one CUDA device. Read-only.
        partials: float64[ceil(n / 16,384), k], written: the blocks' shares, as of ``accumulate``.

    Returns:
        float64[k].

    Raises:
        ShapeError, DtypeError, ArrayError: a row differs from ``Args``.

    Determinism: float64 on 16 fixed lanes folded in a fixed tree: the same bits on every ISA level and thread count.
    Cost: reads 4 k n bytes.

    >>> squared_norms([np.float32([3, 4])])
    array([25.])
    """
    return core.squared_norms(rows, partials)


@ieee
def all_finite(rows: Sequence[Any]) -> Bools:
    """Return whether each row is free of NaN and infinities; arguments and cost as for ``squared_norms``.

    A float32's square cannot overflow the float64 sum, so a row is finite exactly if its squared norm is.

    >>> all_finite([np.float32([3, np.inf])])
    array([False])
    """
    finite: Bools = np.isfinite(squared_norms(rows))
    return finite


@ieee
def sum_of_partials(partials: F64) -> F64:
    """The squared norms of whole vectors, with the bits that one call on the whole vectors returns.

    A norm is a sum over blocks of 16,384 elements. So a caller may cut vectors at multiples of that, call the kernels
    on each part with ``partials=``, and concatenate the parts' partials.

    Args:
        partials: float64[blocks, k] of all blocks, as ``accumulate``, ``exchange``, ``server_step``,
            ``squared_norms``, ``combined_square`` and ``optimizer_step`` write them.

    Returns:
        float64[k].

    Determinism: the blocks are added in their order.

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
