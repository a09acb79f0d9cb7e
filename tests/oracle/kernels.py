"""Reference implementations of the kernels.

Elementwise results equal the native bits. Norms agree to 1e-5: the native norms add float32 squares on 16 lanes, these
add float64 squares.
"""

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcore.arrays import F32, F64
from fedcore.kernels import Linear, Terms
from fedcore.kernels.forms import ANCHORED, KEPT, H

Sum: TypeAlias = npt.NDArray[np.floating[Any]]

BLOCK = 16_384  # the elements of a block; squares are added within blocks first
P, Q = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F)
LANES = 8  # the lanes of a checksum


def weighted_sum(
    rows: Sequence[Any], weights: Sum, out: Any, *, base: F32 | None = None, float64: bool, norms: bool = False
) -> F64 | None:
    """Set out = sum_i weights[i] h_i, added in order in float32 or float64 and rounded once to the dtype of out.

    h_i is row i, or base - row i: float64 if the row and the sum are float64, else float32. With ``norms``, return
    |h_i|^2 and |sum|^2.
    """
    total = np.zeros(np.shape(out), np.float64 if float64 else np.float32)
    hs = []
    for row, weight in zip(rows, weights, strict=True):
        y = numbers(row).reshape(total.shape)
        y = y.astype(np.float64 if y.dtype == total.dtype == np.float64 else np.float32, copy=False)
        hs.append(y if base is None else np.asarray(base, y.dtype).reshape(y.shape) - y)
        total += total.dtype.type(weight) * hs[-1].astype(total.dtype)
    write(out, total)
    return squared_norms([*hs, total]) if norms else None


def weighted_sum_segments(
    models: Sequence[Sequence[Any]],
    weights: Sum,
    outs: Sequence[Any],
    *,
    base: Sequence[F32] | None = None,
    float64: bool,
    norms: bool = False,
) -> F64 | None:
    """Set outs[s] = sum_i weights[i] h_i[s], as ``weighted_sum``. With ``norms``, return the norms summed over s."""
    squares = np.zeros(len(models) + 1)
    for s, out in enumerate(outs):
        rows, x = [model[s] for model in models], None if base is None else base[s]
        of_segment = weighted_sum(rows, weights, out, base=x, float64=float64, norms=norms)
        squares += 0 if of_segment is None else of_segment
    return squares if norms else None


def numbers(array: Any) -> npt.NDArray[Any]:
    """Return the array as a NumPy array, or an exact float32 copy of bfloat16."""
    if "bfloat16" not in str(getattr(array, "dtype", "")):
        return np.asarray(array)
    return np.asarray(array.float() if hasattr(array, "float") else array.astype(np.float32))


def write(out: Any, total: Sum) -> None:
    """Set out = total, rounded once to the dtype of out."""
    dtype = str(out.dtype).removeprefix("torch.")
    with np.errstate(over="ignore"):  # an overflow becomes an infinity
        rounded = to_bfloat16(total) if dtype == "bfloat16" else total.astype(dtype)
    out[...] = out.new_tensor(rounded) if hasattr(out, "new_tensor") else rounded


def to_bfloat16(total: Sum) -> F32:
    """Return the nearest numbers of 8 significant bits in float32's range, ties to even."""
    _, exponent = np.frexp(total)
    unit = np.maximum(exponent, -125) - 8  # 2^-133 where bfloat16 is subnormal
    return np.asarray(np.ldexp(np.rint(np.ldexp(total.astype(np.float64), -unit)), unit), np.float32)


def floats(y: Any) -> F32:
    """Return a client's vector rounded to float32."""
    if str(getattr(y, "dtype", "")) == "torch.bfloat16":  # NumPy lacks this dtype
        y = y.float()
    return np.asarray(y).astype(np.float32)


def gradient(base: F32 | None, y: Any, scale: float) -> F32:
    """Return h = (base - y) scale in float32, or -y scale without a base."""
    y = floats(y)
    h: F32 = (-y if base is None else np.asarray(base) - y) * np.float32(scale)
    return h


def whole(y: Any) -> Any:
    """Return a client's update as one vector, with separate tensors concatenated."""
    return np.concatenate([floats(tensor).reshape(-1) for tensor in y]) if isinstance(y, list | tuple) else y


