"""SQLite's connections to an index beside which a stranger may put a rollback journal at any moment."""

import fcntl
import os
import sqlite3
import stat
import struct
import threading
from contextlib import suppress
from pathlib import Path
from typing import Literal

from fedcore.errors import StoreError
from fedcore.store.files import system_calls as disk

Access = Literal["rw", "ro", "immutable"]
_File = tuple[int, int]  # device and number
_RESERVED = 0x40000001  # the byte of its file that SQLite locks for a writer with a rollback journal
_TRIES = 100

_turn = threading.Lock()
_uses: dict[_File, int] = {}  # the open connections to each index
_open: dict[_File, list[int]] = {}  # and the descriptors that hold its lock


def _begin_in_fork() -> None:
    global _turn
    _turn = threading.Lock()


os.register_at_fork(after_in_child=_begin_in_fork)


class _Connection(sqlite3.Connection):
    """A connection to a locked index."""

    file: _File | None = None

    def close(self) -> None:
        with _turn:
            super().close()
            file, self.file = self.file, None
            if file is not None:
                _release(file)


def connect(path: Path, access: Access) -> sqlite3.Connection:
    """Connect to an existing index, so that SQLite plays back no rollback journal, whenever one appears.

    SQLite plays a journal back unless a live writer holds the index's reserved byte. So this process holds it, by a
    shared lock of the open file. No index of a store is ever locked there otherwise: all have a write-ahead log.

    Args:
        access: "immutable" looks for no journal, and takes no lock.

    Raises:
        StoreError: the index cannot be opened or locked, or other files keep taking its place.
    """
    if access == "immutable":
        return _connected(path, "immutable=1")
    with _turn, disk.explained("opening", path):
        for _ in range(_TRIES):
            file, before = _held(path), _files()
            try:
                connection = _connected(path, f"mode={access}")
            except BaseException:
                _release(file)
                raise
            # Nothing was read yet. A file of another thread looks like a swapped index here: the next try tells.
            if all(opened == file for _, opened in _files() - before):
                connection.file = file
                return connection
            sqlite3.Connection.close(connection)  # without the turn, which is taken
            _release(file)
    raise StoreError(f"{path}: expected one index, got others in its place meanwhile: do not use this folder")


def _connected(path: Path, options: str) -> _Connection:
    name = f"{path.absolute().as_uri()}?{options}"
    return sqlite3.connect(
        name, uri=True, isolation_level=None, timeout=60, check_same_thread=False, factory=_Connection
    )


def _held(path: Path) -> _File:
    """Lock the index, once for all connections of this process; its number."""
    file = _number(os.lstat(path))
    if file not in _uses:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        file = _number(os.fstat(fd))
        _open.setdefault(file, []).append(fd)
    _uses[file] = _uses.get(file, 0) + 1
    try:
        if lock := getattr(fcntl, "F_OFD_SETLK", None):  # Linux alone has it
            for fd in _open[file]:
                fcntl.fcntl(fd, lock, struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, _RESERVED, 1, 0))
    except BaseException:
        _release(file)
        raise
    return file


def _release(file: _File) -> None:
    """Unlock an index behind its last connection: to close any descriptor of a file gives up SQLite's own locks."""
    _uses[file] -= 1
    if not _uses[file]:
        del _uses[file]
        for fd in _open.pop(file):
            os.close(fd)


def _files() -> set[tuple[int, _File]]:
    """The regular files that this process has open; none where the system does not list them."""
    found: set[tuple[int, _File]] = set()
    with suppress(FileNotFoundError):
        for fd in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):  # closed meanwhile
                if stat.S_ISREG((status := os.fstat(fd)).st_mode):
                    found.add((fd, _number(status)))
    return found


def _number(status: os.stat_result) -> _File:
    return status.st_dev, status.st_ino
