"""Files that are replaced as a whole or stay as they were."""

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from fedcore.errors import ConfigError, StoreError


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """Make an empty file beside ``path``, which takes its name once the block is done; an error deletes it.

    Nobody can guess its name, so that a link in a folder of several users leads nowhere. Its mode is that of the file
    that it replaces, or follows the umask.

    Raises:
        StoreError: a pipe, a socket or a device is there.
    """
    draft, mode = path.with_name(f".{path.name}.{uuid4().hex[:12]}"), mode_of(path)
    first = 0o666 if mode is None else mode | 0o600  # never more than in the end, for other users
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, first))
    try:
        yield draft
        with open(draft, "rb") as written:
            if mode is not None:
                os.fchmod(written.fileno(), mode)
            os.fsync(written.fileno())
        os.replace(draft, path)
        _sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(draft)
        if isinstance(error, OSError) and error.filename2 is not None:
            raise type(error)(error.errno, error.strerror, str(path)) from None  # without the draft's name
        raise


def mode_of(path: Path) -> int | None:
    """Return the permissions of a file that a new one replaces; None if there is no regular file of this user.

    Raises:
        StoreError: a pipe, a socket or a device is there.
    """
    with suppress(FileNotFoundError):
        found = os.lstat(path)
        _require_no_device(path, found.st_mode)
        if stat.S_ISREG(found.st_mode) and is_own(path, found):
            return found.st_mode & 0o777
    return None


def is_own(path: Path, found: os.stat_result) -> bool:
    """Tell whether a file or folder is this user's.

    Some network file systems give every new file to one owner. There this user's files are those of that owner.
    """
    if found.st_uid == os.geteuid():
        return True
    with suppress(OSError), tempfile.TemporaryFile(dir=path.parent) as made:
        return found.st_uid == os.fstat(made.fileno()).st_uid
    return False


def require_file(path: Path) -> Path:
    """Return a path in a run's folder that is about to be read, which may be a stranger's folder.

    Raises:
        StoreError: a link is there, which may lead to a file of this user's; or a pipe, a socket or a device, whose
            reading may wait forever.
    """
    with suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            raise StoreError(f"{path}: expected a file of the folder's own, got a symbolic link: it is not followed")
        _require_no_device(path, mode)
    return path


def followed(path: Path) -> Path:
    """Return the place that a path names, behind this user's links and root's.

    Raises:
        StoreError: another user's link is on the way.
    """
    at = path
    for _ in range(40):  # as many as the system follows
        for place in (at, *at.parents):
            if place.is_symlink() and (found := os.lstat(place)).st_uid != 0 and not is_own(place, found):
                raise StoreError(f"{path}: expected a folder, got another user's link at {place}: it is not followed")
        if not at.is_symlink():
            break
        at = at.parent / os.readlink(at)
    return Path(os.path.realpath(path))


def _require_no_device(path: Path, mode: int) -> None:
    if stat.S_IFMT(mode) not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
        raise StoreError(f"{path}: expected a regular file, got a pipe, a socket or a device: move it elsewhere")


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, if this user can read it and the file system can do it."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


@contextmanager
def replacing(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a new file that takes the name ``path`` once the block is done: see ``draft_of``.

    Args:
        mode: "w" for text in UTF-8, "wb" for bytes.
    """
    text: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    with draft_of(path) as draft, open(draft, mode, **text) as file:
        yield file


def inside(home: Path, place: Path) -> Path:
    """Return a path below a folder, unless a link on the way leads elsewhere: the folder may be a stranger's.

    Raises:
        ConfigError: it does, or the path is not below the folder.
    """
    steps = place.relative_to(home).parts if place.is_relative_to(home) else ("..",)
    for n in range(1, len(steps) + 1):
        step = home.joinpath(*steps[:n])
        if step.name == ".." or step.is_symlink():
            raise ConfigError(f"{place}: expected a place inside {home}, got one elsewhere, or a link at {step}")
    return place


def write_text(path: Path, text: str) -> None:
    """Put a text in UTF-8 in the place of a file: see ``draft_of``."""
    with replacing(path) as file:
        file.write(text)
