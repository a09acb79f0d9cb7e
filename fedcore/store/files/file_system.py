"""The file system that a folder lies on, and a store's needs of it."""

import ctypes
import fcntl
import os
import struct
import sys
from contextlib import suppress
from pathlib import Path

from fedcore.errors import StoreError

_BTRFS = 0x9123683E
_NETWORK = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFE534D42: "SMB",
    0xFF534D42: "CIFS",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x73757245: "Coda",
}
_GET_FLAGS, _SET_FLAGS, _NO_COPY = 0x80086601, 0x40086602, 0x00800000  # Linux's FS_IOC_*FLAGS, FS_NOCOW_FL


def kind(path: Path) -> int:
    """The number that Linux's statfs(2) has for the file system of a path, or of the nearest folder above that exists;
    0 where it does not say."""
    if sys.platform != "linux":  # macOS's has another struct, whose first word is a size
        return 0
    try:
        statfs = ctypes.CDLL(None, use_errno=True).statfs
    except AttributeError:
        return 0
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    said = (ctypes.c_long * 64)()  # more than the struct, whose first word it is
    return said[0] & 0xFFFFFFFF if statfs(os.fsencode(there), said) == 0 else 0


def is_network(path: Path) -> bool:
    """Tell whether other machines may have the file open, whose locks and mapped pages are not this one's."""
    return kind(path) in _NETWORK


def require_local(path: Path) -> None:
    """Refuse a place where a store cannot be written to commit by commit.

    Raises:
        StoreError: it is on a network file system.
    """
    name = _NETWORK.get(kind(path))
    if name is not None:
        raise StoreError(
            f"{path}: expected a local file system, got {name}, on which locks and mapped files of two machines do not "
            'agree: put the store on a local disk; copies by save() may lie there, and be opened with medium="ram"'
        )


def write_in_place(folder: Path) -> None:
    """Let files that are made in a new folder be overwritten where they lie, on btrfs, which else copies.

    A copy needs room anew each time, and on a full disk a write to a mapped page would then end the process.
    """
    if kind(folder) != _BTRFS:
        return
    with suppress(OSError):  # a mount that does not let it: then it copies, as the documents say
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            (flags,) = struct.unpack("l", fcntl.ioctl(fd, _GET_FLAGS, struct.pack("l", 0)))
            fcntl.ioctl(fd, _SET_FLAGS, struct.pack("l", flags | _NO_COPY))
        finally:
            os.close(fd)
