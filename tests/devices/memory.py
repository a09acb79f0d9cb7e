"""Memory and streams of the driver's devices, as another library uses them."""

import ctypes
import os
from contextlib import contextmanager
from functools import cache

import numpy as np

from tests.devices.fake_driver import REAL, fake_driver

NON_BLOCKING, NO_TIMING = 1, 2


class CallError(RuntimeError):
    """A call of the driver returned a code other than 0."""


class Cuda:
    """The driver's functions, by name."""

    def __init__(self, path):
        self._library = ctypes.CDLL(path)
        self._known = {}
        assert self("cuInit", 0) is None
        self.contexts = {}

    def __call__(self, name, *arguments):
        """Call a function of the driver's; CallError if it fails."""
        if name not in self._known:
            address = ctypes.c_void_p()
            code = self._library.cuGetProcAddress_v2(
                name.encode(), ctypes.byref(address), 12000, ctypes.c_uint64(0), None
            )
            assert code == 0, name
            self._known[name] = ctypes.CFUNCTYPE(ctypes.c_int)(address.value)
        code = self._known[name](*arguments)
        if code != 0:
            raise CallError(f"{name}: {code}")

    @contextmanager
    def on(self, device):
        """Have a device's context in this scope."""
        if device not in self.contexts:
            context = ctypes.c_void_p()
            self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self.contexts[device] = context
        self("cuCtxPushCurrent", self.contexts[device])
        try:
            yield
        finally:
            self("cuCtxPopCurrent", ctypes.byref(ctypes.c_void_p()))


@cache
def cuda():
    """The driver's functions in this process."""
    return Cuda((os.environ["FEDCORE_CUDA_DRIVER"] or "libcuda.so.1") if REAL else fake_driver().path)


def size(n):
    return ctypes.c_size_t(n)


class Stream:
    """A stream of a device; by number the legacy one of any device is 1."""

    def __init__(self, device=0, flags=NON_BLOCKING):
        made = ctypes.c_void_p()
        with cuda().on(device):
            cuda()("cuStreamCreate", ctypes.byref(made), flags)
        self.device, self.number = device, made.value

    def wait(self):
        """Let everything on it run."""
        with cuda().on(self.device):
            cuda()("cuStreamSynchronize", ctypes.c_void_p(self.number))

    def end(self):
        """Destroy it; queued work still runs."""
        with cuda().on(self.device):
            cuda()("cuStreamDestroy", ctypes.c_void_p(self.number))


def wait_for(device, stream, other):
    """Let later work on one stream, by number, run after the present work on the other."""
    event = ctypes.c_void_p()
    with cuda().on(device):
        cuda()("cuEventCreate", ctypes.byref(event), NO_TIMING)
        cuda()("cuEventRecord", event, ctypes.c_void_p(other))
        cuda()("cuStreamWaitEvent", ctypes.c_void_p(stream), event, 0)
        cuda()("cuEventDestroy", event)


def copy(to, source, nbytes, stream, device=0):
    """Queue a copy from one address on a device to another."""
    with cuda().on(device):
        cuda()("cuMemcpyDtoDAsync", ctypes.c_uint64(to), ctypes.c_uint64(source), size(nbytes), ctypes.c_void_p(stream))


class Memory:
    """Bytes of a device's memory, or pinned ones of the host's if ``device`` is None."""

    def __init__(self, nbytes, device=0):
        self.nbytes, self.device = nbytes, device
        made = ctypes.c_uint64()
        with cuda().on(device or 0):
            if device is None:
                cuda()("cuMemHostAlloc", ctypes.byref(made), size(max(1, nbytes)), 0)
            else:
                cuda()("cuMemAlloc", ctypes.byref(made), size(max(1, nbytes)))
        self.address = made.value

    def __del__(self):
        if not hasattr(self, "address"):
            return
        with cuda().on(self.device or 0):
            cuda()("cuMemFreeHost" if self.device is None else "cuMemFree", ctypes.c_uint64(self.address))

    def write(self, values, stream=1):
        """Queue a copy of an array on a stream."""
        values = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        if self.device is None:
            self.bytes()[:] = values
            return
        with cuda().on(self.device):
            arguments = ctypes.c_uint64(self.address), ctypes.c_void_p(values.ctypes.data), size(values.nbytes)
            cuda()("cuMemcpyHtoDAsync", *arguments, ctypes.c_void_p(stream))

    def read(self, stream=1):
        """The bytes after all work on the stream."""
        if self.device is None:
            return self.bytes().copy()
        values = np.empty(self.nbytes, np.uint8)
        with cuda().on(self.device):
            arguments = ctypes.c_void_p(values.ctypes.data), ctypes.c_uint64(self.address), size(values.nbytes)
            cuda()("cuMemcpyDtoHAsync", *arguments, ctypes.c_void_p(stream))
        return values

    def bytes(self):
        """Pinned memory as an array."""
        assert self.device is None
        return np.frombuffer((ctypes.c_uint8 * self.nbytes).from_address(self.address), np.uint8)
