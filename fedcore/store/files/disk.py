"""System calls of a store that can fail or lose data, and the supported file systems.

All such calls go through this module, so that tests can record, interrupt or fail them.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import sqlite3
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedcore.errors import StoreError
from fedcore.files import SAFE, opened

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux's renameat2
_SYNC_FILE_RANGE_WRITE = 2
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of Linux's fallocate
_MOST_BYTES = 1 << 20  # the maximum size of one read or write
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@contextmanager
def explained(doing: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a StoreError that names the step and the path."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path}: {doing} failed: {error.strerror or error}") from error


def require_folder(folder: Path) -> None:
    """Raise a StoreError if the folder of an open store was moved or deleted."""
    if not os.path.isdir(folder):
        raise StoreError(
            f"{folder}: the folder of an open store was moved or deleted; move it back, or close the store and open "
            "the folder where it is now"
        )


def is_writable(folder: Path) -> bool:
    """Whether this process may create files in a folder."""
    return os.access(folder, os.W_OK, effective_ids=True)


def write(fd: int, content: bytes, start: int = 0) -> None:
    """Write to a file. Mappings of the file see the change, since both use the system's page cache."""
    if os.pwrite(fd, content, start) != len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def resize(fd: int, size: int) -> None:
    """Set the size of a file. Added bytes use no disk space yet."""
    os.ftruncate(fd, size)


def free(fd: int, start: int, size: int) -> bool:
    """Free the disk space of a range without changing the file's size. Return False if the system cannot."""
    return _call("fallocate", fd, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(start), ctypes.c_int64(size))


def _call(name: str, *arguments: Any) -> bool:
    """Call a function of the C library; return False if the system does not support it."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        return False
    if function(*arguments) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code))


def data_spans(fd: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each range of data in a file. Holes and reserved space are not data.

    If the system cannot find holes, the whole file is data.
    """
    end, size = start, os.fstat(fd).st_size
    while end < size:
        start = end
        if hasattr(os, "SEEK_DATA"):
            try:
                start = os.lseek(fd, end, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # only a hole follows
                    return
                if error.errno != errno.EINVAL:
                    raise
                yield start, size
                return
        end = os.lseek(fd, start, os.SEEK_HOLE) if hasattr(os, "SEEK_HOLE") else size
        yield start, end


def data_end(fd: int, start: int) -> int:
    """Return the end of a file's last data after ``start``, or ``start`` if no data follow."""
    return max((end for _, end in data_spans(fd, start)), default=start)


def reserve(fd: int, start: int, size: int) -> None:
    """Reserve disk space for a range. Without it, a write to a mapped hole on a full disk would kill the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, start, size)
        return
    if os.fstat(fd).st_size < start + size:  # macOS
        resize(fd, start + size)
    _rewrite(fd, start, start + size)


def write_back(mapped: Iterable[mmap.mmap]) -> None:
    """Flush mappings before a sync. Only macOS needs this."""
    if not hasattr(os, "fdatasync"):
        for mapping in mapped:
            mapping.flush()


def sync(fd: int) -> None:
    """Make the content of a file durable; call ``write_back`` before it for mappings."""
    if not _sync_on_macos(fd):
        os.fdatasync(fd)


def sync_path(path: Path) -> None:
    """Make the content of a closed file, or the list of names in a folder, durable. The path is no link."""
    with opened(path, os.O_RDONLY | SAFE) as fd:
        if not _sync_on_macos(fd):
            os.fsync(fd)


def _sync_on_macos(fd: int) -> bool:
    """Sync on macOS, whose fsync leaves data in the disk's cache. Return False on other systems."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is None:
        return False
    try:
        fcntl.fcntl(fd, full)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOTTY):
            raise
        os.fsync(fd)  # the file system supports nothing stronger
    return True


def start_reading(fd: int, start: int, size: int) -> None:
    """Start to read a range from disk. One call reads at most the device's read-ahead."""
    if hasattr(os, "posix_fadvise"):  # not on macOS
        os.posix_fadvise(fd, start, size, os.POSIX_FADV_WILLNEED)


def start_writing(fd: int) -> None:
    """Start to write a file's changes to disk, so that the next sync is faster. Only Linux supports this."""
    with suppress(OSError):
        _call("sync_file_range", fd, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)


def commit(connection: sqlite3.Connection) -> None:
    """Commit a transaction of the index."""
    connection.execute("COMMIT")


def renew(fd: int) -> None:
    """Write the content of a file again and make it durable.

    After a failed sync, the system treats the file's pages as written, and no later sync would write them.
    """
    _rewrite(fd, 0, os.fstat(fd).st_size)
    sync(fd)


def _rewrite(fd: int, start: int, end: int) -> None:
    while start < end and (content := os.pread(fd, min(_MOST_BYTES, end - start), start)):
        write(fd, content, start)
        start += len(content)


def work_in(connection: sqlite3.Connection) -> bool:
    """Move the index's log into its file. Return False if another process reads the log."""
    busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not busy


def rename(old: Path, new: Path) -> None:
    """Rename a folder."""
    os.rename(old, new)


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders in one step. Return False if the system cannot."""
    names = os.fsencode(one), os.fsencode(other)
    return _call("renameat2", _AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)


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
    """Return Linux's number of the file system of a path, or of its nearest existing parent; 0 if unknown."""
    if sys.platform != "linux":  # the struct of macOS begins with a different field
        return 0
    existing = path.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    status = (ctypes.c_long * 64)()  # longer than the struct, whose first word is the number
    with suppress(OSError):
        _call("statfs", os.fsencode(existing), status)
    return status[0] & 0xFFFFFFFF


def is_network(path: Path) -> bool:
    """Whether other machines may open the file: locks and mapped pages are then unreliable."""
    return kind(path) in _NETWORK


def require_local(path: Path) -> None:
    """Raise a StoreError if the path is on a network file system, where a store cannot commit."""
    name = _NETWORK.get(kind(path))
    if name is not None:
        raise StoreError(
            f"{path}: stores are not supported on {name}, where locks and mapped files are unreliable; use a local "
            'disk, and save() copies here to open with medium="ram"'
        )


def write_in_place(folder: Path) -> None:
    """Let btrfs overwrite the files of a new folder in place.

    Copy-on-write needs new space for each write; on a full disk, a write to a mapped page would kill the process.
    """
    if kind(folder) == _BTRFS:
        # Some mounts do not allow it; docs/state.md describes the consequence.
        with suppress(OSError), opened(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) as fd:
            (flags,) = struct.unpack("l", fcntl.ioctl(fd, _GET_FLAGS, struct.pack("l", 0)))
            fcntl.ioctl(fd, _SET_FLAGS, struct.pack("l", flags | _NO_COPY))
