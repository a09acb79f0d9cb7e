"""The CUDA driver of the tests (tests/native/cuda/driver): kernels run on the host, and it records its calls.

It takes the true driver's place in a process that has not used CUDA yet, unless FEDCORE_CUDA_DRIVER is set: an empty
one stands for the true driver, and so for a real GPU.
"""

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.native.build import FAKE_CUDA, fake_cuda

DEVICES = 2
MEMORY = 8 << 30  # bytes of each device
_NAMED = os.environ.get("FEDCORE_CUDA_DRIVER")  # by a parent of this process it is the fake one
REAL = _NAMED is not None and Path(_NAMED).name != FAKE_CUDA


class Call(NamedTuple):
    """A call of the driver: the function's name, and some arguments (``bytes``, ``stream``, ``grid``)."""

    name: str
    words: tuple[str, ...]

    @property
    def kernel(self):
        """The kernel that is launched, without its prefix; None if it is another call."""
        return self.words[0].removeprefix("fedcore_") if self.name == "cuLaunchKernel" else None

    def argument(self, word):
        """The number of a named argument, as in ``stream=5``."""
        return next(int(text.removeprefix(word + "=")) for text in self.words if text.startswith(word + "="))


class FakeDriver:
    """The driver in this process: its recorded calls, and failures on request."""

    def __init__(self, path):
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)
        self._library.fake_cuda_calls.restype = ctypes.c_char_p
        self._library.fake_cuda_live_bytes.restype = ctypes.c_size_t
        self._library.fake_cuda_pinned_bytes.restype = ctypes.c_size_t

    def calls(self):
        """The calls since the last time, without those that choose a context."""
        found = [Call(words[0], tuple(words[1:])) for words in map(str.split, self.lines())]
        return [call for call in found if not call.name.startswith("cuCtx")]

    def lines(self):
        """All calls since the last time, a text each."""
        return self._library.fake_cuda_calls().decode().splitlines()

    def fail(self, name, code, after=0):
        """Let a function fail with a code, once, after so many calls that go well; "kernel" is one that runs."""
        self._library.fake_cuda_fail(name.encode(), code, after)

    def mend(self):
        """Cancel requested failures and sticky errors."""
        self._library.fake_cuda_mend()

    def live_bytes(self, device=-1):
        """How much of a device's memory is taken, or of all devices'."""
        return self._library.fake_cuda_live_bytes(device)

    def pinned_bytes(self):
        """How much pinned memory is taken."""
        return self._library.fake_cuda_pinned_bytes()

    def set_limit(self, memory=MEMORY):
        """Set the bytes of memory of each device."""
        self._library.fake_cuda_set_memory(ctypes.c_size_t(memory))


def environment(**changes):
    """The environment of a process that is to use the fake driver."""
    names = {"FEDCORE_CUDA_DRIVER": str(fake_cuda()), "FAKE_CUDA_DEVICES": str(DEVICES), "FAKE_CUDA_ANY_IMAGE": "1"}
    return os.environ | names | {name: str(value) for name, value in changes.items()}


@cache
def fake_driver():
    """The driver of this process, which uses it from now on."""
    assert not REAL, "FEDCORE_CUDA_DRIVER names another driver"
    os.environ.update(environment())
    return FakeDriver(fake_cuda())
