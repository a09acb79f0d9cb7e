"""The beginning of a file of slots: whose it is, and how the slots lie in it."""

import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from fedcore.errors import CorruptionError, StoreError
from fedcore.store.geometry import BLOCK, GRAINS, VERSION

MAGIC = b"fedcore\x1a"
KINDS = ("rows", "vectors")

_FORMAT = struct.Struct("<8sII16s8sQQQQ")
_DIGEST = 8
_SIZE = 4096
SEQUENCE_AT = 512
_SEQUENCE = struct.Struct("<Q8s")


@dataclass(frozen=True)
class Header:
    """The header in which a file of slots describes itself.

    Attributes:
        store: 16 random bytes that the files of one store share.
        kind: "rows" or "vectors".
        codec, n: of the rows; "" and 0 for vectors.
        payload, stride: bytes of a slot that are used, and from one slot to the next.
        version: of the format, which says where the first slot lies.
    """

    store: bytes
    kind: str
    codec: str
    n: int
    payload: int
    stride: int
    version: int = VERSION

    def packed(self) -> bytes:
        """The header, with a digest of itself."""
        fields = _FORMAT.pack(
            MAGIC,
            self.version,
            KINDS.index(self.kind),
            self.store,
            self.codec.encode(),
            self.n,
            self.payload,
            self.stride,
            BLOCK,
        )
        return (fields + digest(fields)).ljust(_SIZE, b"\0")

    @classmethod
    def read(cls, fd: int, path: Path) -> "Header":
        """The header of an open file.

        Raises:
            StoreError: the file is no store's, or of a newer format.
            CorruptionError: it is damaged.
        """
        page = os.pread(fd, _SIZE, 0)
        fields = page[: _FORMAT.size]
        if len(page) < _SIZE or not fields.startswith(MAGIC):
            size = os.fstat(fd).st_size
            raise StoreError(
                f"{path}: expected a file of a fedcore store, got {size} bytes that do not begin like one; if it was "
                "one, it is damaged: use a copy of the store"
            )
        version = struct.unpack_from("<I", fields, len(MAGIC))[0]
        if page[_FORMAT.size : _FORMAT.size + _DIGEST] != digest(fields):
            raise CorruptionError(f"{path}: its header was changed (format {version}); use a copy of the store")
        if version not in GRAINS:
            raise StoreError(
                f"{path}: expected a format up to {VERSION}, got {version}: open it with the version of fedcore that "
                "wrote it, or a newer one"
            )
        _, _, kind, store, codec, n, payload, stride, _ = _FORMAT.unpack(fields)
        if kind >= len(KINDS):
            raise CorruptionError(
                f"{path}: expected a file of rows or vectors, got kind {kind}; use a copy of the store"
            )
        return cls(store, KINDS[kind], codec.rstrip(b"\0").decode(errors="replace"), n, payload, stride, version)


def version_of(path: Path) -> int:
    """The version of a file's format, by its header. Errors are those of ``Header.read``."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return Header.read(fd, path).version
    finally:
        os.close(fd)


def is_made_by(path: Path, store: str) -> bool:
    """Tell whether a file is of the store of that name; a loss of power may leave a header of zeros, or half of one."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        page = os.pread(fd, _SIZE, 0)
    finally:
        os.close(fd)
    if not any(page):
        return True
    return len(page) >= _FORMAT.size and page.startswith(MAGIC) and _FORMAT.unpack_from(page)[3].hex() == store


def packed_sequence(sequence: int) -> bytes:
    """A sequence number as it stands in the header, at ``SEQUENCE_AT``."""
    number = struct.pack("<Q", sequence)
    return number + digest(number)


def read_sequence(fd: int) -> int:
    """The number that the index had reached at least; 0 where that cannot be told."""
    number, check = _SEQUENCE.unpack(os.pread(fd, _SEQUENCE.size, SEQUENCE_AT))
    return int(number) if check == digest(struct.pack("<Q", number)) else 0


def digest(content: bytes) -> bytes:
    """64 bits that change when the content does."""
    return hashlib.blake2b(content, digest_size=_DIGEST).digest()
