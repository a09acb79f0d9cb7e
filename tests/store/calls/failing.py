"""A library that lets one call into the system fail, and this process's hold of it."""

import ctypes
import errno
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit import compiled

SOURCE = Path(__file__).with_name("failing_calls.c")
ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EMFILE": errno.EMFILE}


def built(folder):
    """The library, to be preloaded; the test is skipped where it cannot be."""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("this system's libc has other calls")
    return compiled(SOURCE, folder / "failing_calls.so", "-O1", "-shared", "-fPIC", "-ldl")


class Calls:
    """The calls of this process, which was started with the library preloaded."""

    def __init__(self, folder):
        self._library, self._folder = ctypes.CDLL(os.environ["LD_PRELOAD"]), os.fsencode(folder)
        self._library.failed_call.restype = ctypes.c_char_p

    @contextmanager
    def failing(self, number, error) -> Iterator[list[str]]:
        """Let the call with this number on the folder fail; the list then has its name, if there were so many calls."""
        failed: list[str] = []
        self._library.fail_call(number, ERRORS[error], self._folder)
        try:
            yield failed
        finally:
            name = self._library.failed_call()
            self._library.fail_call(0, 0, self._folder)
            if name is not None:
                failed.append(name.decode())
