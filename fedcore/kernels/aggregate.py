"""Weighted sums of rows and models, and sums of clients' mean gradients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, overload

import numpy as np

from fedcore import arrays as memory
from fedcore.arguments import length, listed, numbers
from fedcore.arrays import F64, Bools, Floats, ieee
from fedcore.errors import ShapeError, UnknownNameError
from fedcore.native import core

Accumulate: TypeAlias = Literal["float32", "float64"]


@dataclass(frozen=True, eq=False)
class Summed:
    """A weighted sum, its norm and the norms of its rows, from one pass; h_i is row i, or base - row i.

    Attributes:
        sum: sum_i w_i h_i, an array or the list of a model's arrays.
        squared_norms: float64[k], |h_i|^2.
        squared_norm_of_sum: |sum_i w_i h_i|^2, before the sum is rounded to 16 bits.
        weights: float64[k], w_i.
    """

    sum: Any
    squared_norms: F64
    squared_norm_of_sum: float
    weights: F64 = field(repr=False)

    @property
    def finite(self) -> Bools:
        """bool[k], whether each |h_i|^2, and so h_i, is finite; float64 rows above 1e154 count as infinite."""
        return np.isfinite(self.squared_norms)

    @property
    @ieee
    def diversity(self) -> float | None:
        """The weighted gradient diversity sum_i q_i |h_i|^2 / |sum_i q_i h_i|^2, q_i = w_i / sum w.

        1 if all h_i are equal, large if they cancel. None if the weights or the h_i add up to zero, or if a number is
        not finite.

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
    def of(cls, sum: Any, squares: F64, weights: Any) -> "Summed":
        """From float64[k + 1], the rows' squared norms and the sum's."""
        return cls(sum, squares[:-1], float(squares[-1]), np.array(weights, np.float64))


@overload
def weighted_sum(
    rows: Sequence[Any],
    weights: Any,
    out: Any = None,
    *,
    base: Any = None,
    accumulate: Accumulate = "float32",
    norms: Literal[False] = False,
) -> Any: ...
@overload
def weighted_sum(
    rows: Sequence[Any],
    weights: Any,
    out: Any = None,
    *,
    base: Any = None,
    accumulate: Accumulate = "float32",
    norms: Literal[True],
) -> Summed: ...
@ieee
def weighted_sum(
    rows: Sequence[Any],
    weights: Any,
    out: Any = None,
    *,
    base: Any = None,
    accumulate: Accumulate = "float32",
    norms: bool = False,
) -> Any:
    """The weighted sum of separate rows, sum_i w_i h_i, h_i = rows[i] or base - rows[i], without stacking them.

    Args:
        rows: k arrays of n numbers (NumPy, torch, CuPy, anything with DLPack or the buffer protocol), in CPU memory or
            on one CUDA device, where the sum then lies too; all float32, all float64, all float16 or all bfloat16 (of
            torch, or ml_dtypes' for NumPy). Read-only.
        weights: float32[k], with float64 sums also float64[k]; or a list of k numbers, taken in the precision of the
            sum.
        out: float32[n], or n numbers of the rows' dtype, written in place and overlapping no input. Default: a new
            array on the rows' device, NumPy's or a ``DeviceArray``; float64 if rows and sum are, else float32.
        base: float32[n]: the sum is of base - rows[i], and the differences are never stored. Read-only.
        accumulate: the precision of the additions.
        norms: whether to return the squared norms of all rows and of the sum, too.

    Returns:
        The sum, ``out`` if it was given. With ``norms`` a ``Summed``: the sum, float64[k] |h_i|^2 and
        |sum_i w_i h_i|^2.

    Raises:
        ShapeError, DtypeError, ArrayError: an argument differs from ``Args``; nothing was written.

    Determinism: elements and differences are float32 (float64 where rows and sum are), products and sums are in the
        precision of ``accumulate``, one row after another, and rounded to ``out`` once, to the nearest and ties to
        even: the same bits on every ISA level and thread count, with norms and without. Squares are of float32(h_i) on
        16 fixed lanes of float32, or in float64 where these could not hold them, as in ``squared_norms``: the same bits
        likewise, relative error below 1e-5.
    Cost: reads all rows and the base once, writes the sum once; norms take no further pass.

    >>> weighted_sum([np.float32([1, 2]), np.float32([3, 4])], [0.5, 0.5])
    array([2., 3.], dtype=float32)
    >>> weighted_sum([np.float16([1, 2]), np.float16([3, 4])], [0.5, 0.5], base=np.float32([2, 2]))
    array([ 0., -1.], dtype=float32)
    >>> summed = weighted_sum([np.float32([3, 4]), np.float32([3, -4])], [0.5, 0.5], norms=True)
    >>> summed.squared_norms, summed.squared_norm_of_sum, summed.finite
    (array([25., 25.]), 9.0, array([ True,  True]))
    >>> round(summed.diversity, 3)
    2.778
    """
    total, squares, weights = _sum_rows(rows, weights, out, base, accumulate, norms)
    return Summed.of(total, squares, weights) if norms else total


