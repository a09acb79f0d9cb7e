"""A strict reader of gzip'd IDX files of unsigned bytes, the format of MNIST and its relatives.

An IDX file is 00 00, the type (08: unsigned bytes), the number of dimensions, each dimension as a big-endian
uint32, and then exactly as many bytes as the dimensions say.
"""

import gzip
import hashlib
import math
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedcore.errors import MissingDataError

LIMIT = 1 << 28
"""Bytes a file may decompress to; a few kilobytes of gzip can otherwise fill the memory."""


def read(path: Path, *, ndim: int, sha256: str) -> npt.NDArray[np.uint8]:
    """The array in a file.

    Args:
        path: a gzip'd IDX file.
        ndim: the number of dimensions it must have.
        sha256: of the decompressed content, because two mirrors may compress the same content differently.

    Returns:
        uint8[d_1, ..., d_ndim], read-only.

    Raises:
        MissingDataError: the file is not there, or anything in it is not as it must be.
    """
    content = _decompress(path)
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise _corrupt(path, "expected an IDX file of unsigned bytes (00 00 08)", content[:4].hex(" ") or "nothing")
    if content[3] != ndim:
        raise _corrupt(path, f"expected {ndim} dimensions", f"{content[3]}")
    start = 4 + 4 * ndim
    if len(content) < start:
        raise _corrupt(path, f"expected a header of {start} bytes", f"{len(content)}")
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    if len(content) - start != math.prod(shape):
        raise _corrupt(path, f"expected {math.prod(shape)} bytes for {shape}", f"{len(content) - start}")
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        raise _corrupt(path, f"expected content with SHA-256 {sha256}", digest)
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _decompress(path: Path) -> bytes:
    try:
        with gzip.open(path) as file:
            content = file.read(LIMIT + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise MissingDataError(f"{path}: expected a readable gzip file, got {error}") from error
    if len(content) > LIMIT:
        raise _corrupt(path, f"expected at most {LIMIT} bytes of content", "more")
    return content


def _corrupt(path: Path, due: str, came: str) -> MissingDataError:
    return MissingDataError(f"{path}: {due}, got {came}; delete the file and get it anew")
