"""Files in folders that other users may write to: they are opened, checked and replaced here.

A name in such a folder may be a link, a pipe or another user's file. So a file is opened without following links and
without waiting, and checked before it is read or written. Drafts have random names. Libraries that open files by path
do so inside a folder that was checked before.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, Self
from uuid import uuid4

from fedcore.errors import ConfigError, StoreError

SAFE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Flags to open a file that another user may have made: links are not followed, and a pipe does not block."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags to open a folder that is not a link."""
NAMED = FOLDER & ~os.O_NOFOLLOW
"""Flags to open a folder that the caller has named, perhaps by a link."""
UNLISTED = getattr(os, "O_PATH", 0)
"""A further flag to open a folder for entries with known names. The user needs no right to list the folder."""
HARD_LINKS = "the file has several hard links, and a write would change all of them; replace it with a copy"
_LINK = "is a symbolic link, which is not followed; replace it with the file"
_NO_FILE = "expected a regular file, got a folder, a pipe, a socket or a device; move it elsewhere"


class OpenFolder(NamedTuple):
    """A folder that stays open, so that files in it are found even if a different folder gets its name."""

    path: Path
    fd: int

    @classmethod
    def of(cls, path: Path, flags: int = NAMED) -> Self:
        """Open a folder."""
        return cls(path, os.open(path, flags))

    def open(self, name: str, flags: int) -> int:
        """Return the descriptor of a file in the folder, which is not a link. A pipe does not block."""
        return os.open(name, flags | SAFE, 0o666, dir_fd=self.fd)

    def found(self, name: str) -> os.stat_result | None:
        """Return the status of an entry, or of a link itself; None if it does not exist."""
        with suppress(FileNotFoundError):
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        return None

    def close(self) -> None:
        """Close the folder, if it is open."""
        if self.fd >= 0:
            os.close(self.fd)


@contextmanager
def opened(path: str | Path, flags: int, folder: int | None = None) -> Iterator[int]:
    """Yield a file descriptor of a path, which may be relative to an open folder."""
    fd = os.open(path, flags, dir_fd=folder)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def closed_on_error(part: Any) -> Iterator[None]:
    """Close ``part`` if the block raises an error."""
    try:
        yield
    except BaseException:
        part.close()
        raise


def open_file(
    path: str | Path, flags: int = os.O_RDONLY, folder: OpenFolder | None = None, *, follows: bool = False
) -> int:
    """Return a descriptor of a regular file.

    Args:
        path: relative to ``folder``, if given.
        flags: of ``os.open``. A file that is opened for writing must belong to this user and have no other hard link.
        folder: an open folder.
        follows: whether a link is followed, because the caller has named it.

    Raises:
        StoreError: the path is a link, a pipe, a device or a folder, or must not be written.
        OSError: the file does not exist, for example.
    """
    safe, whole = SAFE & ~os.O_NOFOLLOW if follows else SAFE, _whole(path, folder)
    try:
        fd = os.open(path, flags | safe, 0o666, dir_fd=_fd(folder))
    except OSError as error:
        reason = {errno.ELOOP: None if follows else _LINK, errno.ENXIO: _NO_FILE, errno.EISDIR: _NO_FILE}
        if (known := reason.get(error.errno or 0)) is None:
            raise
        raise StoreError(f"{whole}: {known}") from None
    try:
        found = os.fstat(fd)
        problem = None if stat.S_ISREG(found.st_mode) else _NO_FILE
        if problem is None and flags & (os.O_WRONLY | os.O_RDWR):
            problem = HARD_LINKS if found.st_nlink > 1 else None
            if not is_own(whole, found):
                problem = "belongs to another user; move it elsewhere"
        if problem is not None:
            raise StoreError(f"{whole}: {problem}")
    except BaseException:
        os.close(fd)
        raise
    return fd


def reading(path: Path, folder: OpenFolder | None = None) -> IO[bytes]:
    """Open a regular file to read it; see ``open_file``."""
    return open(open_file(path, folder=folder), "rb")


def read_bytes(path: Path, most: int | None = None, folder: OpenFolder | None = None) -> bytes:
    """Return the content of a regular file; see ``open_file``. A file of more than ``most`` bytes raises StoreError."""
    with reading(path, folder) as file:
        content = file.read() if most is None else file.read(most + 1)
    if most is not None and len(content) > most:
        raise StoreError(f"{_whole(path, folder)}: must have at most {most:,} bytes; move it elsewhere")
    return content


def read_text(path: Path) -> str:
    """Return the content of a regular file in UTF-8, without a byte order mark; see ``open_file``."""
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise StoreError(f"{path}: is not text in UTF-8 ({error}); restore the file") from None


def _whole(path: str | Path, folder: OpenFolder | None) -> Path:
    return Path(path) if folder is None else folder.path / path


def _fd(folder: OpenFolder | None) -> int | None:
    return None if folder is None else folder.fd


def is_own(path: Path, found: os.stat_result) -> bool:
    """Whether this user owns a file or folder.

    Some network file systems assign every new file to one owner. The files of that owner then count as this user's.
    """
    if found.st_uid == os.geteuid():
        return True
    from tempfile import TemporaryFile  # slow to import

    with suppress(OSError), TemporaryFile(dir=path.parent) as new:
        return found.st_uid == os.fstat(new.fileno()).st_uid
    return False