@overload
def weighted_sum_segments(
    models: Sequence[Sequence[Any]],
    weights: Any,
    outs: Sequence[Any] | None = None,
    *,
    base: Sequence[Any] | None = None,
    accumulate: Accumulate = "float32",
    norms: Literal[False] = False,
) -> Sequence[Any]: ...
@overload
def weighted_sum_segments(
    models: Sequence[Sequence[Any]],
    weights: Any,
    outs: Sequence[Any] | None = None,
    *,
    base: Sequence[Any] | None = None,
    accumulate: Accumulate = "float32",
    norms: Literal[True],
) -> Summed: ...
@ieee
def weighted_sum_segments(
    models: Sequence[Sequence[Any]],
    weights: Any,
    outs: Sequence[Any] | None = None,
    *,
    base: Sequence[Any] | None = None,
    accumulate: Accumulate = "float32",
    norms: bool = False,
) -> Sequence[Any] | Summed:
    """The weighted sum of models in separate tensors, without flattening them: outs[s] = sum_i w[i] models[i][s].

    Args:
        models: k lists of as many arrays each, of any shapes, contiguous, in CPU memory or on one CUDA device. All
            models share the size and the dtype of a tensor, one of those of ``weighted_sum``; tensors may differ.
            Read-only.
        weights, accumulate: as for ``weighted_sum``.
        outs: arrays of the same sizes, each float32 or of its tensors' dtype, written in place and overlapping nothing.
            Default: new arrays, as for ``weighted_sum`` (vectors on a device).
        base: float32 arrays of the same sizes: the sum is of base[s] - models[i][s].
        norms: whether to return the squared norms of whole models and of their sum, too, added up over the tensors in
            float64.

    Returns:
        The sums, ``outs`` if it was given, else arrays of the first model's shapes; with ``norms`` a ``Summed`` of
        them.

    Raises, Determinism: as for ``weighted_sum``.
    Cost: reads every model once, writes one; no scratch.

    >>> weighted_sum_segments([[np.float32([[1]]), np.float32([2])], [np.float32([[3]]), np.float32([4])]], [1, 1])
    [array([[4.]], dtype=float32), array([6.], dtype=float32)]
    >>> summed = weighted_sum_segments([[np.float32([3]), np.float32([[4]])]], [2], norms=True)
    >>> summed.squared_norms, summed.squared_norm_of_sum
    (array([25.]), 100.0)
    """
    totals, squares, weights = _sum_models(models, weights, outs, base, accumulate, norms)
    return Summed.of(totals, squares, weights) if norms else totals


def _sum_rows(
    rows: Sequence[Any], weights: Any, out: Any, base: Any, accumulate: str, norms: bool
) -> tuple[Any, Any, Any]:
    weights, float64 = _as_weights(weights, accumulate)
    if out is None:
        rows = listed("rows", rows)
        if not rows:
            raise ShapeError("rows: expected at least one row when there is no out, got none")
        out = memory.empty_beside(rows[0], length("rows[0]", rows[0]), _sum_dtype(rows[0], float64))
    squares = core.weighted_sum(rows, weights, out, base=base, float64=float64, norms=norms)
    return out, squares, weights


