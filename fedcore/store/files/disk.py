"""The system calls of a store, which can fail or be lost with the power, and the file system below it.

All of it goes through here, so that tests can record it, stop it half-way or let it fail.
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

from fedcore.errors import StoreError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux's renameat2
_SYNC_FILE_RANGE_WRITE = 2
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of its fallocate
_AT_ONCE = 1 << 20  # bytes


@contextmanager
def explained(doing: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a StoreError that names the step and the path."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path}: {doing} failed: {error.strerror or error}") from error


def require_folder(folder: Path) -> None:
    """Raise a StoreError if the folder of an open store is not where it was opened."""
    if not os.path.isdir(folder):
        raise StoreError(
            f"{folder}: expected the folder of an open store, got none there: it was moved or deleted; move it back, "
            "or close the store and open the folder where it is now"
        )


def is_writable(folder: Path) -> bool:
    """Return whether this process may make files in a folder."""
    return os.access(folder, os.W_OK, effective_ids=True)


def write(fd: int, content: bytes, start: int = 0) -> None:
    """Write to a file. What it has mapped there sees it too: both are the system's one cache of the file."""
    if os.pwrite(fd, content, start) != len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def resize(fd: int, size: int) -> None:
    """Set a file's size; what is added takes no disk yet."""
    os.ftruncate(fd, size)


def free(fd: int, start: int, size: int) -> bool:
    """Give a range of a file back to the disk; the file stays as long. False where the system cannot."""
    try:
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    except AttributeError:
        return False
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, start, size) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(code, os.strerror(code))


def data_end(fd: int, start: int) -> int:
    """The end of a file's last data behind a place, or the place; what was given its place alone is no data.

    Systems and file systems without such a call take all of the file for data.
    """
    if not hasattr(os, "SEEK_DATA"):
        return max(start, os.fstat(fd).st_size)
    end = start
    while True:
        try:
            end = os.lseek(fd, os.lseek(fd, end, os.SEEK_DATA), os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole, or the file's end
                return end
            if error.errno == errno.EINVAL:
                return max(start, os.fstat(fd).st_size)
            raise


def data_spans(fd: int) -> Iterator[tuple[int, int]]:
    """The beginning and end of each range of a file's data; holes, and what was given its place alone, are no data.

    Systems and file systems without such a call take all of the file for data.
    """
    end, size = 0, os.fstat(fd).st_size
    while end < size:
        start = end
        if hasattr(os, "SEEK_DATA"):
            try:
                start = os.lseek(fd, end, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but a hole
                    return
                if error.errno != errno.EINVAL:
                    raise
                yield start, size
                return
        end = os.lseek(fd, start, os.SEEK_HOLE) if hasattr(os, "SEEK_HOLE") else size
        yield start, end


def reserve(fd: int, start: int, size: int) -> None:
    """Give a range its place on the disk: writing to a mapped hole of a full disk would kill the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, start, size)
        return
    if os.fstat(fd).st_size < start + size:  # macOS
        resize(fd, start + size)
    _write_again(fd, start, start + size)


def write_back(mapped: Iterable[mmap.mmap]) -> None:
    """Have a sync find what was written through mappings of the file: macOS needs a flush of each."""
    if not hasattr(os, "fdatasync"):
        for mapping in mapped:
            mapping.flush()


def sync(fd: int) -> None:
    """Make a file's content durable, what was written through a mapping too: see ``write_back``."""
    if not _sync_of_macos(fd):
        os.fdatasync(fd)


def _sync_of_macos(fd: int) -> bool:
    """Make a file durable on macOS, whose fsync leaves it in the disk's own cache; False elsewhere."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is None:
        return False
    try:
        fcntl.fcntl(fd, full)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOTTY):
            raise
        os.fsync(fd)  # a file system that has nothing better
    return True


def start_reading(fd: int, start: int, size: int) -> None:
    """Begin to read a range of a file from the disk: at most as much as its read-ahead is read."""
    if hasattr(os, "posix_fadvise"):  # not on macOS
        os.posix_fadvise(fd, start, size, os.POSIX_FADV_WILLNEED)


def start_writing(fd: int) -> None:
    """Begin to write a file's changes to the disk: the next sync has less to do."""
    with suppress(AttributeError):  # only Linux has it
        begin = ctypes.CDLL(None).sync_file_range
        begin.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
        begin(fd, 0, 0, _SYNC_FILE_RANGE_WRITE)


def sync_path(path: Path) -> None:
    """Make a closed file's content durable, or a folder's list of names."""
    fd = os.open(path, os.O_RDONLY)
    try:
        if not _sync_of_macos(fd):
            os.fsync(fd)
    finally:
        os.close(fd)


def commit(connection: sqlite3.Connection) -> None:
    """End a transaction of the index: from here on it counts."""
    connection.execute("COMMIT")


def renew(fd: int) -> None:
    """Write a file's content over itself, and make it durable.

    A sync that failed leaves pages that the system takes for written, and that no later sync would write.
    """
    _write_again(fd, 0, os.fstat(fd).st_size)
    sync(fd)


def _write_again(fd: int, start: int, end: int) -> None:
    """Write a range of a file over itself."""
    while start < end and (content := os.pread(fd, min(_AT_ONCE, end - start), start)):
        write(fd, content, start)
        start += len(content)


def work_in(connection: sqlite3.Connection) -> bool:
    """Write the index's log into its file, and empty the log; False where another process reads it."""
    busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not busy


def rename(old: Path, new: Path) -> None:
    """Give a folder another name."""
    os.rename(old, new)


def exchange(one: Path, other: Path) -> bool:
    """Let two folders change names at one moment; False where the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(code, os.strerror(code))


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
    0 where it is unknown."""
    if sys.platform != "linux":  # macOS's has another struct, whose first word is a size
        return 0
    try:
        statfs = ctypes.CDLL(None, use_errno=True).statfs
    except AttributeError:
        return 0
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    status = (ctypes.c_long * 64)()  # more than the struct, whose first word it is
    return status[0] & 0xFFFFFFFF if statfs(os.fsencode(there), status) == 0 else 0


def is_network(path: Path) -> bool:
    """Return whether other machines may have the file open, whose locks and mapped pages are not this one's."""
    return kind(path) in _NETWORK


def require_local(path: Path) -> None:
    """Refuse a place where a store cannot be written to commit by commit."""
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
