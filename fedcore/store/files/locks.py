"""Locks of a store: one writer and many readers, each with the commit that it uses."""

import errno
import fcntl
import os
import stat
import struct
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from uuid import uuid4
from weakref import WeakSet

from fedcore.errors import LockedError, StoreError
from fedcore.files import FOLDER, HARD_LINKS, NAMED, SAFE, UNLISTED, OpenFolder, opened
from fedcore.store.files import disk
from fedcore.store.files.inventory import DISPOSABLE, LOCK, READERS, is_note

_NEWEST = 2**63 - 1
_LENGTH = 96  # bytes of a lock file before the disposable mark
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


class _LockedFile:
    """A locked file. A forked process would share the lock of an open file, so the fork closes the file."""

    def __init__(self) -> None:
        self._fd = -1
        _locked_files.add(self)

    def forget(self) -> None:
        """Close this process's file. The lock stays while another process has the file open."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def release(self) -> None:
        """Release the lock, even for other processes that share this open file."""
        if self._fd >= 0:
            with suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        self.forget()

    def is_of(self, file: os.stat_result) -> bool:
        """Whether this object has locked this file."""
        with suppress(OSError):  # another thread may close the file meanwhile
            return self._fd >= 0 and os.path.samestat(os.fstat(self._fd), file)
        return False


_locked_files: WeakSet[_LockedFile] = WeakSet()


def _all_locked() -> list[_LockedFile]:
    while True:
        with suppress(RuntimeError):  # another thread has added one meanwhile
            return list(_locked_files)


def _forget_in_fork() -> None:
    for file in _all_locked():
        file.forget()


os.register_at_fork(after_in_child=_forget_in_fork)


class WriterLock(_LockedFile):
    """The exclusive right to write to a store. It ends with the process at the latest; forks do not have it.

    With ``shared``, the lock only excludes writers, together with other shared locks. For ``disposable`` see ``mark``;
    such a folder is not a link. ``at`` is the folder if it is open.
    """

    def __init__(
        self, folder: Path, *, at: OpenFolder | None = None, shared: bool = False, disposable: bool = False
    ) -> None:
        super().__init__()
        self._path = path = folder / LOCK
        self._identity = f"process {os.getpid()}\n{uuid4().hex}\n".encode()
        self._written = self._identity
        with disk.explained("locking", path), ExitStack() as ends:
            try:
                place = at or ends.enter_context(closing(OpenFolder.of(folder, FOLDER if disposable else NAMED)))
                while not self._lock(place, shared):  # the file was deleted before it was locked
                    self.forget()
                if not shared:
                    self.mark(disposable=disposable)
            except BaseException as error:
                self.forget()
                if shared or not isinstance(error, OSError) or error.errno not in _READ_ONLY:
                    raise
                raise StoreError(
                    f"{folder}: no write access: {error.strerror}; open the store with readonly=True, or get write "
                    "access"
                ) from error

    def mark(self, *, disposable: bool) -> None:
        """Write to the lock file this process, and whether the folder may be deleted once it is unlocked.

        Drafts and replaced stores may be deleted; see ``inventory.is_disposable``.
        """
        self._written = self._identity.ljust(_LENGTH, b"\n") + (DISPOSABLE if disposable else b"\n" * len(DISPOSABLE))
        disk.write(self._fd, self._written)  # one call, so that a kill leaves the old or the new text
        if os.fstat(self._fd).st_size > len(self._written):
            disk.resize(self._fd, len(self._written))

    def require(self) -> None:
        """Raise a LockedError unless the lock file is unchanged, so that no other process can have the right to write.

        If the file is deleted, another process can lock a new one. If locks have no effect, the process overwrites this
        file.
        """
        try:
            file = os.stat(self._path, follow_symlinks=False)
            problem = self._overwritten() if self.is_of(file) else "the file was replaced"
        except OSError as error:
            disk.require_folder(self._path.parent)
            problem = f"the file is missing ({error.strerror})"
        if problem is not None:
            raise LockedError(
                f"{self._path}: process {os.getpid()} has lost the lock: {problem}. Another process may write to the "
                "store, so this one has stopped; end one of the two and open the store again"
            )

    def _overwritten(self) -> str | None:
        """Return the error text if another process has written to the locked file, or None."""
        if (content := self._content(self._fd)) == self._written:
            return None
        return f"{_first_line(content) or 'another process'} has written to the file"

    def _content(self, fd: int) -> bytes:
        return os.pread(fd, 2 * len(self._written), 0)

    def _lock(self, folder: OpenFolder, shared: bool) -> bool:
        """Open and lock the file; return whether it still has a name."""
        path = self._path
        self._fd = folder.open(LOCK, os.O_RDONLY if shared and folder.found(LOCK) else os.O_RDWR | os.O_CREAT)
        content = self._content(self._fd)
        if problem := lock_problem(folder):
            raise StoreError(problem)
        if not shared and os.fstat(self._fd).st_nlink > 1:
            raise StoreError(f"{path}: {HARD_LINKS}")
        try:
            fcntl.flock(self._fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockedError(self._refusal(path.parent, shared, content)) from None
        return os.fstat(self._fd).st_nlink > 0

    def _refusal(self, folder: Path, shared: bool, content: bytes) -> str:
        """Return the error text for a lock that another process or object holds."""
        due = "already open for writing"
        advice = 'or make the change there; to read: readonly=True of ClientStore.open, medium="ram" of Server.load'
        if shared:
            due = "no write access to register a reader, and the store is open for writing"
            advice = "or get write access to the folder"
        file = os.fstat(self._fd)
        if any(other.is_of(file) for other in _all_locked() if other is not self):
            return (
                f"{folder}: {due} in this process ({os.getpid()}); close() that server or store (and its open round), "
                f"{advice}"
            )
        return f"{folder}: {due} in {_first_line(content) or 'another process'}; close() the store there, {advice}"

    def close(self) -> None:
        """Release the lock."""
        self.release()


def _first_line(content: bytes) -> str:
    return content.decode(errors="replace").partition("\n")[0].strip()


class ReaderPin(_LockedFile):
    """The commit that a reader uses, in a file. The writer reuses no slot of this commit until the reader moves on.

    The reader keeps the file locked, so that the writer recognizes files of dead readers.
    """

    def __init__(self, folder: OpenFolder) -> None:
        super().__init__()
        self._folder, readers = folder, folder.path / READERS
        with disk.explained("registering a reader", readers):
            try:
                while not self._create(readers):  # a writer deleted the file before it was locked
                    self.forget()
            except BaseException:
                self.forget()  # the next writer deletes the file
                raise
            with suppress(OSError):
                os.fchmod(self._fd, 0o644)  # regardless of the umask: the writer may be another user and must read it

    def _create(self, readers: Path) -> bool:
        """Create and lock the file; return whether it still exists."""
        self._path = readers / f"{os.getpid()}-{uuid4().hex}"
        with opened(READERS, FOLDER | UNLISTED, self._folder.fd) as notes:
            self._fd = os.open(self._path.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | SAFE, 0o644, dir_fd=notes)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        return os.fstat(self._fd).st_nlink > 0

    def set(self, sequence: int) -> None:
        """Write the reader's commit. Until this call, the writer assumes that the reader may use any commit."""
        with disk.explained("registering a reader", self._path):
            disk.write(self._fd, struct.pack("<q", sequence))

    def close(self) -> None:
        """Delete the file. A fork that closes an inherited pin leaves the file."""
        if self._fd >= 0:
            # If it fails, the next writer deletes it.
            with suppress(OSError), opened(READERS, FOLDER | UNLISTED, self._folder.fd) as notes:
                os.unlink(self._path.name, dir_fd=notes)
            self.release()