def accumulate(
    acc: Sum | None,
    bases: Sequence[F32 | None],
    ys: Sequence[Any],
    scales: F64,
    weights: F64,
    *,
    out: Sum,
    partials: F64 | None = None,
) -> F64:
    """Set out = acc + sum_i weights[i] h_i in its dtype, with acc = 0 for None. Return the squared norm of each h_i."""
    out[:] = 0 if acc is None else acc
    hs = [gradient(*sent) for sent in zip(bases, map(whole, ys), scales, strict=True)]
    for h, weight in zip(hs, weights, strict=True):
        out += out.dtype.type(weight) * h.astype(out.dtype)
    return added(squares_of_blocks(hs, sizes_of(ys)), partials)


def gram_matrix(bases: Sequence[F32 | None], ys: Sequence[Any], scales: F64, *, partials: F64 | None = None) -> F64:
    """Return the inner products of all h_i, added on 8 lanes in each block, folded in a tree, block by block."""
    h = np.array([gradient(*sent) for sent in zip(bases, map(whole, ys), scales, strict=True)], np.float64)
    total = np.zeros((len(h), len(h)))
    for number, start in enumerate(range(0, h.shape[1], BLOCK)):
        block = h[:, start : start + BLOCK]
        block = np.pad(block, ((0, 0), (0, -block.shape[1] % 8))).reshape(len(h), -1, 8)
        lanes = np.add.accumulate(block[:, None] * block[None], axis=2)[:, :, -1]
        for width in (4, 2, 1):
            lanes = lanes[..., :width] + lanes[..., width : 2 * width]
        total += lanes[..., 0]
        if partials is not None:
            partials[number] = lanes[..., 0][np.triu_indices(len(h))]
    return total


