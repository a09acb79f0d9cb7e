"""Acting as other users, which only root can."""

import os
import shutil
import tempfile
import traceback
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def opened_to_all(folder):
    """A copy of a store in a place where every user may read and write (pytest's folders are the user's own)."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o777)
        copy = shutil.copytree(folder, place / "store")
        for entry in [copy, *copy.rglob("*")]:
            entry.chmod(0o777 if entry.is_dir() else 0o666)
        yield copy


@contextmanager
def as_user(number):
    """In a fork: be another user from here on; an error ends the process with its traceback."""
    os.setgroups([])
    os.setgid(2000)
    os.setuid(number)
    try:
        yield
    except BaseException:
        traceback.print_exc()
        os._exit(3)