def is_own_folder(folder: Path) -> bool:
    """Whether a path is a folder of this user, and not a link to one."""
    found = os.lstat(folder)
    return stat.S_ISDIR(found.st_mode) and is_own(folder, found)


def require_own_file(path: Path) -> None:
    """Raise a StoreError if the file is a link or another user's."""
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode) or not is_own(path, found):
        raise StoreError(f"{path}: is a link, or belongs to another user; use a different folder")


def require_same(folder: Path, found: os.stat_result | None, opened: os.stat_result) -> None:
    """Raise a StoreError if a different folder has replaced the one that was checked."""
    if found is not None and not os.path.samestat(found, opened):
        raise StoreError(f"{folder}: replaced by a different folder, which was not changed")


def part_of(path: Path, advice: str = "copy the outer folder from its owner again") -> os.stat_result | None:
    """Return the status of a folder that belongs to the folder around it; None if it does not exist.

    Raises:
        StoreError: it is a link or a file, or belongs neither to this user nor to the owner of the outer folder.
    """
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreError(f"{path}: cannot be looked at: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.geteuid(), os.stat(path.parent).st_uid):
        raise StoreError(f"{path}: is a link, is no folder, or belongs to another user; {advice}")
    return found


def resolve_own_links(path: Path) -> Path:
    """Return a path with all links resolved; raise StoreError for links of users other than this user and root."""
    at = path
    for _ in range(40):  # Linux follows at most 40 links
        for place in (at, *at.parents):
            if place.is_symlink() and (found := os.lstat(place)).st_uid != 0 and not is_own(place, found):
                raise StoreError(f"{path}: the link {place} belongs to a different user and is not followed")
        if not at.is_symlink():
            break
        at = at.parent / os.readlink(at)
    return Path(os.path.realpath(path))


def inside(home: Path, place: Path) -> Path:
    """Return a path if it is inside a folder and contains no links below the folder; else raise ConfigError."""
    steps = place.relative_to(home).parts if place.is_relative_to(home) else ("..",)
    for n in range(1, len(steps) + 1):
        step = home.joinpath(*steps[:n])
        if step.name == ".." or step.is_symlink():
            raise ConfigError(f"{place}: must be inside {home}, without links and '..' ({step})")
    return place


@contextmanager
def draft_of(path: Path, folder: OpenFolder | None = None) -> Iterator[Path]:
    """Yield an empty file in the folder of ``path``; rename it to ``path`` after the block, or delete it on an error.

    The name is random, so that no link of a different user in a shared folder can redirect the write. The file has the
    mode of the replaced file, or that of the umask for a new path. A pipe, a socket or a device raises StoreError.
    ``path`` is relative to ``folder``, if given.
    """
    if folder is None:
        with closing(OpenFolder.of(path.parent, NAMED | UNLISTED)) as outer, draft_of(Path(path.name), outer) as draft:
            yield path.with_name(draft.name)
        return
    draft, mode = path.with_name(f".{path.name}.{uuid4().hex[:12]}"), mode_of(path, folder)
    first = 0o666 if mode is None else mode | 0o600  # other users never have more rights than on the final file
    try:
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, first, dir_fd=folder.fd))
        yield draft
        with opened(draft, os.O_RDONLY | SAFE, folder.fd) as written:
            if mode is not None:
                os.fchmod(written, mode)
            os.fsync(written)
        os.replace(draft, path, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
        sync_folder(path.parent, folder)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(draft, dir_fd=folder.fd)
        if isinstance(error, OSError) and Path(str(error.filename)).name == draft.name:
            raise type(error)(error.errno, error.strerror, str(folder.path / path)) from None  # hides the draft's name
        raise


def mode_of(path: Path, folder: OpenFolder | None = None) -> int | None:
    """Return the permissions of a regular file of this user, else None; raise StoreError for pipes and devices."""
    with suppress(FileNotFoundError):
        found = os.stat(path, dir_fd=_fd(folder), follow_symlinks=False)
        if stat.S_IFMT(found.st_mode) not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
            raise StoreError(f"{_whole(path, folder)}: {_NO_FILE}")
        if stat.S_ISREG(found.st_mode) and is_own(_whole(path, folder), found):
            return found.st_mode & 0o777
    return None


@contextmanager
def replacing(path: Path, mode: str = "w", folder: OpenFolder | None = None) -> Iterator[IO[Any]]:
    """Open a new file for UTF-8 text ("w") or bytes ("wb") that replaces ``path`` after the block; see ``draft_of``."""
    text: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    with draft_of(path, folder) as draft:
        fd = os.open(draft, os.O_WRONLY | SAFE, dir_fd=_fd(folder))
        with open(fd, mode, **text) as file:
            yield file


def write_text(path: Path, text: str) -> None:
    """Replace a file's content by a text in UTF-8; see ``draft_of``."""
    with replacing(path) as file:
        file.write(text)


def sync_folder(path: Path, folder: OpenFolder | None = None) -> None:
    """Make the names in a folder durable if this user can read the folder and the file system supports it."""
    with suppress(PermissionError), opened(path, os.O_RDONLY | os.O_DIRECTORY, _fd(folder)) as fd:
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
