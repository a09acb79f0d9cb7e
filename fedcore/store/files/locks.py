"""One writer, many readers: the processes that have a store open, and the commit that each reader looks at."""

import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4
from weakref import WeakSet

from fedcore.errors import LockedError, StoreError
from fedcore.store.files import disk
from fedcore.store.files.inventory import DISPOSABLE, LOCK, READERS, SEVERAL_LINKS, is_note

_NEWEST = 2**63 - 1
_LENGTH = 96  # bytes of a lock file before the mark
_NOT_FOLLOWED = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe is not waited for
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


class _Held:
    """A locked file. The lock belongs to the open file, which a forked process would share: there it is closed."""

    def __init__(self) -> None:
        self._fd = -1
        _held.add(self)

    def forget(self) -> None:
        """Close this process's copy; the lock stays while another process has the file open."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def release(self) -> None:
        """Give the lock back, also for other copies of it."""
        if self._fd >= 0:
            with suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        self.forget()

    def is_of(self, file: os.stat_result) -> bool:
        """Return whether this is that file, locked by this process."""
        with suppress(OSError):  # another thread closes it just now
            return self._fd >= 0 and os.path.samestat(os.fstat(self._fd), file)
        return False


_held: WeakSet[_Held] = WeakSet()


def _forget_in_fork() -> None:
    for held in list(_held):
        held.forget()


os.register_at_fork(after_in_child=_forget_in_fork)


class WriterLock(_Held):
    """The right to write to a store, which ends with the process that holds it at the latest; its forks have no part.

    Args:
        folder: the store's.
        shared: keep every writer out, together with other shared locks, instead of being the writer.
        disposable: see ``mark``.
    """

    def __init__(self, folder: Path, *, shared: bool = False, disposable: bool = False) -> None:
        super().__init__()
        self._path = path = folder / LOCK
        self._identity = f"process {os.getpid()}\n{uuid4().hex}\n".encode()
        self._written = self._identity
        with disk.explained("locking", path):
            try:
                while not self._locked(path, shared):  # it was deleted before it was locked
                    self.forget()
                if not shared:
                    self.mark(disposable=disposable)
            except BaseException as error:
                self.forget()
                if shared or not isinstance(error, OSError) or error.errno not in _READ_ONLY:
                    raise
                raise StoreError(
                    f"{folder}: expected a folder that can be written to: {error.strerror}; open the store with "
                    "readonly=True, or get the right to write there"
                ) from error

    def mark(self, *, disposable: bool) -> None:
        """Write into the lock file whose it is, and whether the folder may be deleted once no process holds the lock.

        A draft may be, and a store that another one has replaced: ``inventory.is_disposable`` reads this.
        """
        self._written = self._identity.ljust(_LENGTH, b"\n") + (DISPOSABLE if disposable else b"\n" * len(DISPOSABLE))
        disk.write(self._fd, self._written)  # one call, so that a kill leaves the one text or the other
        if os.fstat(self._fd).st_size > len(self._written):
            disk.resize(self._fd, len(self._written))

    def require(self) -> None:
        """Make sure that no other process can have taken the right: the same lock file with the same content is there.

        Who deletes the file lets another process lock a new one; where locks do nothing, another has written to it.
        """
        try:
            file = os.stat(self._path, follow_symlinks=False)
            got = "the file of another" if not self.is_of(file) else self._who()
        except OSError as error:
            disk.require_folder(self._path.parent)
            got = f"none ({error.strerror})"
        if got is not None:
            raise LockedError(
                f"{self._path}: expected the lock of this process ({os.getpid()}), got {got}: another process may "
                "write to the store; nothing of this one's is written any more, so see to it that there is one, and "
                "open the store again"
            )

    def _who(self) -> str | None:
        """The process that has written to the locked file, if it is another."""
        content = os.pread(self._fd, 2 * len(self._written), 0)
        return None if content == self._written else f"that of {_first_line(content) or 'no process'}"

    def _locked(self, path: Path, shared: bool) -> bool:
        """Open and lock the file; whether it is still the one at that path."""
        how = os.O_RDONLY if shared and path.exists() else os.O_RDWR | os.O_CREAT
        self._fd = os.open(path, how | _NOT_FOLLOWED, 0o666)
        content = os.pread(self._fd, 2 * len(self._written), 0)
        if content and not content.startswith(b"process "):
            raise StoreError(f"{path}: expected a lock's content, got other content: it stays as it is")
        if not shared and os.fstat(self._fd).st_nlink > 1:
            raise StoreError(f"{path}: expected a file of the store's own, got {SEVERAL_LINKS}")
        try:
            fcntl.flock(self._fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockedError(self._refusal(path.parent, shared, content)) from None
        return os.fstat(self._fd).st_nlink > 0

    def _refusal(self, folder: Path, shared: bool, content: bytes) -> str:
        """The reason why the lock could not be had, and the way out."""
        due = "no writer, since readers cannot be noted in this folder" if shared else "no other writer"
        look = 'or look without writing: readonly=True of ClientStore.open, medium="ram" of Server.load'
        if shared:
            look = "or get the right to write in that folder"
        file = os.fstat(self._fd)
        if any(other.is_of(file) for other in _held if other is not self):
            return (
                f"{folder}: expected {due}, got this very process ({os.getpid()}): close() the server or store that "
                f"has it open (an open round keeps its server's store open too), {look}"
            )
        holder = _first_line(content) or "another process"
        return f"{folder}: expected {due}, got {holder}: close() the server or store there, {look}"

    def close(self) -> None:
        """Give the right back."""
        self.release()


def _first_line(content: bytes) -> str:
    return content.decode(errors="replace").partition("\n")[0].strip()


class ReaderPin(_Held):
    """A reader's note of the commit that it looks at: until it goes on, no slot of it is used again.

    The note is a file that the reader keeps locked, so that the note of a reader that died is recognised. A fork of the
    reader has no part in it.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        readers = folder / READERS
        with disk.explained("noting a reader", readers):
            try:
                while not self._noted(readers):  # the writer took it for a dead one before it was locked
                    self.forget()
            except BaseException:
                self.forget()  # the next writer deletes the note
                raise
            with suppress(OSError):
                os.fchmod(self._fd, 0o644)  # whatever the umask: the writer may be another user, and has to read it

    def _noted(self, readers: Path) -> bool:
        """Make and lock the file; whether it is still there."""
        self._path = readers / f"{os.getpid()}-{uuid4().hex}"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NOT_FOLLOWED, 0o644)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        return os.fstat(self._fd).st_nlink > 0

    def set(self, sequence: int) -> None:
        """Note which commit the reader looks at; before that it might be any."""
        with disk.explained("noting a reader", self._path):
            disk.write(self._fd, struct.pack("<q", sequence))

    def close(self) -> None:
        """The reader is done; a fork that closes what it has of a pin leaves the reader's."""
        if self._fd >= 0:
            with suppress(OSError):  # then it is the note of one that is gone, which the next writer deletes
                self._path.unlink()
            self.release()


