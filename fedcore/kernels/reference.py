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


def mix64(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def dither(n: int, seed: int, row: int) -> npt.NDArray[np.uint32]:
    """32 random bits for each of n elements, a hash of (seed, row, element)."""
    golden, elements = np.uint64(0x9E3779B97F4A7C15), np.arange(n, dtype=np.uint64)
    start = np.array([seed, row], np.uint64) + golden
    key = mix64((mix64(start[:1]) + start[1:]) ^ mix64(elements >> np.uint64(32)))
    k0, k1 = key.astype(np.uint32), (key >> np.uint64(32)).astype(np.uint32)
    u = elements.astype(np.uint32) + k0
    u = (u ^ (u >> np.uint32(16))) * np.uint32(0x7FEB352D)
    u = ((u ^ (u >> np.uint32(15))) + k1) * np.uint32(0x846CA68B)
    return u ^ (u >> np.uint32(16))


def quantise(x: F32, codec: str, codes: npt.NDArray[Any], scales: F32 | None, seed: int | None, row: int) -> None:
    """Codes of x: the nearest, ties to even; with a seed that below, or above with the lost fraction's probability."""
    x = np.asarray(x)
    random = None if seed is None else dither(len(x), seed, row)
    if scales is not None:
        blocks = np.zeros((len(scales), 64), np.float32)
        blocks.flat[: len(x)] = x
        largest = np.abs(blocks).max(axis=1, initial=0)
        used = np.isfinite(largest) & (largest >= np.float32(2.0**-112))
        scale = np.minimum(largest / np.float32(127), np.nextafter(np.finfo(np.float32).max / np.float32(127), 0))
        scales[:] = np.where(used, scale, np.where(np.isfinite(largest), 0, largest))
        inverse = np.zeros_like(largest)
        np.divide(np.float32(127), largest, out=inverse, where=used)
        blocks[~used] = 0
        t = (blocks * inverse[:, None]).ravel()[: len(x)]
        whole = np.rint(t) if random is None else np.floor(t) + (uniform24(random) < t - np.floor(t))
        codes[:] = np.clip(whole, -127, 127)
        return
    bits = x.view(np.uint32)
    sign, magnitude = (bits >> np.uint32(16)) & np.uint32(0x8000), bits & np.uint32(0x7FFFFFFF)
    kept, infinity, nan = (16, 0x7F80, 0x7FC0) if codec == "bf16" else (13, 0x7C00, 0x7E00)
    dropped = np.uint32(kept)
    if random is None:
        below = np.uint32((1 << (kept - 1)) - 1) + ((magnitude >> dropped) & np.uint32(1))
    else:
        below = random >> np.uint32(32 - kept)
    if codec == "bf16":
        finite, infinite = (magnitude + below) >> dropped, magnitude >= np.uint32(255 << 23)
    else:
        tiny, infinite = magnitude < np.uint32(113 << 23), magnitude >= np.uint32(143 << 23)
        t = np.where(tiny, magnitude, np.uint32(0)).view(np.float32) * np.float32(2.0**24)
        whole = np.rint(t) if random is None else np.floor(t) + (uniform24(random) < t - np.floor(t))
        finite = np.where(tiny, whole.astype(np.uint32), (magnitude - np.uint32(112 << 23) + below) >> dropped)
    np.asarray(codes).view(np.uint16)[:] = sign | np.where(np.isnan(x), nan, np.where(infinite, infinity, finite))


def uniform24(random: npt.NDArray[np.uint32]) -> F32:
    """Numbers in [0, 1) from the upper 24 bits."""
    return (random >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def dequantise(codes: npt.NDArray[Any], scales: F32 | None, codec: str, out: F32) -> None:
    """out = what the codes stand for; scale * code for int8."""
    if scales is not None:
        out[:] = np.repeat(scales, 64)[: len(codes)] * codes.astype(np.float32)
    elif codec == "f16":
        out[:] = codes.view(np.float16)
    else:
        out[:] = (codes.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def squared_norms(rows: Sequence[F32]) -> F64:
    """|row|^2 of each row, in float64."""
    return np.array([np.square(row, dtype=np.float64).sum() for row in rows], np.float64)
