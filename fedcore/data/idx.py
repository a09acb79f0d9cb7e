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

LIMIT = 1 << 30
"""Bytes that a file's header may promise: EMNIST's largest has 547 MB. Nothing past what the header promises is
decompressed, so that a few kilobytes of gzip cannot fill the memory."""


def read(path: Path, *, ndim: int, sha256: str | None = None) -> npt.NDArray[np.uint8]:
    """The array in a file.

    Args:
        path: a gzip'd IDX file.
        ndim: the number of dimensions it must have.
        sha256: of the decompressed content, because two mirrors may compress the same content differently; None
            where it is not known.

    Returns:
        uint8[d_1, ..., d_ndim], read-only.

    Raises:
        MissingDataError: the file is not there, or anything in it is not as it must be.
    """
    try:
        with gzip.open(path) as file:
            return _read(path, file, ndim, sha256)
    except (OSError, EOFError, zlib.error) as error:
        raise MissingDataError(f"{path}: expected a readable gzip file, got {error}") from error


def _read(path: Path, file: gzip.GzipFile, ndim: int, sha256: str | None) -> npt.NDArray[np.uint8]:
    length = 4 + 4 * ndim
    header = file.read(length)
    if len(header) < 4 or header[:3] != b"\0\0\x08":
        raise corrupt(path, "expected an IDX file of unsigned bytes (00 00 08)", header[:4].hex(" ") or "nothing")
    if header[3] != ndim:
        raise corrupt(path, f"expected {ndim} dimensions", f"{header[3]}")
    if len(header) < length:
        raise corrupt(path, f"expected a header of {length} bytes", f"{len(header)}")
    shape = [int.from_bytes(header[at : at + 4], "big") for at in range(4, length, 4)]
    due = math.prod(shape)
    if due > LIMIT:
        raise corrupt(path, f"expected at most {LIMIT} bytes of content", f"a header that says {shape}")
    content = file.read(due)
    extra = file.read(1)  # reaching the end is also what makes gzip compare its checksum
    if len(content) < due or extra:
        raise corrupt(path, f"expected {due} bytes for {shape}", "more" if extra else f"{len(content)}")
    if sha256 is not None:
        digest = hashlib.sha256(header)
        digest.update(content)
        if digest.hexdigest() != sha256:
            raise corrupt(path, f"expected content with SHA-256 {sha256}", digest.hexdigest())
    return np.frombuffer(content, np.uint8).reshape(shape)


def corrupt(path: Path, due: str, came: str) -> MissingDataError:
    """The error for a file whose content is not what it must be."""
    return MissingDataError(f"{path}: {due}, got {came}; delete the file and get it anew")
