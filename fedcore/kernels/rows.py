"""Clients' rows: replacement by new rows, and quantisation to 16 or 8 bits."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcore import arrays as memory
from fedcore.arrays import F64, core, ieee, native
from fedcore.errors import DtypeError, RangeError, UnknownNameError
from fedcore.kernels.aggregate import Total
from fedcore.kernels.forms import ANCHORED, REPLACED, Terms
from fedcore.kernels.norms import all_finite
from fedcore.validation import check_integer, length

BLOCK = 64  # elements of an int8 row that share a scale
DTYPES: dict[str, type] = {"bf16": np.uint16, "f16": np.uint16, "int8": np.int8}


class Codes(NamedTuple):
    """A quantised row.

    Attributes:
        codec: ``"bf16"`` (the upper half of a float32), ``"f16"`` (IEEE binary16) or ``"int8"`` (x is about
            scale * code, with codes in -127..127 and one scale for every 64 elements).
        codes: uint16[n] for bf16 and f16 (torch.bfloat16 and float16 are accepted), int8[n] for int8.
        scales: float32[ceil(n / 64)] for int8, else None.
    """

    codec: str
    codes: Any
    scales: Any = None


@native
def exchange(
    acc: Total,
    bases: Sequence[Any],
    ys: Sequence[Any],
    scales: F64,
    weights: F64,
    old_rows: Sequence[Any],
    anchors: Sequence[Any],
    new_rows: Sequence[Any],
    *,
    out: Total,
    row: Terms = REPLACED,
    adds: Terms = ANCHORED,
    keys: npt.NDArray[np.uint64] | None = None,
    sums: npt.NDArray[np.uint64] | None = None,
    first: int = 0,
    partials: F64 | None = None,
) -> F64:
    """Replace each client's row, and add the change to a sum, in one pass::

        r_i' = row.h h_i + row.r r_i + row.q q_i
        out  = acc + sum_i weights[i] (adds.row r_i' + adds.r r_i + adds.h h_i + adds.q q_i)

    By default r_i' = h_i, the client's last mean gradient, and the sum adds r_i' - r_i + q_i. Rows are float32 or
    quantised. The sum uses r_i and r_i' as stored and decoded, so it follows the stored rows exactly.

    For an ``ExactSum`` each term of ``adds`` is rounded separately, to rounded((weights[i] adds.term) term). With
    weights of 1 and ``adds`` of 1 and -1, replaced rows are subtracted exactly. So a running total of many exchanges is
    the exact sum of the current rows.

    Args:
        acc, out: float64[n] or an ``ExactSum``; the same sum, or disjoint sums. For an exact sum the weighted elements
            of old rows and anchors must be below 2^40; the calls that wrote them checked this.
        bases, ys, scales, weights: as for ``accumulate``, which also defines h_i and the dtypes of the ys.
        old_rows: k entries r_i: float32[n], ``Codes`` of n elements, or None for a row of zeros.
        anchors: k entries q_i: float32[n], or None for zeros.
        new_rows: outputs, k entries: float32[n] or ``Codes``. ``new_rows[i]`` may differ in type from ``old_rows[i]``.
            It may share the memory of ``old_rows[i]``, which is then overwritten even if ``ys[i]`` is not finite.
        row: the form of the new rows. Its coefficients are rounded to float32; ``row.row`` is ignored.
        adds: the form that the sum adds.
        keys: uint64[k, 2], the two inputs of the hash for stochastic rounding. The codes are those of
            ``quantise(r_i', codec, seed=keys[i, 0], row=keys[i, 1], first=first)``. May be None if all new rows are
            float32.
        sums: output, uint64[k, ceil(n / 16,384)]: ``fedcore.store.checksums`` of each new row's blocks of 64 KiB.
            Must be None if a new row is not float32.
        first: the index of element 0 in the whole row if the arrays are parts of rows, as for ``quantise``.
        partials: output, float64[ceil(n / 16,384), k], the blocks' shares of |h_i|^2; see ``accumulate``.

    Returns:
        float64[k], the squared norms |h_i|^2 before any rounding. A norm is not finite if ``ys[i]`` or the stored r_i'
        is not finite. The stored r_i' is not finite either if r_i is not, or if a number exceeds the codec's range. For
        an exact sum, a norm is also infinite if |weights[i] h_i| >= ``LONGEST_EXACT``, or if an element of a new row
        times its weight is 2^40 or more. If a norm is not finite, ``out`` and the new row are invalid.

    Determinism: h_i and r_i' in float32, sums in float64, formulas from left to right, one client after the other.
        The terms of row.r, row.q, adds.h and adds.q are omitted if their coefficients are 0. A batch is bit-identical
        to single calls. Exact sums as for ``accumulate``.
    Cost: for float32 ys and b bytes per element of a row (4 for float32, 2 for bf16 and f16, 1 + 1/16 for int8), reads
        (4 + b) k n (4 k n more with anchors) + 12 n bytes and writes b k n + 8 n bytes; 16 n
        more for an exact sum.
    Reference: Gu et al., "Fast Federated Learning in the Presence of Arbitrary Device Unavailability" (MIFA), the
        memory-efficient form; Sun, Mao, Zhang, "MimiC", arXiv 2306.12212, Algorithm 1; Karimireddy et al., "SCAFFOLD:
        Stochastic Controlled Averaging for Federated Learning", Algorithm 1, option II (r' = h + r - c).

    >>> row, total, none = np.float32([1, 1]), np.zeros(2), [None]
    >>> exchange(total, none, [np.float32([-3, -4])], np.ones(1), np.ones(1), [row], none, [row], out=total)
    array([25.])
    >>> total, row
    (array([2., 3.]), array([3., 4.], dtype=float32))
    """


@ieee
def quantise(
    x: Any, codec: str, out: Codes | None = None, *, seed: int | None = None, row: int = 0, first: int = 0
) -> Codes:
    """Return the codes of x, rounded to nearest or, with a seed, stochastically (unbiased: the codes' mean is x).

    Args:
        x: float32[n], an array of NumPy or torch, or any object with DLPack, in CPU memory or on a CUDA device.
        codec: ``"bf16"``, ``"f16"`` or ``"int8"``.
        out: output codes of this codec and length, disjoint from x. Default: new arrays on x's device.
        seed: 0..2^64-1. An element is rounded up with a probability equal to its fraction between the two codes, by a
            hash of (seed, row, element). Default: round to the nearest code, ties to even.
        row: 0..2^64-1, a second input of the hash, for example a number that identifies the client and the round.
        first: the index of x[0] in the whole row if x is a part: element j of x is rounded like element first + j of
            the row. It must be a multiple of 64, at most 2^62. If one of ``first + 1`` to ``first + n`` is a multiple
            of 2^32, ``first`` must be a multiple of 16,384.

    Returns:
        The codes, ``out`` if given. bf16 and f16 keep infinities and NaN (but not a NaN's payload), and numbers above
        their range become infinite. The scale of an int8 block is max|x| / 127; a block of numbers below 2^-96 becomes
        0.

    Raises:
        RangeError: x has a NaN or an infinity and the codec is int8; ``out`` is then invalid.

    Determinism: stochastic rounding uses one random bit for each dropped bit of bf16 (16) and f16 (13), and 24 bits for
        int8. The mean of int8 codes differs from x by at most 6e-8 of the scale.
    Cost: reads 4 n bytes and writes 2 n, or n (1 + 1/16) for int8.

    >>> coded = quantise(np.float32([1, -127, 0.4]), "int8")
    >>> coded.codes, coded.scales
    (array([   1, -127,    0], dtype=int8), array([1.], dtype=float32))
    """
    if codec not in DTYPES:
        raise UnknownNameError.of("codec", codec, DTYPES)
    for name, number in (("seed", 0 if seed is None else seed), ("row", row), ("first", first)):
        check_integer(name, number, 0, 2**62 if name == "first" else 2**64 - 1)
    if out is None:
        n = length("x", x)
        scales = memory.empty_beside(x, -(-n // BLOCK)) if codec == "int8" else None
        out = Codes(codec, memory.empty_beside(x, n, DTYPES[codec]), scales)
    elif out.codec != codec:
        raise DtypeError(f"out: expected codes of {codec}, got codes of {out.codec}")
    core.quantise(x, codec, out.codes, out.scales, seed, row, first)
    if out.scales is not None and not all_finite([out.scales]):
        start = np.flatnonzero(~np.isfinite(memory.to_host(dequantise(out))))[0] // BLOCK * BLOCK
        raise RangeError(f"x: must be finite for int8; one of the 64 elements from {start} on is not")
    return out


@ieee
def dequantise(coded: Codes, out: Any = None) -> Any:
    """Return the numbers of codes, exactly for bf16 and f16, and as scale * code in float32 for int8.

    Args:
        coded: codes from ``quantise``.
        out: float32[n], written in place, disjoint from the codes. Default: a new array on the codes' device.

    Cost: reads 2 n bytes, or n (1 + 1/16) for int8, and writes 4 n.

    >>> dequantise(quantise(np.float32([1, 0.1]), "bf16"))
    array([1.        , 0.10009766], dtype=float32)
    """
    if coded.codec not in DTYPES:
        raise UnknownNameError.of("codec", coded.codec, DTYPES)
    if out is None:
        out = memory.empty_beside(coded.codes, length("codes", coded.codes))
    core.dequantise(coded.codes, coded.scales, coded.codec, out)
    return out
