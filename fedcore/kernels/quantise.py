"""quantise: float32 to 16 or 8 bits and back."""

from typing import Any, NamedTuple

import numpy as np

from fedcore import memory
from fedcore.arguments import length, whole
from fedcore.errors import DtypeError, RangeError, UnknownNameError
from fedcore.float_mode import ieee
from fedcore.kernels.norms import all_finite
from fedcore.native import core

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
def quantise(
    x: Any, codec: str, out: Codes | None = None, *, seed: int | None = None, row: int = 0, first: int = 0
) -> Codes:
    """Codes of x, rounded to the nearest or, with a seed, stochastically, which is unbiased: the codes' mean is x.

    Args:
        x: float32[n], NumPy's, torch's, or anything with DLPack, in CPU memory or on a CUDA device. Read-only.
        codec: ``"bf16"``, ``"f16"`` or ``"int8"``.
        out: where the codes are written, of this codec and length, overlapping nothing; new arrays beside x if None.
        seed: 0..2^64-1: each element is rounded up with the probability of the fraction that it would lose, by a hash
            of (seed, row, element). None: to the nearest code, ties to even.
        row: 0..2^64-1, what else the random bits depend on: the client, say, or the client and the round.
        first: the place of x[0] in the whole row, of which x may be a part: what element j of x gets is what element
            first + j of the row gets. A multiple of 64 up to 2^62; one of 16,384 if the part reaches past a multiple of
            2^32.

    Returns:
        The codes, ``out`` if it was given. bf16 and f16 keep infinities and NaN (but not a NaN's payload), and round
        to an infinity what lies beyond their largest number. int8's scale is max|x| / 127 of its block; a block of
        numbers below 2^-96 becomes 0.

    Raises:
        UnknownNameError: there is no such codec.
        RangeError: x has a NaN or an infinity and the codec is int8 (``out`` is then worthless), or seed, row or
            first is out of range.
        ShapeError, DtypeError, ArrayError: an argument is not what is said above; nothing was written.

    Determinism: the same bits on every ISA level and thread count. An element has 16 random bits for bf16, 13 for f16
        (as many as are dropped: nothing is lost by that) and 24 for int8, whose mean is x to 6e-8 of its scale.
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
        coded: what ``quantise`` returned, or the like. Read-only.
        out: float32[n], written in place and overlapping nothing; a new array beside the codes if None.

    Returns:
        float32[n], ``out`` if it was given.

    Raises:
        UnknownNameError: there is no such codec.
        ShapeError, DtypeError, ArrayError: an argument is not what is said above; nothing was written.

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
