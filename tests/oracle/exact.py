"""Reference implementations of the kernels of exact sums."""

from collections.abc import Sequence
from functools import wraps
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.arrays import F32, F64
from fedcore.kernels.forms import ANCHORED, H
from tests.oracle import kernels as floats
from tests.oracle.kernels import BLOCK, added, decoded, gradient, sizes_of, squares_of_blocks, whole

Words = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]

LONGEST = 2.0**39


def rounded(t: F64) -> Words:
    """Return t as two integers: the nearest multiple of 2^-10, and of 2^-60 to the rest, ties to even."""
    with np.errstate(invalid="ignore", over="ignore"):
        coarse = np.rint(t * 2.0**10)
        fine = np.rint((t - coarse * 2.0**-10) * 2.0**60)
        return coarse.astype(np.int64), fine.astype(np.int64)


def add(sum: Words, words: Words, times: int = 1) -> None:
    """Compute sum += times words, normalised to 0 <= low < 2^50."""
    high, low = sum
    wide = [int(a) + times * int(b) for a, b in zip(low, words[1], strict=True)] if abs(times) > 2**11 else None
    if wide is not None:
        high += np.int64(times) * words[0] + np.array([number >> 50 for number in wide], np.int64)
        low[:] = [number & (1 << 50) - 1 for number in wide]
        return
    low += np.int64(times) * words[1]
    high += np.int64(times) * words[0] + (low >> np.int64(50))
    low &= np.int64((1 << 50) - 1)


def begin(acc: Words | None, out: Words) -> None:
    """Set out = acc, or 0 if acc is None."""
    for word in (0, 1):
        out[word][:] = 0 if acc is None else acc[word]


def held(squares: F64, weights: F64) -> F64:
    """Return the squares |h|^2, infinite if |weight h| is 2^39 or more."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        longest = LONGEST / np.asarray(weights, np.float64)
        return np.where(squares < longest * longest, squares, np.inf)


@wraps(floats.accumulate)
def accumulate(acc: Any, *given: Any, out: Any, partials: F64 | None = None) -> F64:
    """Set out = acc + sum_i rounded(weights[i] h_i), with acc = 0 for None. Return the squared norm of each h_i."""
    if not isinstance(out, tuple):
        return floats.accumulate(acc, *given, out=out, partials=partials)
    bases, ys, scales, weights = given
    begin(acc, out)
    hs = [gradient(*sent) for sent in zip(bases, map(whole, ys), scales, strict=True)]
    for h, weight in zip(hs, weights, strict=True):
        add(out, rounded(weight * h.astype(np.float64)))
    return held(added(squares_of_blocks(hs, sizes_of(ys)), partials), weights)


@wraps(floats.exchange)
def exchange(acc: Any, *given: Any, out: Any, partials: F64 | None = None, **options: Any) -> F64:
    """Do as for floats, with each term of ``adds`` multiplied by (weights[i] coefficient) and rounded separately."""
    if not isinstance(out, tuple):
        return floats.exchange(acc, *given, out=out, partials=partials, **options)
    bases, ys, scales, weights, old_rows, anchors, new_rows = given
    row, adds = options.get("row", H), options.get("adds", ANCHORED)
    begin(acc, out)
    hs = [gradient(*sent) for sent in zip(bases, ys, scales, strict=True)]
    n = len(out[0])
    before = [decoded(old, n) for old in old_rows]
    unused = np.zeros(n)
    shares = np.empty((-(-n // BLOCK), len(hs)))
    floats.exchange(unused, *given, out=unused, partials=shares, **options)
    most = max(abs(adds.row * row.h), abs(adds.h), abs(adds.row))
    for i, (h, weight) in enumerate(zip(hs, weights, strict=True)):
        stored = decoded(new_rows[i], n)
        terms = ((adds.row, stored), (adds.r, before[i]), (adds.h, h), (adds.q, decoded(anchors[i], n)))
        for coefficient, term in terms:
            if coefficient:
                add(out, rounded((weight * coefficient) * term.astype(np.float64)))
        weighted = np.abs(stored).astype(np.float64) * max(abs(adds.row), abs(adds.r)) * abs(weight)
        largest = [weighted[start : start + BLOCK].max() for start in range(0, n, BLOCK)]
        shares[~(np.array(largest) < 2 * LONGEST), i] = np.inf
    return held(added(shares, partials), most * np.asarray(weights))


def combine_exact(terms: Sequence[Any], coefficients: npt.NDArray[np.int64], out: Words) -> bool:
    """Set out = sum_i coefficients[i] terms[i], with vectors rounded to the grid.

    Return whether every intermediate sum is below 2^62.
    """
    n = len(out[0])
    parts = [term if isinstance(term, tuple) else rounded(np.asarray(term, np.float64)) for term in terms]
    total = np.zeros(n, np.int64), np.zeros(n, np.int64)
    most = 0.0
    for (high, low), term, times in zip(parts, terms, coefficients, strict=True):
        add(total, (np.asarray(high), np.asarray(low)), int(times))
        if isinstance(term, tuple):
            largest = float(np.maximum(high, ~np.asarray(high)).max(initial=0)) + 1
        elif not np.abs(term).max(initial=0) < 2.0**40:
            return False
        else:
            largest = 2.0**50
        most += abs(int(times)) * (largest + 1)
    begin(total, out)
    return most < 2.0**62 or n == 0


def read_exact(sum: Words, out: F32 | F64) -> None:
    """Set out = float64(high) 2^-10 + low 2^-60, rounded to float64 and then to the dtype of out."""
    high, low = (np.asarray(word).astype(np.float64) for word in sum)
    out[:] = high * 2.0**-10 + low * 2.0**-60