def _sum_models(
    models: Sequence[Sequence[Any]], weights: Any, outs: Any, base: Any, accumulate: str, norms: bool
) -> tuple[Sequence[Any], Any, Any]:
    weights, float64 = _as_weights(weights, accumulate)
    if outs is None:
        models = listed("models", models)
        if not models:
            raise ShapeError("models: expected at least one when there are no outs, got none")
        outs = [_sum_like(tensor, float64) for tensor in listed("models[0]", models[0])]
    squares = core.weighted_sum_segments(models, weights, outs, base=base, float64=float64, norms=norms)
    return outs, squares, weights


def _as_weights(weights: Any, accumulate: str) -> tuple[Any, bool]:
    if accumulate not in ("float32", "float64"):
        raise UnknownNameError.of("accumulate", accumulate, ["float32", "float64"])
    is_list = isinstance(weights, list | tuple)
    return numbers(
        "weights", weights, np.float64 if accumulate == "float64" else np.float32
    ) if is_list else weights, accumulate == "float64"


def _sum_like(tensor: Any, float64: bool) -> Any:
    shape, dtype = np.shape(tensor), _sum_dtype(tensor, float64)
    beside = memory.empty_beside(tensor, math.prod(shape), dtype)
    return beside.reshape(shape) if isinstance(beside, np.ndarray) else beside


def _sum_dtype(row: Any, float64: bool) -> type[np.floating[Any]]:
    """float64 where rows and sum are; a buffer has a format, everything else a dtype."""
    dtype = str(getattr(row, "dtype", getattr(row, "format", ""))).removeprefix("torch.")
    return np.float64 if float64 and dtype in ("float64", "d") else np.float32


@ieee
def accumulate(
    acc: Floats | None,
    bases: Sequence[Any],
    ys: Sequence[Any],
    scales: F64,
    weights: F64,
    *,
    out: Floats,
    partials: F64 | None = None,
) -> F64:
    """Add clients' mean gradients to a sum: out = acc + sum_i weights[i] h_i, h_i = (bases[i] - ys[i]) scales[i].

    Args:
        acc: float32[n] or float64[n], the sum so far; None for zeros.
        bases: k entries: the float32[n] that client i started from, or None if ``ys[i]`` is a difference (then
            h_i = -ys[i] scales[i]).
        ys: k arrays [n], as the clients sent them: each float32, float64, float16 or bfloat16 (torch.bfloat16, by
            DLPack) and rounded to float32 first. Read-only. An entry may also be a list of tensors of any shapes that
            have n elements together, cut alike in all lists.
        scales: float64[k]; 1 / (eta_i K_i) makes h_i the mean gradient of client i's steps.
        weights: float64[k].
        out: of the dtype and length of ``acc``, which it may be, or float32 or float64 where that is None; disjoint
            from everything else.
        partials: float64[blocks, k], in the host's memory, written: the share of each block of 16,384 elements in each
            |h_i|^2, for ``sum_of_partials``. blocks = ceil(n / 16,384), for lists of tensors the blocks of each tensor,
            one tensor behind the other. Default: not written.

    Returns:
        float64[k], the squared norms |h_i|^2. One is not finite exactly if ``ys[i]`` has a NaN or an infinity, which
        makes ``out`` invalid; a separate ``acc`` stays valid.

    Raises:
        ShapeError, DtypeError, ArrayError: an argument differs from ``Args``; nothing was written.

    Determinism: h_i is float32; the sum is in the dtype of ``acc``, one client after another: the same bits one by
        one, in batches, on every ISA level and thread count.
    Cost: reads the ys once (4 k n bytes in float32), 4 n bytes, reads ``acc`` and writes ``out`` once.
    """
    return core.accumulate(acc, out, bases, ys, scales, weights, partials)
