"""Arrays as the bytes of a `.npy` file, read in place: nothing of what a stranger sent is evaluated or copied.

NumPy's own reader takes pickles unless told not to, evaluates the header as Python, and copies. Here a header is the
very line that ``numpy.save`` writes, in version 1.0, or the bytes are refused.
"""

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedcore.errors import ArrayError, DtypeError, ShapeError
from fedcore.native import core

MAGIC = b"\x93NUMPY\x01\x00"
LONGEST_HEADER = 1024  # 32 dimensions of 19 digits take 800
DIMENSIONS = 32
NUMBER = rb"(?:0|[1-9][0-9]{0,18})"
HEADER = re.compile(
    rb"\{'descr': '([<|][A-Za-z][1-9])', 'fortran_order': (False|True), "
    rb"'shape': \((|%(n)s,|%(n)s(?:, %(n)s)+)\), \} *\n" % {b"n": NUMBER}
)
DTYPES = {
    np.dtype(name).str.encode(): np.dtype(name)
    for name in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?")
}
BFLOAT16 = (b"<V2", b"|V2")  # what ``numpy.save`` makes of ml_dtypes' bfloat16


def read(data: bytes, *, bfloat16: bool = False) -> npt.NDArray[Any]:
    """The array in the bytes of a `.npy` file, as a view of them.

    Args:
        data: read-only.
        bfloat16: whether elements of two bytes without a type of their own will do; they come as uint16.

    Returns:
        A read-only view of ``data``, in Fortran order if the header says so, aligned or not; numbers are not looked at.

    Raises:
        ArrayError: the bytes do not begin as ``numpy.save`` writes them in version 1.0.
        DtypeError: the elements are not little-endian floats or integers of 1 to 8 bytes, or bools.
        ShapeError: there are more than 32 dimensions, or the bytes are not as many as the shape says.

    Cost: reads the header, at most 1,034 bytes; allocates no array.

    >>> read(write(np.float32([[1, 2], [3, 4]])))
    array([[1., 2.],
           [3., 4.]], dtype=float32)
    """
    start = len(MAGIC) + 2
    if data[: len(MAGIC)] != MAGIC:
        raise ArrayError(f"npy: expected the magic bytes of version 1.0, got {data[: len(MAGIC)]!r}")
    length = int.from_bytes(data[len(MAGIC) : start], "little")
    if not 0 < length <= min(LONGEST_HEADER, len(data) - start):
        raise ArrayError(f"npy: expected a header of 1..{LONGEST_HEADER} bytes within {len(data)}, got {length}")
    descr, order, shape = _parse(data[start : start + length])
    dtype = np.dtype(np.uint16) if bfloat16 and descr in BFLOAT16 else DTYPES.get(descr)
    if dtype is None:
        raise DtypeError(f"npy: expected a little-endian float, integer or bool, got {descr.decode()!r}")
    bytes_due, bytes_come = math.prod(shape) * dtype.itemsize, len(data) - start - length
    if bytes_come != bytes_due:
        raise ShapeError(f"npy: expected {bytes_due} bytes of {dtype}{list(shape)}, got {bytes_come}")
    if bytes_due:
        return np.ndarray(shape, dtype, data, start + length, order=order)
    if math.prod(filter(None, shape)) > 2**40:
        raise ShapeError(f"npy: expected sizes beside 0 that NumPy can hold, got {shape}")
    return np.empty(shape, dtype)  # NumPy takes no offset at the very end of a buffer


def read_known(
    datas: Sequence[Any], heads: Sequence[bytes], shapes: Sequence[tuple[int, ...]]
) -> list[npt.NDArray[Any]] | None:
    """Float32 arrays in the bytes of `.npy` files, if each begins with a head that ``read`` took before.

    Args:
        datas: read-only; bytes, or anything else that is not to be believed.
        heads: of each, the bytes up to the payload of a float32 array in C order.
        shapes: of each, the shape that the head says.

    Returns:
        Read-only views of ``datas``; None if one has another head, another length or no elements: ``read`` says what
        is wrong with it, or reads it.

    Cost: compares the heads; no Python for an array.
    """
    return core.read_npy(datas, heads, shapes)


def as_float32(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Floats as float32, themselves or a copy, beyond its range an infinity; integers as they are."""
    if values.dtype == np.float32 or values.dtype.kind != "f":
        return values
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


@lru_cache(maxsize=512)
def _parse(header: bytes) -> tuple[bytes, Literal["C", "F"], tuple[int, ...]]:
    """A header's type, order and shape; a model's headers are the same in every reply."""
    parsed = HEADER.fullmatch(header)
    if parsed is None:
        raise ArrayError(f"npy: expected a header as numpy.save writes it, got {header[:80]!r}")
    descr, fortran, numbers = parsed.groups()
    shape = tuple(int(number) for number in numbers.split(b",") if number)
    if len(shape) > DIMENSIONS:
        raise ShapeError(f"npy: expected at most {DIMENSIONS} dimensions, got {len(shape)}")
    return descr, "F" if fortran == b"True" else "C", shape


def write(array: npt.NDArray[Any], *, bfloat16: bool = False) -> bytes:
    """The bytes of a `.npy` file of an array: those of ``numpy.save``, but that the payload begins at a multiple of 64.

    Args:
        array: of one of the dtypes that ``read`` takes; copied in C order.
        bfloat16: its elements are bfloat16 numbers in uint16.

    Raises:
        DtypeError: it has another dtype.

    Cost: reads and writes the array once.
    """
    return write_all([head(array, bfloat16=bfloat16)], [array])[0]


def write_all(heads: Sequence[bytes], arrays: Sequence[npt.NDArray[Any]]) -> list[bytes]:
    """The bytes of a `.npy` file of each array, under the heads that ``head`` made of arrays like these.

    Cost: reads and writes the arrays once, on all threads.
    """
    little = (array.astype(array.dtype.newbyteorder("<"), copy=False) for array in arrays)
    payloads = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in little]
    made: list[bytes] = core.joined_bytes(list(heads), payloads)
    return made


def head(array: npt.NDArray[Any], *, bfloat16: bool = False) -> bytes:
    """The header before an array's payload in a `.npy` file; the arguments are those of ``write``."""
    dtype = array.dtype.newbyteorder("<") if array.dtype.byteorder != "|" else array.dtype
    if dtype.str.encode() not in DTYPES or (bfloat16 and dtype != np.uint16):
        raise DtypeError(
            f"npy: expected a float or integer dtype{' of bfloat16, in uint16' * bfloat16}, got {array.dtype}"
        )
    shape = f"({', '.join(map(str, array.shape))}{',' * (array.ndim == 1)})"
    descr = BFLOAT16[0].decode() if bfloat16 else dtype.str
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
    length = -(-(len(MAGIC) + 3 + len(text)) // 64) * 64 - len(MAGIC) - 2
    return MAGIC + length.to_bytes(2, "little") + text.ljust(length - 1).encode() + b"\n"
