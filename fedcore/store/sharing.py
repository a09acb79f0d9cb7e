"""One writer, many readers: who has a store open, and which commit each reader still looks at."""

import errno
import fcntl
import os
import struct
from pathlib import Path
from uuid import uuid4

from fedcore.errors import LockedError, StoreError
from fedcore.store import disk

LOCK = "lock"
READERS = "readers"
_NEWEST = 2**63 - 1


class WriterLock:
    """The right to write to a store, which ends with the process that holds it at the latest.

    Args:
        folder: the store's.
        shared: hold every writer off, together with others who do, instead of being the writer.

    Raises:
        LockedError: somebody else writes, or holds writers off.
        StoreError: the lock file cannot be opened.
    """

    def __init__(self, folder: Path, *, shared: bool = False) -> None:
        path = folder / LOCK
        with disk.explained("locking", path):
            try:
                self._fd = os.open(path, (os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT) | os.O_CLOEXEC, 0o666)
            except OSError as error:
                if shared or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
                raise StoreError(
                    f"{folder}: expected a folder that can be written to: {error.strerror}; open the store with "
                    "readonly=True, or get the right to write there"
                ) from error
            try:
                fcntl.flock(self._fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "another process"
                os.close(self._fd)
                due, todo = "no other writer", "open with readonly=True to read beside it"
                if shared:
                    due, todo = (
                        "no writer, since readers cannot be noted in this folder",
                        "get the right to write there",
                    )
                raise LockedError(f"{folder}: expected {due}, got {holder}: close that one, or {todo}") from None
            if not shared:
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, f"process {os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Give the right back; a forked process that closes its copy does not."""
        os.close(self._fd)


class Pin:
    """A reader's note of the commit that it looks at: until it goes on, no slot of it is used again.

    The note is a file that the reader keeps locked, so that a note whose reader has died can be told.
    """

    def __init__(self, folder: Path) -> None:
        self._process = os.getpid()
        readers = folder / READERS
        with disk.explained("noting a reader", readers):
            while True:
                self._path = readers / f"{os.getpid()}-{uuid4().hex}"
                self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                fcntl.flock(self._fd, fcntl.LOCK_EX)
                if os.fstat(self._fd).st_nlink:
                    break
                os.close(self._fd)  # the writer took it for a dead one before it was locked

    def set(self, sequence: int) -> None:
        """Say which commit the reader looks at; before it is said, it might be any."""
        os.pwrite(self._fd, struct.pack("<q", sequence), 0)

    def close(self) -> None:
        """The reader is done; a forked process that closes its copy of a pin leaves the reader's."""
        if self._process == os.getpid():
            self._path.unlink(missing_ok=True)
        os.close(self._fd)


def oldest_pin(folder: Path) -> int:
    """The oldest commit that a living reader looks at, 0 if it might be any; past every commit if there is none."""
    oldest = _NEWEST
    for entry in os.scandir(folder / READERS):
        try:
            fd = os.open(entry.path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(entry.path)  # its reader has died
        except BlockingIOError:
            written = os.pread(fd, 8, 0)
            oldest = min(oldest, struct.unpack("<q", written)[0] if len(written) == 8 else 0)
        finally:
            os.close(fd)
    return oldest