def readers(folder: Path) -> list[tuple[int, int]]:
    """The living readers that can be looked at: the process of each, and the commit that it looks at (0: any)."""
    found = []
    with suppress(OSError), _opened(folder) as notes:
        for name in filter(is_note, os.listdir(notes)):
            commit = _pinned(notes, name)
            if commit != _NEWEST:
                found.append((int(name.partition("-")[0]), commit))
    return sorted(found)


def oldest_pin(folder: Path) -> int:
    """The oldest commit that a living reader looks at, 0 if it might be any; past every commit if there is none.

    It is asked after commits, which count already, and so raises nothing: of what cannot be looked at now (no file
    descriptor is left, say) it might be any. Only readers' notes are touched, and those of another user only read.
    """
    try:
        with _opened(folder) as notes:
            return min([_pinned(notes, name) for name in os.listdir(notes) if is_note(name)], default=_NEWEST)
    except (OSError, MemoryError):
        return 0


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    fd = os.open(folder / READERS, os.O_RDONLY | os.O_DIRECTORY | _NOT_FOLLOWED)
    try:
        yield fd
    finally:
        os.close(fd)


def _pinned(notes: int, name: str) -> int:
    """The commit of a note, past every commit if its reader has died; then its file goes, if it can be a note."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _NOT_FOLLOWED, dir_fd=notes)
    except OSError as error:
        return _NEWEST if error.errno in (errno.ENOENT, errno.ELOOP) else 0  # gone meanwhile; a link is no note
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        written = os.pread(fd, 8, 0)
        return int(struct.unpack("<q", written)[0]) if len(written) == 8 else 0
    else:
        note = os.fstat(fd)
        with suppress(OSError):  # not this user's to delete
            if stat.S_ISREG(note.st_mode) and note.st_size in (0, 8):
                os.unlink(name, dir_fd=notes)
        return _NEWEST
    finally:
        os.close(fd)
