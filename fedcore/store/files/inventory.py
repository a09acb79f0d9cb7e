"""The entries of a store's folder: which of them belong to the store, and their deletion."""

import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from uuid import uuid4

from fedcore.errors import StoreError
from fedcore.files import FOLDER, HARD_LINKS, SAFE, OpenFolder, is_own_folder, opened, require_same

LOCK = "lock"
READERS = "readers"
GROUPS, UPDATES = "groups", "round"
"""Folders of further stores in a store's folder: numbered ones of a server's groups, and the journal of its round."""
ROWS = "rows.slots"
VECTORS = "vectors-{}.slots"
INDEX = "index.sqlite"
JOURNAL = f"{INDEX}-journal"
SHARED, LOG = f"{INDEX}-shm", f"{INDEX}-wal"
DISPOSABLE = b"to be deleted\n"
"""The end of a lock file whose folder may be deleted: a draft, or a replaced store."""

_VECTORS = re.compile(r"vectors-[1-9][0-9]*\.slots")
_PARTS = re.compile(rf"({UPDATES}|{GROUPS}/[0-9]+)(\.draft-[0-9a-f]{{12}})?")
_FILES = re.compile(r"lock|rows\.slots|vectors-[1-9][0-9]*\.slots|index\.sqlite(-wal|-shm)?")
_NOTES = re.compile(r"[1-9][0-9]*-[0-9a-f]{32}")


def require_own(folder: OpenFolder, *, writable: bool = False) -> None:
    """Reject a folder with a rollback journal, or with a link, pipe or device under the name of a store's file.

    A folder may come from another user, so every opened file must be inside it. ``WriterLock`` checks the lock file.
    With ``writable``, files with several hard links are rejected too, since a write would change a file elsewhere. This
    always applies to the index's shared memory, which SQLite writes even when it reads.
    """
    require_no_journal(folder.path / INDEX)
    with os.scandir(folder.fd) as entries:
        for entry in entries:
            name = entry.name.casefold()  # some file systems find index.sqlite under INDEX.SQLITE
            if name != READERS and not _FILES.fullmatch(name):
                continue
            may_change = name == SHARED or (writable and name not in (LOCK, READERS))
            if entry.is_symlink():
                problem = "is a symbolic link, which a store does not follow"
            elif not _is(entry, "folder" if name == READERS else "file"):
                problem = f"is not a {'folder' if name == READERS else 'regular file'}"
            elif may_change and entry.stat().st_nlink > 1:
                problem = HARD_LINKS
            else:
                continue
            raise StoreError(f"{folder.path / entry.name}: {problem}")


def require_no_journal(index: Path) -> None:
    """Reject an index with a rollback journal, before SQLite opens the index.

    SQLite rolls such a journal back at the first read. It then deletes the super-journal that the journal names, which
    may be any file of this user. The journal's path is derived in the same way as in SQLite.
    """
    journal = index.with_name(JOURNAL)
    if os.path.lexists(journal):
        raise StoreError(
            f"{journal}: fedcore never leaves a rollback journal. With this one, SQLite could delete any file that the "
            "journal names; do not use this folder unless you know the origin of the journal"
        )


def strangers(folder: Path) -> list[str]:
    """Return the entries of a folder, its ``readers`` and its parts that no store creates. Links always count."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name == READERS and _is(entry, "folder"):
                with os.scandir(entry) as notes:
                    found += [f"{READERS}/{n.name}" for n in notes if not (is_note(n.name) and _is(n, "file"))]
            elif entry.name == GROUPS and _is(entry, "folder"):
                with os.scandir(entry) as groups:
                    found += [name for group in groups for name in _strangers_in(group, f"{GROUPS}/{group.name}")]
            elif _PARTS.fullmatch(entry.name):
                found += _strangers_in(entry, entry.name)
            elif not (_FILES.fullmatch(entry.name) and _is(entry, "file")):
                found.append(entry.name)
    return sorted(found)


def _strangers_in(part: "os.DirEntry[str]", name: str) -> list[str]:
    if not (_PARTS.fullmatch(name) and _is(part, "folder")):
        return [name]
    return [f"{name}/{inside}" for inside in strangers(Path(part))]


def is_note(name: str) -> bool:
    """Whether a reader's file may have this name."""
    return _NOTES.fullmatch(name) is not None


