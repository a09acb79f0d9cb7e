"""mix: every model becomes a weighted sum of all models, as decentralised methods do between neighbours."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.arguments import listed, numbers
from fedcore.errors import DtypeError, RangeError, ShapeError
from fedcore.float_mode import ieee
from fedcore.native import core


@ieee
def mix(models: Sequence[Any], W: Any) -> None:
    """All models at once and in place: y_i <- sum_j W[i, j] y_j.

    Args:
        models: p arrays float32[n] (NumPy, torch, CuPy, anything with DLPack or the buffer protocol), in CPU memory
            or on one CUDA device (p up to 16,384 there), overwritten; no two overlap.
        W: float32[p, p] or float64[p, p] (a nested list counts as float64), or a sparse matrix: anything with
            ``tocsr()``, as SciPy's have, or with the ``indptr``, ``indices`` and ``data`` of compressed rows.
            Rounded to float32. Read-only.

    Raises:
        ShapeError, DtypeError, ArrayError, RangeError: an argument is not what is said above, or W is not finite;
            nothing was written.

    Determinism: float32 in the order of the columns; a weight of 0 is left out, so that a dense matrix and the same
        one sparse give the same bits, on every ISA level and thread count. Rounding W leaves the sum of a row within
        a few 1e-8 of what it was.
    Cost: reads 4 p n bytes and writes 4 p n, whatever W; 2 p^2 n operations at most. Scratch: 128 KiB a thread, or
        256 p bytes where that is more.
    Reference: Haddadpour, Mahdavi, On the Convergence of Local Descent Methods in Federated Learning, Algorithm 2.

    >>> models = [np.float32([0, 4]), np.float32([2, 0])]
    >>> mix(models, [[0.5, 0.5], [0.25, 0.75]])
    >>> models
    [array([1., 2.], dtype=float32), array([1.5, 1. ], dtype=float32)]
    """
    each = listed("models", models)
    core.mix(each, *compressed_rows(W, len(each)))


def compressed_rows(W: Any, p: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The entries of W that are not 0, by rows and in the order of the columns: starts, columns, weights."""
    if hasattr(W, "tocsr"):
        W = W.tocsr()
    if hasattr(W, "indptr"):
        starts, columns, weights = np.asarray(W.indptr), np.asarray(W.indices), np.asarray(W.data)
        if starts.shape != (p + 1,) or getattr(W, "shape", (p, p)) != (p, p):
            raise ShapeError(f"W: expected [{p}, {p}], one row a model, got {len(starts) - 1} rows")
        counts = np.diff(starts)
        if starts[0] != 0 or (counts < 0).any() or not starts[-1] == len(columns) == len(weights):
            due = f"indptr that rises from 0 to the {len(weights)} entries of data and indices"
            raise RangeError(f"W: expected {due}, got {starts[0]} .. {starts[-1]} for {len(columns)} indices")
        rows = np.repeat(np.arange(p), counts)
    else:
        dense = numbers("W", W, np.float64) if isinstance(W, list | tuple) else np.asarray(W)
        if dense.shape != (p, p):
            raise ShapeError(f"W: expected [{p}, {p}], one row a model, got {list(dense.shape)}")
        rows, columns = np.nonzero(dense)
        weights = dense[rows, columns]
    if weights.dtype not in (np.float32, np.float64):
        raise DtypeError(f"W: expected float32 or float64, got {weights.dtype}")
    with np.errstate(over="ignore"):
        weights = weights.astype(np.float32)
    if not np.isfinite(weights).all():
        raise RangeError("W: expected entries that are finite in float32, got one that is not")
    order = np.lexsort((columns, rows))
    order = order[weights[order] != 0]
    starts = np.zeros(p + 1, np.int64)
    np.cumsum(np.bincount(rows[order], minlength=p), out=starts[1:])
    return starts, columns[order].astype(np.int64), weights[order]
