"""aggregate: sums over clients in one pass, and the server's step along them."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcore.errors import ShapeError, UnknownNameError
from fedcore.kernels.backend import implementation

Sum: TypeAlias = npt.NDArray[np.floating[Any]]


def weighted_sum(
    rows: Sequence[Any], weights: Any, out: Any = None, *, accumulate: Literal["float32", "float64"] = "float32"
) -> Any:
    """The weighted sum of separate rows, sum_i weights[i] rows[i], without stacking them.

    Args:
        rows: k arrays float32[n] in CPU memory (NumPy, torch, anything with DLPack or the buffer protocol).
            Read-only.
        weights: float32[k], or a list of k numbers.
        out: float32[n], written in place and overlapping no row; a new NumPy array if None.
        accumulate: what the sum is kept in while it grows; float64 is rounded once to float32 at the end.

    Returns:
        float32[n], ``out`` if it was given.

    Raises:
        ShapeError, DtypeError, ArrayError: an argument is not what is said above; nothing was written.

    Determinism: one row after another in their order: the same bits on every ISA level and thread count.
    Cost: reads 4 k n bytes once, writes 4 n bytes.

    >>> weighted_sum([np.float32([1, 2]), np.float32([3, 4])], [0.5, 0.5])
    array([2., 3.], dtype=float32)
    """
    weights, float64 = _as_weights(weights), _is_float64(accumulate)
    if out is None:
        if not rows:
            raise ShapeError("rows: expected at least one row when there is no out, got none")
        out = np.empty(len(rows[0]), np.float32)
    implementation.weighted_sum(rows, weights, out, float64=float64)
    return out


def weighted_sum_segments(
    models: Sequence[Sequence[Any]],
    weights: Any,
    outs: Sequence[Any] | None = None,
    *,
    accumulate: Literal["float32", "float64"] = "float32",
) -> Sequence[Any]:
    """The weighted sum of models whose tensors lie apart, without flattening them: outs[s] = sum_i w[i] models[i][s].

    Args:
        models: k lists of as many float32 arrays each, of any shapes, contiguous, in CPU memory. Read-only.
        weights: float32[k], or a list of k numbers.
        outs: float32 arrays of the same sizes, written in place and overlapping nothing; new NumPy arrays if None.
        accumulate: as for ``weighted_sum``.

    Returns:
        The sums, ``outs`` if it was given, else arrays of the first model's shapes.

    Raises, Determinism: as for ``weighted_sum``.
    Cost: reads every model once, writes one; no scratch.

    >>> weighted_sum_segments([[np.float32([[1]]), np.float32([2])], [np.float32([[3]]), np.float32([4])]], [1, 1])
    [array([[4.]], dtype=float32), array([6.], dtype=float32)]
    """
    if outs is None:
        if not models:
            raise ShapeError("models: expected at least one when there are no outs, got none")
        outs = [np.empty(tuple(tensor.shape), np.float32) for tensor in models[0]]
    implementation.weighted_sum_segments(models, _as_weights(weights), outs, float64=_is_float64(accumulate))
    return outs


def _as_weights(weights: Any) -> Any:
    return np.array(weights, np.float32) if isinstance(weights, list | tuple) else weights


def _is_float64(accumulate: str) -> bool:
    if accumulate not in ("float32", "float64"):
        raise UnknownNameError.of("accumulate", accumulate, ["float32", "float64"])
    return accumulate == "float64"


def accumulate(
    acc: Sum,
    bases: Sequence[Any],
    ys: Sequence[Any],
    scales: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64],
    *,
    out: Sum,
) -> npt.NDArray[np.float64]:
    """Add clients' mean gradients to a sum: out = acc + sum_i weights[i] h_i, h_i = (bases[i] - ys[i]) scales[i].

    Args:
        acc: float32[n] or float64[n], the sum so far.
        bases: k entries: the float32[n] that client i started from, or None where ``ys[i]`` is no model but a
            difference (then h_i = -ys[i] scales[i]).
        ys: k arrays float32[n], as the clients sent them. Read-only.
        scales: float64[k]; 1 / (eta_i K_i) makes h_i the mean gradient of client i's steps.
        weights: float64[k].
        out: of the dtype and length of ``acc``; ``acc`` itself, or disjoint from it.

    Returns:
        float64[k], the squared norms |h_i|^2. One that is not finite tells that ``ys[i]`` held a NaN or an infinity:
        ``out`` is then worthless, and a separate ``acc`` still good.

    Raises:
        ShapeError, DtypeError, ArrayError: an argument is not what is said above; nothing was written.

    Determinism: h_i is float32; the sum is in the dtype of ``acc``, one client after another: the same bits one by
        one, in batches, on every ISA level and thread count.
    Cost: reads 4 k n + 4 n bytes, and reads and writes the sum once.
    """
    norms: npt.NDArray[np.float64] = implementation.accumulate(acc, out, bases, ys, scales, weights)
    return norms


def server_step(
    sum: Sum,
    total: npt.NDArray[np.float64] | None,
    x: npt.NDArray[np.float32],
    *,
    from_sum: float,
    from_total: float = 0.0,
    keep_sum: float = 0.0,
    keep_v: float = 0.0,
    gamma: float,
    v: npt.NDArray[np.float32],
    total_out: npt.NDArray[np.float64] | None,
    x_out: npt.NDArray[np.float32],
) -> tuple[float, float]:
    """The linear step that ends a round, from the round's sum A and the running total T.

    v = from_sum A + from_total T;  T' = T + keep_sum A + keep_v v;  x' = x - gamma v.

    Args:
        sum: float32[n] or float64[n], A.
        total: float64[n], T, or None where the method keeps no total.
        x: float32[n].
        v, total_out, x_out: outputs float32[n], float64[n] (None where ``total`` is), float32[n]; the last two may be
            the inputs that they replace.

    Returns:
        |v|^2 and |x'|^2 in float64; the second is not finite exactly if an element of x' is not.

    Raises:
        ShapeError, DtypeError, ArrayError: an argument is not what is said above; nothing was written.

    Determinism: elementwise in float64, v and x' rounded once to float32; T' sees v as it was rounded.
    Cost: reads 12 n bytes (20 n with a total), writes 8 n (16 n).
    """
    v_square, x_square = implementation.server_step(
        sum,
        total,
        x,
        v,
        total_out,
        x_out,
        from_sum=from_sum,
        from_total=from_total,
        keep_sum=keep_sum,
        keep_v=keep_v,
        gamma=gamma,
    )
    return v_square, x_square
