"""The right to run trials in a folder, which one process has at a time: two would write one record."""

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fedcore.errors import ConfigError, LockedError


@contextmanager
def locked(folders: Iterable[Path]) -> Iterator[None]:
    """Make folders, and hold them for this process, at the latest until it ends; whoever reads them is not held off.

    A folder's lock is its own, no file in it. Where a file system has none for folders, nobody is held off.

    Raises:
        ConfigError: a folder cannot be made.
        LockedError: trials run there already.
    """
    with ExitStack() as held:
        for folder in dict.fromkeys(folders):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError as error:
                raise ConfigError(f"output folder: cannot write to {folder}: {error}") from error
            held.callback(os.close, opened)
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LockedError(
                    f"{folder}: expected no other process that runs trials in it, got one: wait for it, stop it, or "
                    "take another folder"
                ) from None
            except OSError:  # no such lock here
                pass
        yield
