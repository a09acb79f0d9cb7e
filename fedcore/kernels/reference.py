"""The kernels' specification: each native function's definition in a few lines of NumPy.

Same names, arguments and results as ``fedcore._core``, without its checks. Elementwise results are bit-equal to the
native ones; norms agree to 1e-5, because the native ones add float32 squares on 16 lanes.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Sum: TypeAlias = npt.NDArray[np.floating[Any]]


def weighted_sum(rows: Sequence[F32], weights: F32, out: F32, *, float64: bool) -> None:
    """out = sum_i weights[i] rows[i], one row after another in float32 or float64, rounded once to float32."""
    total = np.zeros(out.shape, np.float64 if float64 else np.float32)
    for row, weight in zip(rows, weights, strict=True):
        total += total.dtype.type(weight) * np.asarray(row, total.dtype)
    out[:] = total


def weighted_sum_segments(models: Sequence[Sequence[F32]], weights: F32, outs: Sequence[F32], *, float64: bool) -> None:
    """outs[s] = sum_i weights[i] models[i][s], each as ``weighted_sum``."""
    for s, out in enumerate(outs):
        weighted_sum([model[s] for model in models], weights, out, float64=float64)


def gradient(base: F32 | None, y: F32, scale: float) -> F32:
    """h = (base - y) scale in float32; h = -y scale where there is no base."""
    y = np.asarray(y)
    return (-y if base is None else np.asarray(base) - y) * np.float32(scale)


def accumulate(acc: Sum, out: Sum, bases: Sequence[F32 | None], ys: Sequence[F32], scales: F64, weights: F64) -> F64:
    """out = acc + sum_i weights[i] h_i in the dtype of acc; the squared norm of each h_i."""
    out[:] = acc
    hs = [gradient(*sent) for sent in zip(bases, ys, scales, strict=True)]
    for h, weight in zip(hs, weights, strict=True):
        out += out.dtype.type(weight) * h.astype(out.dtype)
    return squared_norms(hs)


def exchange(
    acc: F64,
    out: F64,
    bases: Sequence[F32 | None],
    ys: Sequence[F32],
    scales: F64,
    weights: F64,
    old_rows: Sequence[F32 | None],
    anchors: Sequence[F32 | None],
    new_rows: Sequence[F32],
) -> F64:
    """out = acc + sum_i weights[i] (h_i - old_rows[i] + anchors[i]); new_rows[i] = h_i; squared norms as above."""
    out[:] = acc
    hs = [gradient(*sent) for sent in zip(bases, ys, scales, strict=True)]
    for h, weight, old, anchor, new in zip(hs, weights, old_rows, anchors, new_rows, strict=True):
        change = h.astype(np.float64)
        if old is not None:
            change -= old
        if anchor is not None:
            change += anchor
        out += weight * change
        new[:] = h
    return squared_norms(hs)


def server_step(
    sum: Sum,
    total: F64 | None,
    x: F32,
    v: F32,
    total_out: F64 | None,
    x_out: F32,
    *,
    from_sum: float,
    from_total: float,
    keep_sum: float,
    keep_v: float,
    gamma: float,
) -> tuple[float, float]:
    """v = from_sum A + from_total T; T' = T + keep_sum A + keep_v v; x' = x - gamma v; (|v|^2, |x'|^2)."""
    sum = sum.astype(np.float64)
    v[:] = from_sum * sum if total is None else from_sum * sum + from_total * total
    if total is not None and total_out is not None:
        total_out[:] = total + keep_sum * sum + keep_v * v.astype(np.float64)
    x_out[:] = x.astype(np.float64) - gamma * v.astype(np.float64)
    v_square, x_square = squared_norms([v, x_out])
    return float(v_square), float(x_square)


def squared_norms(rows: Sequence[F32]) -> F64:
    """|row|^2 of each row, in float64."""
    return np.array([np.square(row, dtype=np.float64).sum() for row in rows], np.float64)