def column_statistic(
    bases: Sequence[F32 | None],
    ys: Sequence[Any],
    scales: F64,
    out: F32,
    *,
    mixing: F64 | None,
    rows: int,
    first: int,
    last: int,
    nearest: int,
) -> None:
    """Set out to the mean of the sorted values first .. last - 1 of each column, or of those nearest the median.

    Of equally near values, half of the lower and half of the higher ones count.
    """
    h = np.array([gradient(*sent) for sent in zip(bases, map(whole, ys), scales, strict=True)])
    if mixing is not None:
        h = np.array([combination(list(h), row).astype(np.float32) for row in mixing])
    values = np.sort(h, axis=0).astype(np.float64)
    share = np.ones((rows, len(out)))
    share[:first] = share[last:] = 0
    if nearest:
        median = values[(rows - 1) // 2] + values[rows // 2]
        pairs, rank = values[: rows - nearest] + values[nearest:], np.arange(rows)[:, None]
        ahead = [rank - (pairs < median).sum(axis=0), rank - (pairs <= median).sum(axis=0)]
        share = sum(((at >= 0) & (at < nearest)).astype(np.float64) for at in ahead) / 2
    total = np.add.accumulate(np.where(share > 0, share * values, 0.0), axis=0)[-1] if rows else 0.0
    out[:] = (total / (nearest or last - first)).astype(np.float32) + np.float32(0)


def decoded(row: Any, n: int) -> F32:
    """Return a row of ``exchange`` as a float32 vector."""
    if row is None:
        return np.zeros(n, np.float32)
    if not isinstance(row, tuple):
        return np.array(row)
    codec, codes, scales = row
    out = np.empty(n, np.float32)
    dequantise(codes, scales, codec, out)
    return out


def exchange(
    acc: F64,
    bases: Sequence[F32 | None],
    ys: Sequence[Any],
    scales: F64,
    weights: F64,
    old_rows: Sequence[Any],
    anchors: Sequence[F32 | None],
    new_rows: Sequence[Any],
    *,
    out: F64,
    row: Terms = H,
    adds: Terms = ANCHORED,
    keys: npt.NDArray[np.uint64] | None = None,
    sums: npt.NDArray[np.uint64] | None = None,
    first: int = 0,
    partials: F64 | None = None,
) -> F64:
    """Set each new row to the terms of ``row``, and out = acc + sum_i weights[i] (the terms of ``adds``).

    ``adds`` uses the new rows as stored. Return |h_i|^2, infinite if the stored row is not finite.
    """
    out[:] = acc
    hs = [gradient(*sent) for sent in zip(bases, ys, scales, strict=True)]
    shares = squares_of_blocks(hs)
    for i, (h, weight, old_row, new_row) in enumerate(zip(hs, weights, old_rows, new_rows, strict=True)):
        old, anchor = decoded(old_row, len(h)), decoded(anchors[i], len(h))
        new = np.float32(row.h) * h
        for coefficient, term in ((row.r, old), (row.q, anchor)):
            if coefficient:
                new = new + np.float32(coefficient) * term
        if isinstance(new_row, tuple):
            codec, codes, of_codes = new_row
            assert keys is not None
            seed, of_row = keys[i].tolist()
            quantise(new, codec, codes, of_codes, seed, of_row, first)
            new = decoded(new_row, len(h))
        else:
            new_row[:] = new
            if sums is not None:
                sums[i] = checksum(new_row, 64 << 10)
        change = adds.row * new.astype(np.float64) + adds.r * old.astype(np.float64)
        for coefficient, term in ((adds.h, h), (adds.q, anchor)):
            if coefficient:
                change = change + coefficient * term.astype(np.float64)
        out += weight * change
        stored = squares_of_blocks([new])[:, 0]
        shares[~np.isfinite(stored) & np.isfinite(shares[:, i]), i] = np.inf
    return added(shares, partials)


def server_step(
    sum: Sum,
    total: F64 | None,
    x: F32,
    *,
    v_of: Linear,
    total_of: Linear = KEPT,
    gamma: float,
    momentum: F32 | None = None,
    control: F64 | None = None,
    v: F32,
    total_out: F64 | None,
    x_out: F32,
    partials: F64 | None = None,
) -> tuple[float, float]:
    """Set v = v_of(A, T, g, B), T' = total_of(T, A, B, g, v) and x' = x - gamma v. Return (|v|^2, |x'|^2)."""
    given = {"A": sum, "B": control, "T": total, "g": momentum}
    wide = {letter: vector.astype(np.float64) for letter, vector in given.items() if vector is not None}

    def combined(form: Linear, letters: str) -> F64:
        terms = [getattr(form, letter) * wide[letter] for letter in letters if letter in wide]
        return functools.reduce(np.add, terms)

    v[:] = combined(v_of, "ATgB")
    x_wide, wide["v"] = x.astype(np.float64), v.astype(np.float64)
    if total_out is not None:
        total_out[:] = combined(total_of, "TABgv" if total_of.g else "TABv")
    x_out[:] = x_wide - gamma * wide["v"]
    v_square, x_square = squared_norms([v, x_out], partials=partials)
    return float(v_square), float(x_square)


def direction_step(
    y: F32,
    grad: F32,
    *,
    lr: float,
    a: float = 1.0,
    b: float = 0.0,
    mu: float = 0.0,
    weight_decay: float = 0.0,
    grad_prev: F32 | None = None,
    offset: F32 | None = None,
    x: F32 | None = None,
) -> None:
    """Compute y -= lr (a (grad + weight_decay y) + b grad_prev + offset + mu (y - x)) in float32, in this order."""
    rate, of_grad, of_prev, of_drift, decay = map(np.float32, (lr, a, b, mu, weight_decay))
    d = of_grad * (grad + decay * y if decay else np.asarray(grad))
    if of_prev:
        d += of_prev * np.asarray(grad_prev)
    if offset is not None:
        d += offset
    if of_drift:
        d += of_drift * (y - np.asarray(x))
    y -= rate * d


def combine(terms: Sequence[F32 | F64], coefficients: F64, out: F32 | F64) -> None:
    """Set out = sum_i coefficients[i] terms[i], added in order in float64 and rounded once."""
    out[:] = combination(terms, coefficients)


def combined_square(terms: Sequence[F32 | F64], coefficients: F64, partials: F64 | None = None) -> float:
    """Return |sum_i coefficients[i] terms[i]|^2 in float64."""
    return float(squared_norms([combination(terms, coefficients)], partials=partials)[0])


def combination(terms: Sequence[F32 | F64], coefficients: F64) -> F64:
    """Return the float64 sum that ``combine`` rounds."""
    total: F64 = coefficients[0] * np.asarray(terms[0], np.float64)
    for term, coefficient in zip(terms[1:], coefficients[1:], strict=True):
        total += coefficient * np.asarray(term, np.float64)
    return total


def optimizer_step(
    v: F32,
    m: F32,
    s: F32 | None,
    x: F32,
    *,
    from_m: float,
    from_v: float,
    from_s: float = 1.0,
    from_square: float = 1.0,
    yogi: bool = False,
    tau: float = 0.0,
    gamma: float,
    m_out: F32,
    s_out: F32 | None,
    x_out: F32,
    partials: F64 | None = None,
) -> float:
    """Set m', s' and x' in float32, and return |x'|^2.

    m' = from_m m + from_v v; s' = from_s s + from_square v^2, or s - from_square v^2 sign(s - v^2) if yogi.
    x' = x - gamma m' / (sqrt(s') + tau), or x - gamma m' without s.
    """
    v, x = np.asarray(v), np.asarray(x)
    u = m_next = np.float32(from_m) * np.asarray(m) + np.float32(from_v) * v
    if s is not None and s_out is not None:
        square, s = v * v, np.asarray(s)
        if yogi:
            s_out[:] = s - np.float32(from_square) * square * np.sign(s - square)
        else:
            s_out[:] = np.float32(from_s) * s + np.float32(from_square) * square
        u = m_next / (np.sqrt(s_out) + np.float32(tau))
    m_out[:] = m_next
    x_out[:] = x - np.float32(gamma) * u
    return float(squared_norms([x_out], partials=partials)[0])


def mix(models: Sequence[F32], starts: npt.NDArray[np.int64], columns: npt.NDArray[np.int64], weights: F32) -> None:
    """Set models[i] = sum_e weights[e] models[columns[e]] over row i's entries, added in order in float32."""
    before = [np.array(model) for model in models]
    for i, model in enumerate(models):
        entries = range(starts[i], starts[i + 1])
        model[:] = 0 if not entries else weights[entries[0]] * before[columns[entries[0]]]
        for e in entries[1:]:
            model += weights[e] * before[columns[e]]


def mix64(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finaliser of splitmix64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def dither(n: int, seed: int, row: int, first: int = 0) -> npt.NDArray[np.uint32]:
    """Return 32 random bits per element: a hash of (seed, row, element), rotated for the second half of every 64."""
    golden, elements = np.uint64(0x9E3779B97F4A7C15), np.uint64(first) + np.arange(n, dtype=np.uint64)
    start = np.array([seed, row], np.uint64) + golden
    key = mix64((mix64(start[:1]) + start[1:]) ^ mix64(elements >> np.uint64(32)))
    k0, k1 = key.astype(np.uint32), (key >> np.uint64(32)).astype(np.uint32)
    u = (elements & ~np.uint64(32)).astype(np.uint32) + k0
    u = (u ^ (u >> np.uint32(16))) * np.uint32(0x7FEB352D)
    u = ((u ^ (u >> np.uint32(15))) + k1) * np.uint32(0x846CA68B)
    u ^= u >> np.uint32(16)
    return np.where(elements & np.uint64(32), u << np.uint32(16) | u >> np.uint32(16), u)


def quantise(
    x: F32, codec: str, codes: npt.NDArray[Any], scales: F32 | None, seed: int | None, row: int, first: int = 0
) -> None:
    """Set the codes of x: nearest, ties to even, or with a seed rounded up with the fraction's probability."""
    x = np.asarray(x)
    random = None if seed is None else dither(len(x), seed, row, first)
    if scales is not None:
        blocks = np.zeros((len(scales), 64), np.float32)
        blocks.flat[: len(x)] = x
        largest = np.abs(blocks).max(axis=1, initial=0)
        used = np.isfinite(largest) & (largest >= np.float32(2.0**-96))
        scale = np.minimum(largest / np.float32(127), np.nextafter(np.finfo(np.float32).max / np.float32(127), 0))
        scales[:] = np.where(used, scale, np.where(np.isfinite(largest), 0, largest))
        inverse = np.zeros_like(largest)
        np.divide(np.float32(127), largest, out=inverse, where=used)
        inverse = np.where(inverse * largest > 127, np.nextafter(inverse, np.float32(0)), inverse)
        blocks[~used] = 0
        t = (blocks * inverse[:, None]).ravel()[: len(x)]
        codes[:] = np.rint(t) if random is None else rounded_up(t, 24, random)
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
        whole = np.rint(t) if random is None else rounded_up(t, 20, random)
        finite = np.where(tiny, whole.astype(np.uint32), (magnitude - np.uint32(112 << 23) + below) >> dropped)
    np.asarray(codes).view(np.uint16)[:] = sign | np.where(np.isnan(x), nan, np.where(infinite, infinity, finite))


def rounded_up(t: F32, bits: int, random: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    """Return floor(t + u), with t in fixed point and u in [0, 1) from ``random``, both of ``bits`` bits."""
    return ((t * np.float32(2**bits)).astype(np.int64) + (random >> np.uint32(32 - bits))) >> bits


def dequantise(codes: npt.NDArray[Any], scales: F32 | None, codec: str, out: F32) -> None:
    """Set out to the decoded codes, scale * code for int8."""
    if scales is not None:
        out[:] = np.repeat(scales, 64)[: len(codes)] * codes.astype(np.float32)
    elif codec == "f16":
        out[:] = codes.view(np.float16)
    else:
        out[:] = (codes.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def squared_norms(rows: Sequence[Sum], *, partials: F64 | None = None) -> F64:
    """Return |row|^2 of each row in float64, added block by block; write each block's sum to ``partials``."""
    return added(squares_of_blocks(rows), partials)


def squares_of_blocks(rows: Sequence[Sum], sizes: Sequence[int] | None = None) -> F64:
    """Return float64[blocks, k]: the sum of squares of every 16,384 elements, separately for each tensor."""
    squares = [np.square(np.asarray(row), dtype=np.float64).ravel() for row in rows]
    ends = np.cumsum([len(squares[0]) if squares else 0] if sizes is None else sizes, dtype=np.int64)
    starts = [at for a, b in zip([0, *ends[:-1]], ends, strict=True) for at in range(a, b, BLOCK)]
    shares = np.empty((len(starts), len(rows)))
    for i, square in enumerate(squares):
        shares[:, i] = [part.sum() for part in np.split(square, starts[1:])] if starts else []
    return shares


def added(shares: F64, partials: F64 | None) -> F64:
    """Return the shares added block by block, and write the shares to ``partials``."""
    if partials is not None and shares.size:
        partials[:] = shares
    return np.cumsum(shares, axis=0)[-1] if len(shares) else np.zeros(shares.shape[1])


def sizes_of(ys: Sequence[Any]) -> list[int] | None:
    """Return the sizes of the tensors of the first update that consists of tensors, or None."""
    return next(([np.size(floats(tensor)) for tensor in y] for y in ys if isinstance(y, list | tuple)), None)


def _step(s: npt.NDArray[np.uint64], w: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    t = s + w * Q
    return (t << np.uint64(31) | t >> np.uint64(33)) * P


def checksum(buffer: Any, block_bytes: int) -> npt.NDArray[np.uint64]:
    """Return the checksum of each block: the hash of its eight lanes in order, then of its length."""
    data = np.frombuffer(buffer, np.uint8)
    starts = np.arange(0, len(data), block_bytes)
    lengths = np.minimum(block_bytes, len(data) - starts)
    words = np.zeros((len(starts), -(-int(lengths.max(initial=0)) // (8 * LANES)), LANES), "<u8")
    for row, start, length in zip(words, starts.tolist(), lengths.tolist(), strict=True):
        row.reshape(-1).view(np.uint8)[:length] = data[start : start + length]
    lanes = np.tile(np.arange(1, LANES + 1, dtype=np.uint64) * P, (len(starts), 1))
    chunks = -(-lengths // (8 * LANES))
    for j in range(words.shape[1]):
        fed = chunks > j  # the last block may be shorter
        lanes[fed] = _step(lanes[fed], words[fed, j])
    sums = np.zeros(len(starts), np.uint64)
    for lane in lanes.T:
        sums = _step(sums, lane)
    return _step(sums, lengths.astype(np.uint64))