def lock_problem(folder: OpenFolder) -> str | None:
    """Return a line if the lock file is damaged; the store could not be opened for writing."""
    with suppress(OSError), opened(LOCK, os.O_RDONLY | SAFE, folder.fd) as fd:
        if os.pread(fd, 8, 0) not in (b"", b"process "):
            return f"{folder.path / LOCK}: not a lock file of a store; delete it if no process uses the folder"
    return None


def pins(folder: OpenFolder) -> list[tuple[int, int]]:
    """Return the process and the commit (0: any) of each live reader; (0, 0) if the files cannot be read now.

    The function never raises, since it is called after a commit that is already durable. It opens only readers' files,
    and deletes those of dead readers if it may.
    """
    found = []
    try:
        with opened(READERS, FOLDER, folder.fd) as notes:
            for name in filter(is_note, os.listdir(notes)):
                commit = _pinned(notes, name)
                if commit != _NEWEST:
                    found.append((int(name.partition("-")[0]), commit))
    except (OSError, MemoryError):
        return [(0, 0)]
    return sorted(found)


def oldest_pin(folder: OpenFolder) -> int:
    """Return the oldest commit of a live reader; 0 if it may be any, or a number after every commit without readers."""
    return min((commit for _, commit in pins(folder)), default=_NEWEST)


def _pinned(notes: int, name: str) -> int:
    """Return the commit of a reader's file, or a number after every commit if the reader is dead. Delete such files."""
    try:
        fd = os.open(name, os.O_RDONLY | SAFE, dir_fd=notes)
    except OSError as error:
        return _NEWEST if error.errno in (errno.ENOENT, errno.ELOOP) else 0  # deleted meanwhile, or a link
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        written = os.pread(fd, 8, 0)
        return int(struct.unpack("<q", written)[0]) if len(written) == 8 else 0
    else:
        note = os.fstat(fd)
        with suppress(OSError):  # this user may not have the right to delete it
            if stat.S_ISREG(note.st_mode) and note.st_size in (0, 8):
                os.unlink(name, dir_fd=notes)
        return _NEWEST
    finally:
        os.close(fd)
