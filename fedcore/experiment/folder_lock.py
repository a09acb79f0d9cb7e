"""The right to run trials in a folder, which one process has at a time: two would write one record."""

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from fedcore.errors import ConfigError, LockedError

_NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a file system without locks of folders answers, as NFS does."""


@contextmanager
def locked(folders: Iterable[Path]) -> Iterator[None]:
    """Make folders, and hold them for this process; whoever reads them is not held off.

    A folder is held with all below it, if those who run there hold it by ``locked_run``. Its lock is its own, no file
    in it, and ends with the process, or the last that it forked. Where a file system has none, nobody is held off.

    Raises:
        ConfigError: a folder cannot be made.
        LockedError: somebody else runs trials there.
    """
    with ExitStack() as held:
        for folder in dict.fromkeys(folders):
            _made(folder)
            _hold(folder, fcntl.LOCK_EX, held)
        yield


@contextmanager
def locked_run(folder: Path) -> Iterator[None]:
    """``locked`` for the folder of one run, which may be a point of a sweep: then its preset's folder lies above it.

    Raises: what ``locked`` does.
    """
    with locked([folder]), ExitStack() as held:
        with suppress(PermissionError):  # it cannot be a sweep of ours
            _hold(folder.parent, fcntl.LOCK_SH, held)
        yield


def _made(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output folder: cannot write to {folder}: {error}") from error


def _hold(folder: Path, how: int, held: ExitStack) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    held.callback(os.close, opened)
    try:
        fcntl.flock(opened, how | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LockedError(
            f"{folder}: expected nobody else who runs trials in it, got another process, or another call: wait for it, "
            "stop it, or take another folder"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    else:
        held.callback(fcntl.flock, opened, fcntl.LOCK_UN)  # a process that was forked has a copy
