"""The kernels' specification: each native function's definition in a few lines of NumPy.

Same names, arguments and results as ``fedcore._core``, without its checks. Elementwise results are bit-equal to the
native ones; norms agree to float64 rounding, because the native ones fold 16 lanes in a tree.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def weighted_sum(rows: Sequence[F32], weights: F32, out: F32) -> None:
    """out = sum_i weights[i] rows[i], one row after another in float32."""
    out[:] = 0
    for row, weight in zip(rows, weights, strict=True):
        out += weight * np.asarray(row)


def gradient(base: F32 | None, y: F32, scale: float) -> F32:
    """h = (base - y) scale in float64, rounded once; h = -y scale where there is no base."""
    difference = -np.asarray(y, np.float64) if base is None else np.asarray(base, np.float64) - np.asarray(y)
    return (difference * scale).astype(np.float32)


def accumulate(acc: F64, out: F64, bases: Sequence[F32 | None], ys: Sequence[F32], scales: F64, weights: F64) -> F64:
    """out = acc + sum_i weights[i] h_i; the squared norm of each h_i."""
    out[:] = acc
    hs = [gradient(*sent) for sent in zip(bases, ys, scales, strict=True)]
    for h, weight in zip(hs, weights, strict=True):
        out += weight * h.astype(np.float64)
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
    sum: F64,
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
    v[:] = from_sum * sum if total is None else from_sum * sum + from_total * total
    if total is not None and total_out is not None:
        total_out[:] = total + keep_sum * sum + keep_v * v.astype(np.float64)
    x_out[:] = x.astype(np.float64) - gamma * v.astype(np.float64)
    v_square, x_square = squared_norms([v, x_out])
    return float(v_square), float(x_square)


def direction_step(
    y: F32,
    grad: F32,
    grad_prev: F32 | None,
    offset: F32 | None,
    x: F32 | None,
    lr: float,
    a: float,
    b: float,
    mu: float,
    weight_decay: float,
) -> None:
    """y -= lr (a (grad + weight_decay y) + b grad_prev + offset + mu (y - x)), in float32 and in that order."""
    rate, of_grad, of_prev, of_drift, decay = map(np.float32, (lr, a, b, mu, weight_decay))
    d = of_grad * (grad + decay * y if decay else np.asarray(grad))
    if of_prev:
        d += of_prev * np.asarray(grad_prev)
    if offset is not None:
        d += offset
    if of_drift:
        d += of_drift * (y - np.asarray(x))
    y -= rate * d


def direction_offset(terms: Sequence[F32 | F64], coefficients: F64, out: F32) -> None:
    """out = sum_i coefficients[i] terms[i], one term after another in float64, rounded once."""
    total = coefficients[0] * np.asarray(terms[0], np.float64)
    for term, coefficient in zip(terms[1:], coefficients[1:], strict=True):
        total += coefficient * np.asarray(term, np.float64)
    out[:] = total


def mix(models: Sequence[F32], starts: npt.NDArray[np.int64], columns: npt.NDArray[np.int64], weights: F32) -> None:
    """models[i] = sum_e weights[e] models[columns[e]] over row i's entries, one after another in float32."""
    before = [np.array(model) for model in models]
    for i, model in enumerate(models):
        entries = range(starts[i], starts[i + 1])
        model[:] = 0 if not entries else weights[entries[0]] * before[columns[entries[0]]]
        for e in entries[1:]:
            model += weights[e] * before[columns[e]]


def squared_norms(rows: Sequence[F32]) -> F64:
    """|row|^2 of each row, in float64."""
    return np.array([np.square(row, dtype=np.float64).sum() for row in rows], np.float64)
