"""aggregate: sums over clients in one pass, and the server's step along them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.errors import ShapeError
from fedcore.kernels.backend import implementation


def weighted_sum(rows: Sequence[Any], weights: Any, out: Any = None) -> Any:
    """The weighted sum of separate rows, sum_i weights[i] rows[i], without stacking them.

    Args:
        rows: k arrays float32[n] in CPU memory (NumPy, torch, anything with DLPack or the buffer protocol).
            Read-only.
        weights: float32[k], or a list of k numbers.
        out: float32[n], written in place and overlapping no row; a new NumPy array if None.

    Returns:
        float32[n], ``out`` if it was given.

    Raises:
        ShapeError, DtypeError, ArrayError: an argument is not what is said above; nothing was written.

    Determinism: float32, one row after another in their order: the same bits on every ISA level and thread count.
    Cost: reads 4 k n bytes once, writes 4 n bytes.

    >>> weighted_sum([np.float32([1, 2]), np.float32([3, 4])], [0.5, 0.5])
    array([2., 3.], dtype=float32)
    """
    if isinstance(weights, list | tuple):
        weights = np.array(weights, np.float32)
    if out is None:
        if not rows:
            raise ShapeError("rows: expected at least one row when there is no out, got none")
        out = np.empty(len(rows[0]), np.float32)
    implementation.weighted_sum(rows, weights, out)
    return out


def accumulate(
    acc: npt.NDArray[np.float64],
    bases: Sequence[Any],
    ys: Sequence[Any],
    scales: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64],
    *,
    out: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Add clients' mean gradients to a sum: out = acc + sum_i weights[i] h_i, h_i = (bases[i] - ys[i]) scales[i].

    Args:
        acc: float64[n], the sum so far.
        bases: k entries: the float32[n] that client i started from, or None where ``ys[i]`` is no model but a
            difference (then h_i = -ys[i] scales[i]).
        ys: k arrays float32[n], as the clients sent them. Read-only.
        scales: float64[k]; 1 / (eta_i K_i) makes h_i the mean gradient of client i's steps.
        weights: float64[k].
        out: float64[n]; ``acc`` itself, or disjoint from it.

    Returns:
        float64[k], the squared norms |h_i|^2. One that is not finite tells that ``ys[i]`` held a NaN or an infinity:
        ``out`` is then worthless, and a separate ``acc`` still good.

    Raises:
        ShapeError, DtypeError, ArrayError: an argument is not what is said above; nothing was written.

    Determinism: h_i is rounded once to float32; the sum is float64, one client after another: the same bits one by
        one, in batches, on every ISA level and thread count.
    Cost: reads 4 k n + 12 n bytes, writes 8 n bytes.
    """
    norms: npt.NDArray[np.float64] = implementation.accumulate(acc, out, bases, ys, scales, weights)
    return norms


def server_step(
    sum: npt.NDArray[np.float64],
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
        sum: float64[n], A.
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
