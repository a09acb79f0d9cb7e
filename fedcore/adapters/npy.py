"""Arrays as the bytes of `.npy` files. The reader neither evaluates nor copies a client's bytes.

NumPy's own reader evaluates the header as Python, and copies. This reader accepts only the header that ``numpy.save``
writes in version 1.0.
"""

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedcore.arrays import core
from fedcore.errors import ArrayError, DtypeError, ShapeError

MAGIC = b"\x93NUMPY\x01\x00"
LONGEST_HEADER = 1024  # 32 dimensions of 19 digits need 800 bytes
DIMENSIONS = 32
NUMBER = rb"(?:0|[1-9][0-9]{0,18})"
HEADER = re.compile(
    rb"\{'descr': '([<>|][A-Za-z][1-9][0-9]{0,3})', 'fortran_order': (False|True), "
    rb"'shape': \((|%(n)s,|%(n)s(?:, %(n)s)+)\), \} *\n" % {b"n": NUMBER}
)
DTYPES = {
    np.dtype(name).str.encode(): np.dtype(name)
    for name in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?")
}
BFLOAT16 = (b"<V2", b"|V2")  # ml_dtypes' bfloat16 in ``numpy.save``


def read(data: bytes, *, bfloat16: bool = False) -> npt.NDArray[Any]:
    """Return the array in the bytes of a `.npy` file, as a read-only view, which may be unaligned.

    With ``bfloat16``, elements of two untyped bytes are accepted and returned as uint16. Numbers are not checked.

    Raises:
        ArrayError: the bytes do not begin with a header of ``numpy.save`` in version 1.0.
        DtypeError: the elements are not little-endian floats or integers of 1 to 8 bytes, or bools.
        ShapeError: the shape has more than 32 dimensions, or does not fit the number of bytes.

    Cost: reads the header, at most 1,034 bytes; allocates no array.

    >>> read(write(np.float32([[1, 2], [3, 4]])))
    array([[1., 2.],
           [3., 4.]], dtype=float32)
    """
    start = len(MAGIC) + 2
    if data[: len(MAGIC)] != MAGIC:
        raise ArrayError(f"npy: must begin with the magic bytes of version 1.0, got {data[: len(MAGIC)]!r}")
    length = int.from_bytes(data[len(MAGIC) : start], "little")
    if not 0 < length <= min(LONGEST_HEADER, len(data) - start):
        raise ArrayError(f"npy: header length {length}; must be in 1..{LONGEST_HEADER} and fit in {len(data)} bytes")
    descr, order, shape = _parse(data[start : start + length])
    dtype = np.dtype(np.uint16) if bfloat16 and descr in BFLOAT16 else DTYPES.get(descr)
    if dtype is None:
        raise DtypeError(f"npy: the dtype must be a little-endian float, integer or bool, got {descr.decode()!r}")
    size = math.prod(shape) * dtype.itemsize
    if len(data) - start - length != size:
        raise ShapeError(f"npy: {len(data) - start - length} bytes of data; {dtype}{list(shape)} needs {size}")
    if size:
        return np.ndarray(shape, dtype, data, start + length, order=order)
    if math.prod(filter(None, shape)) > 2**40:
        raise ShapeError(f"npy: shape {shape} is too large for NumPy")
    return np.empty(shape, dtype)  # NumPy accepts no offset at the end of a buffer


def read_known(
    datas: Sequence[Any], heads: Sequence[bytes], shapes: Sequence[tuple[int, ...]]
) -> list[npt.NDArray[Any]] | None:
    """Return the float32 arrays in the bytes of `.npy` files whose headers ``read`` accepted before.

    The arrays are read-only views. If a header or length differs or an array is empty, return None; call ``read`` then.
    ``datas`` may contain untrusted objects that are not bytes. ``heads`` and ``shapes`` are the expected header of each
    file, for a float32 array in C order, and its shape. Cost: compares the headers; runs no Python code per array.
    """
    return core.read_npy(datas, heads, shapes)


def as_float32(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return floats as float32, infinite if out of range, and integers unchanged; copy only if the dtype changes."""
    if values.dtype == np.float32 or values.dtype.kind != "f":
        return values
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


@lru_cache(maxsize=512)
def _parse(header: bytes) -> tuple[bytes, Literal["C", "F"], tuple[int, ...]]:
    """Return a header's dtype, order and shape; cached, since replies share their headers."""
    parsed = HEADER.fullmatch(header)
    if parsed is None:
        raise ArrayError(f"npy: the header must be as numpy.save writes it, got {header[:80]!r}")
    descr, fortran, numbers = parsed.groups()
    shape = tuple(int(number) for number in numbers.split(b",") if number)
    if len(shape) > DIMENSIONS:
        raise ShapeError(f"npy: {len(shape)} dimensions; must be at most {DIMENSIONS}")
    return descr, "F" if fortran == b"True" else "C", shape


def write(array: npt.NDArray[Any], *, bfloat16: bool = False) -> bytes:
    """Return an array as the bytes of a `.npy` file, as from ``numpy.save``; the payload starts at a multiple of 64.

    The dtype must be one that ``read`` accepts. ``bfloat16`` means that uint16 elements are bfloat16 numbers.
    Cost: reads and writes the array once.
    """
    return write_all([head(array, bfloat16=bfloat16)], [array])[0]


def write_all(heads: Sequence[bytes], arrays: Sequence[npt.NDArray[Any]]) -> list[bytes]:
    """Return each array as the bytes of a `.npy` file, with headers from ``head``; uses all threads."""
    little = (array.astype(array.dtype.newbyteorder("<"), copy=False) for array in arrays)
    payloads = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in little]
    return list(core.joined_bytes(list(heads), payloads))


def head(array: npt.NDArray[Any], *, bfloat16: bool = False) -> bytes:
    """Return the header of an array's `.npy` file; the arguments are those of ``write``."""
    dtype = array.dtype.newbyteorder("<") if array.dtype.byteorder != "|" else array.dtype
    if dtype.str.encode() not in DTYPES or (bfloat16 and dtype != np.uint16):
        raise DtypeError(f"npy: dtype {array.dtype}; must be {'uint16' if bfloat16 else 'a float, integer or bool'}")
    shape = f"({', '.join(map(str, array.shape))}{',' * (array.ndim == 1)})"
    descr = BFLOAT16[0].decode() if bfloat16 else dtype.str
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
    length = -(-(len(MAGIC) + 3 + len(text)) // 64) * 64 - len(MAGIC) - 2
    return MAGIC + length.to_bytes(2, "little") + text.ljust(length - 1).encode() + b"\n"
