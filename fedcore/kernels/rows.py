"""Rows of clients: their exchange against new ones, and their codes of 16 or 8 bits."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcore import arrays as memory
from fedcore.arguments import length, whole
from fedcore.arrays import F64, Floats, ieee
from fedcore.errors import DtypeError, RangeError, UnknownNameError
from fedcore.kernels.forms import Terms
from fedcore.kernels.norms import all_finite
from fedcore.native import core

REPLACED, CHANGE = Terms(h=1), Terms(row=1, r=-1)
"""The usual forms: a row becomes h, and the sum adds the change of the row."""
ANCHORED = CHANGE._replace(q=1)
"""The change of the row plus the anchor."""
BLOCK = 64  # elements of an int8 row that share a scale
DTYPES: dict[str, type] = {"bf16": np.uint16, "f16": np.uint16, "int8": np.int8}


class Codes(NamedTuple):
    """A quantised row.

    Attributes:
        codec: ``"bf16"``, the upper half of a float32; ``"f16"``, IEEE binary16; or ``"int8"``, a code in -127..127
            and for every 64 elements one scale, so that x is about scale * code.
        codes: uint16[n] for bf16 and f16 (torch.bfloat16 or float16 may stand for them), int8[n] for int8.
        scales: float32[ceil(n / 64)] for int8, else None.
    """

    codec: str
    codes: Any
    scales: Any = None


@ieee
def exchange(
    acc: Floats,
    bases: Sequence[Any],
    ys: Sequence[Any],
    scales: F64,
    weights: F64,
    old_rows: Sequence[Any],
    anchors: Sequence[Any],
    new_rows: Sequence[Any],
    *,
    out: Floats,
    row: Terms = REPLACED,
    adds: Terms = ANCHORED,
    keys: npt.NDArray[np.uint64] | None = None,
    sums: npt.NDArray[np.uint64] | None = None,
    first: int = 0,
    partials: F64 | None = None,
) -> F64:
    """Replace each client's row, and add the change to a sum, in one pass.

    With the coefficients of the two forms::

        r_i' = row.h h_i + row.r r_i + row.q q_i
        out  = acc + sum_i weights[i] (adds.row r_i' + adds.r r_i + adds.h h_i + adds.q q_i)

    Default: r_i' = h_i, for rows that hold the clients' last mean gradients, and the sum adds r_i' - r_i + q_i. A row
    is float32 or quantised. The sum uses r_i and r_i' as stored and decoded again, so it follows the rows exactly.

    Args:
        acc, out: float64[n]; the same array, or disjoint.
        bases, ys, scales, weights: as for ``accumulate``, which also defines h_i and the dtypes of the ys.
        old_rows: k entries: r_i, float32[n] or ``Codes`` of n elements, or None for a row of zeros. Read-only.
        anchors: k entries: q_i, float32[n], or None for zero.
        new_rows: k entries, written: float32[n] or ``Codes``, independently of the old row. Entry i may be exactly the
            memory of ``old_rows[i]``; the old row is then lost even if ``ys[i]`` is not finite.
        row: the form of a new row, rounded to float32; ``row.row`` is ignored.
        adds: the form that the sum adds.
        keys: uint64[k, 2], the seed and the row with which ``quantise`` rounds r_i' stochastically: the codes are those
            of ``quantise(r_i', codec, seed=keys[i, 0], row=keys[i, 1], first=first)``. May be None if all new rows
            are float32.
        sums: uint64[k, ceil(n / 16,384)], written: ``fedcore.store.checksums`` of each new row's blocks of 64 KiB.
            Must be None if a new row is not float32.
        first: the index of element 0 in the whole rows, if these are parts, for ``keys``, as in ``quantise``.
        partials: float64[ceil(n / 16,384), k], written: the blocks' shares of the squared norms, as of ``accumulate``.

    Returns:
        float64[k], the squared norms |h_i|^2 before any rounding. One is not finite as in ``accumulate``, or if r_i' as
        stored is not finite, because of the codec's range or of r_i; ``out`` and the new row are then invalid.

    Raises:
        UnknownNameError: the codec is unknown.
        RangeError: ``first`` is out of range, as in ``quantise``.
        ShapeError, DtypeError, ArrayError: an argument differs from ``Args``; nothing was written.

    Determinism: h_i and r_i' in float32, the sums in float64, each formula from its left to its right (behind row.h,
        and behind adds.r, without a term whose coefficient is 0), one client after another: the same bits one by one,
        in batches, on every ISA level and thread count.
    Cost: with b bytes an element of a row (4 for float32, 2 for bf16 and f16, 1 + 1/16 for int8) and float32 ys, reads
        (4 + b) k n (4 k n more with anchors) + 12 n bytes, writes b k n + 8 n bytes.
    Reference: Gu et al., "Fast Federated Learning in the Presence of Arbitrary Device Unavailability" (MIFA), the
        memory-efficient form; Sun, Mao, Zhang, "MimiC", arXiv 2306.12212, Algorithm 1; Karimireddy et al., "SCAFFOLD:
        Stochastic Controlled Averaging for Federated Learning", Algorithm 1, option II (r' = h + r - c).

    >>> row, total, none = np.float32([1, 1]), np.zeros(2), [None]
    >>> exchange(total, none, [np.float32([-3, -4])], np.ones(1), np.ones(1), [row], none, [row], out=total)
    array([25.])
    >>> total, row
    (array([2., 3.]), array([3., 4.], dtype=float32))
    """
    return core.exchange(
        acc,
        out,
        bases,
        ys,
        scales,
        weights,
        old_rows,
        anchors,
        new_rows,
        row=row,
        adds=adds,
        keys=keys,
        sums=sums,
        first=first,
        partials=partials,
    )


@ieee
def quantise(
    x: Any, codec: str, out: Codes | None = None, *, seed: int | None = None, row: int = 0, first: int = 0
) -> Codes:
    """Codes of x, rounded to the nearest or, with a seed, stochastically, which is unbiased: the codes' mean is x.

    Args:
        x: float32[n], NumPy's, torch's, or anything with DLPack, in CPU memory or on a CUDA device. Read-only.
        codec: ``"bf16"``, ``"f16"`` or ``"int8"``.
        out: the codes to write, of this codec and length, overlapping nothing. Default: new arrays on x's device.
        seed: 0..2^64-1: each element is rounded up with the probability of the fraction that it would lose, by a hash
            of (seed, row, element). Default: round to the nearest code, ties to even.
        row: 0..2^64-1, a second number for the hash, for example of the client and the round.
        first: the index of x[0] in the whole row, if x is a part: element j of x is rounded like element first + j of
            the row. A multiple of 64 up to 2^62; of 16,384 if the part reaches past a multiple of 2^32.

    Returns:
        The codes, ``out`` if it was given. bf16 and f16 keep infinities and NaN (but not a NaN's payload), and round
        larger numbers than their largest to infinity. int8's scale is max|x| / 127 of its block; a block of
        numbers below 2^-96 becomes 0.

    Raises:
        UnknownNameError: the codec is unknown.
        RangeError: x has a NaN or an infinity and the codec is int8 (``out`` is then invalid), or seed, row or
            first is out of range.
        ShapeError, DtypeError, ArrayError: an argument differs from ``Args``; nothing was written.

    Determinism: the same bits on every ISA level and thread count. An element has 16 random bits for bf16, 13 for f16
        (as many as are dropped, so none is lost) and 24 for int8, whose mean is x to 6e-8 of its scale.
    Cost: reads 4 n bytes, writes 2 n, for int8 n (1 + 1/16).

    >>> coded = quantise(np.float32([1, -127, 0.4]), "int8")
    >>> coded.codes, coded.scales
    (array([   1, -127,    0], dtype=int8), array([1.], dtype=float32))
    """
    if codec not in DTYPES:
        raise UnknownNameError.of("codec", codec, DTYPES)
    for name, number in (("seed", seed), ("row", row), ("first", first)):
        if number is not None:
            whole(name, number, 0, 2**64 - 1)
    if out is None:
        n = length("x", x)
        scales = memory.empty_beside(x, -(-n // BLOCK)) if codec == "int8" else None
        out = Codes(codec, memory.empty_beside(x, n, DTYPES[codec]), scales)
    elif out.codec != codec:
        raise DtypeError(f"out: expected codes of {codec}, got codes of {out.codec}")
    core.quantise(x, codec, out.codes, out.scales, seed, row, first)
    if out.scales is not None and not all_finite([out.scales]):
        start = np.flatnonzero(~np.isfinite(memory.to_host(dequantise(out))))[0] // BLOCK * BLOCK
        raise RangeError(f"x: expected finite numbers for int8, got another among the 64 from {start} on")
    return out


@ieee
def dequantise(coded: Codes, out: Any = None) -> Any:
    """The numbers that codes stand for: exact for bf16 and f16, scale * code in float32 for int8.

    Args:
        coded: codes, as ``quantise`` returns them. Read-only.
        out: float32[n], written in place and overlapping nothing. Default: a new array on the codes' device.

    Returns:
        float32[n], ``out`` if it was given.

    Raises:
        UnknownNameError: the codec is unknown.
        ShapeError, DtypeError, ArrayError: an argument differs from ``Args``; nothing was written.

    Determinism: the same bits on every ISA level and thread count.
    Cost: reads 2 n bytes, for int8 n (1 + 1/16), writes 4 n.

    >>> dequantise(quantise(np.float32([1, 0.1]), "bf16"))
    array([1.        , 0.10009766], dtype=float32)
    """
    if coded.codec not in DTYPES:
        raise UnknownNameError.of("codec", coded.codec, DTYPES)
    if out is None:
        out = memory.empty_beside(coded.codes, length("codes", coded.codes))
    core.dequantise(coded.codes, coded.scales, coded.codec, out)
    return out