def is_data(name: str) -> bool:
    """Whether a data file of a store may have this name; locks are not data."""
    return name != LOCK and not name.endswith("-shm") and _FILES.fullmatch(name) is not None


def vector_files(folder: OpenFolder) -> list[str]:
    """Return the names of the files of vectors in a store's folder."""
    with os.scandir(folder.fd) as entries:
        return [e.name for e in entries if _VECTORS.fullmatch(e.name) and _is(e, "file")]


def draft_of(path: Path, token: str | None = None) -> Path:
    """Return the path of a draft next to ``path``. Default: a new name. The last six digits mark it as a draft."""
    name = f"{path.name}.draft-{token or uuid4().hex[:6]}"
    return path.with_name(name + blake2b(os.fsencode(name), digest_size=3).hexdigest())


def drafts_of(path: Path) -> list[Path]:
    """Return the folders next to ``path`` that drafts of a store have left, by name, owner, entries and lock file.

    A process that is killed early leaves an empty folder, which only its name identifies.
    """
    name = re.compile(re.escape(path.name) + r"\.draft-([0-9a-f]{6})[0-9a-f]{6}")
    if not path.parent.is_dir():
        return []
    with os.scandir(path.parent) as entries:
        named = [(path.parent / e.name, match[1]) for e in entries if (match := name.fullmatch(e.name))]
    return [folder for folder, token in named if _is_left(folder, is_named=folder == draft_of(path, token))]


def _is_left(folder: Path, *, is_named: bool) -> bool:
    """Whether a folder is a leftover draft. The folder may vanish meanwhile, or belong to another user."""
    with suppress(OSError):
        if is_own_folder(folder) and not strangers(folder):
            return is_disposable(folder) or (is_named and not os.listdir(folder))
    return False


def delete(folder: Path, found: os.stat_result | None = None) -> None:
    """Delete a store's own entries, its index first and its lock last, and its parts; then the folder if it is empty.

    After a partial deletion the folder has no index, so it is not a store, and still a lock, so no process uses it.
    Links are not followed. A missing folder, or one other than ``found``, is ignored.
    """
    with suppress(FileNotFoundError), opened(folder, FOLDER) as fd:
        require_same(folder, found, os.fstat(fd))
        _empty(fd)
    with suppress(OSError):  # it is not empty
        folder.rmdir()


def _empty(fd: int) -> None:
    _unlink(fd, [INDEX])
    _delete_in(fd, READERS, lambda readers: _unlink(readers, [name for name in os.listdir(readers) if is_note(name)]))
    for name in filter(_PARTS.fullmatch, os.listdir(fd)):
        _delete_in(fd, name, _empty)
    _delete_in(fd, GROUPS, _empty_groups)
    _unlink(fd, [name for name in os.listdir(fd) if _FILES.fullmatch(name) and name != LOCK])
    _unlink(fd, [LOCK])


def _empty_groups(fd: int) -> None:
    for name in os.listdir(fd):
        if _PARTS.fullmatch(f"{GROUPS}/{name}"):
            _delete_in(fd, name, _empty)


def _delete_in(folder: int, name: str, empty: Callable[[int], None]) -> None:
    """Delete a folder in an open one, after ``empty``, unless it does not exist, is a link or has other content."""
    with suppress(FileNotFoundError, NotADirectoryError), opened(name, FOLDER, folder) as fd:
        empty(fd)
    with suppress(OSError):
        os.rmdir(name, dir_fd=folder)


def _unlink(folder: int, names: list[str]) -> None:
    for name in names:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)


def is_disposable(folder: Path) -> bool:
    """Whether the lock file marks the folder as one that may be deleted."""
    flags = os.O_RDONLY | SAFE
    with suppress(FileNotFoundError), opened(folder, FOLDER) as fd, opened(LOCK, flags, fd) as lock:
        content = os.pread(lock, 200, 0)
        return content.startswith(b"process ") and content.endswith(DISPOSABLE)
    return False


def _is(entry: "os.DirEntry[str]", kind: str) -> bool:
    if kind == "folder":
        return entry.is_dir(follow_symlinks=False)
    return stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode)
