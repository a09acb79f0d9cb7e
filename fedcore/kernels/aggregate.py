"""aggregate: sums over clients in one pass, and the server's step along them."""

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from fedcore import memory
from fedcore.arguments import length, listed, numbers
from fedcore.errors import ShapeError, UnknownNameError
from fedcore.float_mode import ieee
from fedcore.kernels.forms import Linear
from fedcore.kernels.summed import Summed
from fedcore.native import core
from fedcore.typing import F64

Sum: TypeAlias = npt.NDArray[np.floating[Any]]
Accumulate: TypeAlias = Literal["float32", "float64"]

KEPT = Linear(T=1)
"""A running total that stays as it is."""


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
        out: float32[n], or n numbers of the rows' dtype, written in place and overlapping no input. If None a new
            array beside the rows, NumPy's or a ``DeviceArray``: float32, or float64 where rows and sum are, so that
            nothing is thrown away.
        base: float32[n]: the sum is of base - rows[i], and the differences are never stored. Read-only.
        accumulate: the sum's precision while it grows.
        norms: whether to return the squared norms of all rows and of the sum too, from the same pass.

    Returns:
        The sum, ``out`` if it was given. With ``norms`` a ``Summed``: the sum, float64[k] |h_i|^2 and
        |sum_i w_i h_i|^2; with them which rows are finite and how diverse.

    Raises:
        ShapeError, DtypeError, ArrayError: an argument is not what is said above; nothing was written.

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
    """The weighted sum of models whose tensors lie apart, without flattening them: outs[s] = sum_i w[i] models[i][s].

    Args:
        models: k lists of as many arrays each, of any shapes, contiguous, in CPU memory or on one CUDA device. All
            models share the size and the dtype of a tensor, one of those of ``weighted_sum``; tensors may differ.
            Read-only.
        weights, accumulate: as for ``weighted_sum``.
        outs: arrays of the same sizes, each float32 or of its tensors' dtype, written in place and overlapping nothing;
            new arrays if None, as for ``weighted_sum`` (vectors on a device).
        base: float32 arrays of the same sizes: the sum is of base[s] - models[i][s].
        norms: whether to return the squared norms of whole models and of their sum too, added up over the tensors in
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
    acc: Sum | None,
    bases: Sequence[Any],
    ys: Sequence[Any],
    scales: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64],
    *,
    out: Sum,
    partials: F64 | None = None,
) -> npt.NDArray[np.float64]:
    """Add clients' mean gradients to a sum: out = acc + sum_i weights[i] h_i, h_i = (bases[i] - ys[i]) scales[i].

    Args:
        acc: float32[n] or float64[n], the sum so far; None for zeros.
        bases: k entries: the float32[n] that client i started from, or None where ``ys[i]`` is no model but a
            difference (then h_i = -ys[i] scales[i]).
        ys: k arrays [n], as the clients sent them: each float32, float64, float16 or bfloat16 (torch.bfloat16, by
            DLPack) and rounded to float32 first. Read-only. Each may also be a list of tensors of any shapes that lie
            apart and have n elements together, cut alike in all lists.
        scales: float64[k]; 1 / (eta_i K_i) makes h_i the mean gradient of client i's steps.
        weights: float64[k].
        out: of the dtype and length of ``acc``, which it may be, or float32 or float64 where that is None; disjoint
            from everything else.
        partials: float64[blocks, k], in the host's memory, written: the share of each block of 16,384 elements in each
            |h_i|^2, for ``sum_of_partials``; blocks = ceil(n / 16,384), or where tensors lie apart the blocks of each
            tensor, one tensor behind the other. Nobody gets them if None.

    Returns:
        float64[k], the squared norms |h_i|^2. One that is not finite tells that ``ys[i]`` held a NaN or an infinity:
        ``out`` is then worthless, and a separate ``acc`` still good.

    Raises:
        ShapeError, DtypeError, ArrayError: an argument is not what is said above; nothing was written.

    Determinism: h_i is float32; the sum is in the dtype of ``acc``, one client after another: the same bits one by
        one, in batches, on every ISA level and thread count.
    Cost: reads the ys once (4 k n bytes in float32), 4 n bytes, reads ``acc`` and writes ``out`` once.
    """
    norms: npt.NDArray[np.float64] = core.accumulate(acc, out, bases, ys, scales, weights, partials)
    return norms


@ieee
def server_step(
    sum: Sum,
    total: npt.NDArray[np.float64] | None,
    x: npt.NDArray[np.float32],
    *,
    v_of: Linear,
    total_of: Linear = KEPT,
    gamma: float,
    momentum: npt.NDArray[np.float32] | None = None,
    control: npt.NDArray[np.float64] | None = None,
    v: npt.NDArray[np.float32],
    total_out: npt.NDArray[np.float64] | None,
    x_out: npt.NDArray[np.float32],
    partials: F64 | None = None,
) -> tuple[float, float]:
    """The linear step that ends a round, from the round's sums A and B and the running total T::

        v  = v_of.A A + v_of.T T + v_of.g g + v_of.B B
        T' = total_of.T T + total_of.A A + total_of.B B + total_of.g g + total_of.v v
        x' = x - gamma v

    Args:
        sum: float32[n] or float64[n], A.
        total: float64[n], T, or None where the method keeps no total.
        x: float32[n].
        momentum: float32[n], g, the direction of the round before, or None.
        control: float64[n], B, a second sum of the round, or None.
        v, total_out, x_out: outputs float32[n], float64[n] (None where ``total`` is), float32[n]; each may be the
            input that it replaces: ``momentum``, ``total``, ``x``.
        partials: float64[ceil(n / 16,384), 2], written: the blocks' shares of |v|^2 and |x'|^2, as of ``accumulate``.

    Returns:
        |v|^2 and |x'|^2 in float64; the second is not finite exactly if an element of x' is not.

    Raises:
        ShapeError, DtypeError, ArrayError: an argument is not what is said above; nothing was written.

    Determinism: elementwise in float64, each formula from its left to its right and without the terms that are None;
        v and x' rounded once to float32; T' sees v as it was rounded.
    Cost: reads 12 n bytes (8 n more with a total, 4 n with a momentum, 8 n with a control), writes 8 n (16 n).
    """
    v_square, x_square = core.server_step(
        sum,
        total,
        momentum,
        control,
        x,
        v,
        total_out,
        x_out,
        v_of=v_of,
        total_of=total_of,
        gamma=gamma,
        partials=partials,
    )
    return v_square, x_square
