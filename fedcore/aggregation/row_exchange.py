"""The exchange of many clients' rows, some at a time."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.kernels import Terms
from fedcore.kernels.exchange import ANCHORED, REPLACED
from fedcore.typing import F64

PART = 256
"""Rows of one call: each array that a call writes is held against all others of it, so that a call of k rows takes
k^2, with Python's lock held."""


def exchange(
    acc: npt.NDArray[np.floating[Any]],
    bases: Sequence[Any],
    ys: Sequence[Any],
    scales: F64,
    weights: F64,
    old_rows: Sequence[Any],
    anchors: Sequence[Any],
    new_rows: Sequence[Any],
    *,
    out: npt.NDArray[np.floating[Any]],
    row: Terms = REPLACED,
    adds: Terms = ANCHORED,
    keys: npt.NDArray[np.uint64] | None = None,
    sums: npt.NDArray[np.uint64] | None = None,
) -> F64:
    """``kernels.exchange``, and its bits, of any number of rows that do not overlap."""
    squares = np.empty(len(ys))
    for start in range(0, len(ys), PART):
        some = slice(start, start + PART)
        squares[some] = kernels.exchange(
            out if start else acc,
            bases[some],
            ys[some],
            scales[some],
            weights[some],
            old_rows[some],
            anchors[some],
            new_rows[some],
            out=out,
            row=row,
            adds=adds,
            keys=None if keys is None else keys[some],
            sums=None if sums is None else sums[some],
        )
    return squares
