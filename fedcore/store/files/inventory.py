"""The inventory of a store's folder: which entries are the store's own, and how just these are deleted."""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from uuid import uuid4

from fedcore.atomic_file import is_own
from fedcore.errors import StoreError

LOCK = "lock"
READERS = "readers"
ROWS = "rows.slots"
VECTORS = "vectors-{}.slots"
INDEX = "index.sqlite"
JOURNAL = f"{INDEX}-journal"
SHARED = f"{INDEX}-shm"
DISPOSABLE = b"to be deleted\n"
"""The end of a lock file whose folder may be deleted: a draft's, or that of a store that another has replaced."""
SEVERAL_LINKS = "one with several hard links, all of which would change: put a copy in its place"

_VECTORS = re.compile(r"vectors-[1-9][0-9]*\.slots")
_FILES = re.compile(r"lock|rows\.slots|vectors-[1-9][0-9]*\.slots|index\.sqlite(-wal|-shm)?")
_NOTES = re.compile(r"[1-9][0-9]*-[0-9a-f]{32}")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def require_own(folder: Path, *, writable: bool = False) -> None:
    """Reject a folder with a rollback journal, or in which a link, a pipe or a device has the name of a store's entry.

    A folder may come from a stranger: every file that is opened in it must lie in it. ``WriterLock`` checks the lock.

    Args:
        writable: reject also a file with a second hard link: to write to it changes a file elsewhere. SQLite writes
            to the index's shared memory even where it reads.
    """
    require_no_journal(folder / INDEX)
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name.casefold()  # some file systems find index.sqlite under INDEX.SQLITE
            if name != READERS and not _FILES.fullmatch(name):
                continue
            due = "folder" if name == READERS else "file"
            may_change = name == SHARED or (writable and name not in (LOCK, READERS))
            if entry.is_symlink():
                got = "a symbolic link: it is not followed"
            elif not _is(entry, due):
                got = "no regular file" if due == "file" else "none"
            elif may_change and entry.stat().st_nlink > 1:
                got = SEVERAL_LINKS
            else:
                continue
            raise StoreError(f"{folder / entry.name}: expected a {due} of the store's own, got {got}")


def require_no_journal(index: Path) -> None:
    """Reject an index beside which anything has the name of a rollback journal, before SQLite looks at it.

    SQLite plays such a journal back when it first reads the file, and then deletes the file that the journal names as
    its super-journal: any file of this user. The path is looked up as SQLite looks it up.
    """
    journal = index.with_name(JOURNAL)
    if os.path.lexists(journal):
        raise StoreError(
            f"{journal}: expected no rollback journal, got one: fedcore never leaves one in a store, and SQLite would "
            "delete the file that it names, anywhere; do not use this folder unless you know who put the journal there"
        )


def strangers(folder: Path) -> list[str]:
    """The entries of a folder that no store has put there, those of its ``readers`` included; links always are."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name == READERS and _is(entry, "folder"):
                with os.scandir(entry) as notes:
                    found += [f"{READERS}/{n.name}" for n in notes if not (is_note(n.name) and _is(n, "file"))]
            elif not (_FILES.fullmatch(entry.name) and _is(entry, "file")):
                found.append(entry.name)
    return sorted(found)


def is_note(name: str) -> bool:
    """Return whether a reader's note of a store may be called so."""
    return _NOTES.fullmatch(name) is not None


def is_data(name: str) -> bool:
    """Return whether a store's file with content, not one of its locks, may have this name."""
    return name != LOCK and not name.endswith("-shm") and _FILES.fullmatch(name) is not None


def vector_files(folder: Path) -> list[Path]:
    """The files of vectors in a store's folder."""
    with os.scandir(folder) as entries:
        return [folder / e.name for e in entries if _VECTORS.fullmatch(e.name) and _is(e, "file")]


def draft_of(path: Path) -> Path:
    """A new name for a draft beside ``path``; its end marks it as one."""
    return _draft_named(path, uuid4().hex[:6])


def _draft_named(path: Path, token: str) -> Path:
    name = f"{path.name}.draft-{token}"
    return path.with_name(name + blake2b(os.fsencode(name), digest_size=3).hexdigest())


def drafts_of(path: Path) -> list[Path]:
    """The folders beside ``path`` that drafts of a store there have left: by name, owner, entries and lock file.

    An empty one, of a process that was killed in between, is known by its name's end alone.
    """
    name = re.compile(re.escape(path.name) + r"\.draft-([0-9a-f]{6})[0-9a-f]{6}")
    if not path.parent.is_dir():
        return []
    found = []
    with os.scandir(path.parent) as entries:
        for entry in entries:
            if (known := name.fullmatch(entry.name)) and _is(entry, "folder"):
                folder = path.parent / entry.name
                if _is_left(folder, by_name=folder == _draft_named(path, known[1])):
                    found.append(folder)
    return found


def delete(folder: Path, found: os.stat_result | None = None) -> None:
    """Delete a store's own entries, its index first and its lock last, and then the folder if nothing else is in it.

    Of a part that is left, the missing index shows that it is no store any more, and the lock that no process is
    at it. Links are not followed. Nothing is done where there is no folder.

    Args:
        found: the folder that was looked at; another one in its place stays.
    """
    with suppress(FileNotFoundError), _opened(folder) as fd:
        require_same(folder, found, os.fstat(fd))
        with suppress(FileNotFoundError):
            with _opened(READERS, fd) as readers:
                _unlink(readers, [name for name in os.listdir(readers) if is_note(name)])
            with suppress(OSError):  # something else is in it
                os.rmdir(READERS, dir_fd=fd)
        names = [name for name in os.listdir(fd) if _FILES.fullmatch(name) and name not in (INDEX, LOCK)]
        _unlink(fd, [INDEX, *names, LOCK])
    with suppress(OSError):  # something else is in it
        folder.rmdir()


def require_same(folder: Path, found: os.stat_result | None, opened: os.stat_result) -> None:
    """Raise a StoreError if another folder has taken the place of the one that was checked."""
    if found is not None and not os.path.samestat(found, opened):
        raise StoreError(f"{folder}: expected the folder that was there, got another in its place: it stays")


def _unlink(folder: int, names: list[str]) -> None:
    for name in names:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)


def _is_left(folder: Path, *, by_name: bool) -> bool:
    try:
        if not is_own_folder(folder) or strangers(folder):
            return False
        return is_disposable(folder) or (by_name and not os.listdir(folder))
    except OSError:  # gone meanwhile, or not ours to look at
        return False


def is_own_folder(folder: Path) -> bool:
    """Return whether a path is a folder itself, no link to one, and this user's."""
    found = os.lstat(folder)
    return stat.S_ISDIR(found.st_mode) and is_own(folder, found)


def is_disposable(folder: Path) -> bool:
    """Return whether a lock file marks the folder as one that may be deleted. Another may be a user's."""
    with _opened(folder) as fd:
        try:
            lock = os.open(LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=fd)
        except FileNotFoundError:
            return False
        try:
            content = os.pread(lock, 200, 0)
        finally:
            os.close(lock)
    return content.startswith(b"process ") and content.endswith(DISPOSABLE)


def _is(entry: "os.DirEntry[str]", kind: str) -> bool:
    """Return whether an entry is itself a regular file, or a folder."""
    if kind == "folder":
        return entry.is_dir(follow_symlinks=False)
    return stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode)


@contextmanager
def _opened(name: str | Path, parent: int | None = None) -> Iterator[int]:
    fd = os.open(name, _FOLDER, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)
