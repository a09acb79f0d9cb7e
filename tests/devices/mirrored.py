"""Kernels whose arrays are mirrored on a device: a test of a kernel's values becomes one of its CUDA version.

Each vector of a call in host memory gets a mirror on the device, of the same dtype, shape, strides and place within 64
bytes; vectors that share memory share it there too. The kernel is called with the mirrors, and its results are copied
back.
"""

import ctypes
import functools
import inspect
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch

from fedcore.arrays import core
from fedcore.kernels import Codes, ExactSum
from tests import oracle
from tests.devices.memory import Memory
from tests.devices.tensors import LEGACY, Tensor

# Of each kernel, the vectors that it reads and those that it writes; all else is the host's.
VECTORS = {
    "weighted_sum": ({"rows", "base"}, {"out"}),
    "weighted_sum_segments": ({"models", "base"}, {"outs"}),
    "accumulate": ({"acc", "bases", "ys"}, {"out"}),
    "gram_matrix": ({"bases", "ys"}, set()),
    "column_statistic": ({"bases", "ys"}, {"out"}),
    "exchange": ({"acc", "bases", "ys", "old_rows", "anchors"}, {"out", "new_rows"}),
    "server_step": ({"sum", "total", "momentum", "control", "x"}, {"v", "total_out", "x_out"}),
    "direction_step": ({"grad", "grad_prev", "offset", "x"}, {"y"}),
    "combine": ({"terms"}, {"out"}),
    "combined_square": ({"terms"}, set()),
    "combine_exact": ({"terms"}, {"out"}),
    "read_exact": ({"sum"}, {"out"}),
    "optimizer_step": ({"v", "m", "s", "x"}, {"m_out", "s_out", "x_out"}),
    "mix": (set(), {"models"}),
    "squared_norms": ({"rows"}, set()),
    "quantise": ({"x"}, {"codes", "scales"}),
    "dequantise": ({"codes", "scales"}, {"out"}),
}
LISTED = {"rows", "models", "outs", "bases", "ys", "old_rows", "anchors", "new_rows", "terms"}
LINE = 64  # bytes
TORCH = {torch.float32: "float32", torch.float64: "float64", torch.float16: "float16", torch.bfloat16: "bfloat16"}
TORCH |= {torch.int8: "int8", torch.int16: "int16", torch.uint8: "uint8"}
NUMPY = {"float32", "float64", "float16", "int8", "int16", "int64", "uint8", "uint16", "uint64"}


class HostOnlyError(Exception):
    """An argument that is not a plain array in host memory, and has no mirror."""


@dataclass
class Region:
    """Bytes of the host's memory from one address to another, and their copy on the device."""

    start: int
    stop: int
    written: bool
    memory: Memory | None = None
    sent: bytes = b""

    @property
    def host(self) -> Any:
        return np.ctypeslib.as_array((ctypes.c_uint8 * (self.stop - self.start)).from_address(self.start))

    @property
    def shift(self) -> int:
        return self.start % LINE

    def holds(self, start: int, stop: int) -> bool:
        return self.start <= start and stop <= self.stop

    def send(self) -> None:
        self.sent = self.host.tobytes()
        self.memory = Memory(self.shift + len(self.sent))
        self.memory.write(np.frombuffer(bytes(self.shift) + self.sent, np.uint8))

    def fetch(self) -> None:
        assert self.memory is not None
        now = self.memory.read(LEGACY)[self.shift :]
        if now.tobytes() != self.sent:
            assert self.written, "a kernel wrote to an input"
            self.host[:] = now


class Mirrored(Tensor):
    """The mirror of an array; ``place`` sets its memory on the device."""

    def __init__(self, address, dtype, shape, strides, read_only, extent):
        self.device, self.device_type, self.stream, self.asked = 0, 2, LEGACY, []
        self.dtype, self.shape, self.read_only = dtype, shape, read_only
        self.strides = strides
        self.host_address, self.extent = address, extent

    def place(self, region):
        self.memory = region.memory
        self.offset = region.shift + self.host_address - region.start

    def order(self, stream):
        """Nothing: work on the legacy stream is in order."""


def mirror_of(array: Any) -> Mirrored:
    """The mirror of an array of NumPy or torch."""
    if type(array) is np.ndarray:
        if array.dtype.name not in NUMPY or not array.dtype.isnative:
            raise HostOnlyError
        if any(stride % array.itemsize for stride in array.strides):
            raise HostOnlyError
        strides = [stride // array.itemsize for stride in array.strides]
        extent = np.lib.array_utils.byte_bounds(array) if array.size else (0, 0)
        described = array.ctypes.data, array.dtype.name, array.shape, strides, not array.flags.writeable
        return Mirrored(*described, extent)
    if type(array) is torch.Tensor:
        lies_here = array.device.type == "cpu" and array.layout == torch.strided
        if not lies_here or array.requires_grad or array.is_neg() or array.is_conj() or array.dtype not in TORCH:
            raise HostOnlyError
        last = sum((size - 1) * stride for size, stride in zip(array.shape, array.stride(), strict=True))
        start = array.data_ptr()
        extent = (start, start + (last + 1) * array.itemsize) if array.numel() else (0, 0)
        return Mirrored(start, TORCH[array.dtype], tuple(array.shape), list(array.stride()), False, extent)
    raise HostOnlyError


@dataclass
class Mirror:
    """The mirrored arrays of one call."""

    arrays: list[tuple[Mirrored, bool]] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)

    def of_argument(self, name: str, value: Any, written: bool) -> Any:
        """The argument with mirrored arrays."""
        if name in LISTED and type(value) not in (list, tuple):
            raise HostOnlyError
        return self.of(value, written)

    def of(self, value: Any, written: bool) -> Any:
        """The value with mirrored arrays."""
        if value is None:
            return None
        if type(value) is list or type(value) is tuple:
            return type(value)(self.of(item, written) for item in value)
        if type(value) is ExactSum:
            return ExactSum(*(self.of(word, written) for word in value))
        if type(value) is Codes:
            return Codes(value.codec, self.of(value.codes, written), self.of(value.scales, written))
        array = mirror_of(value)
        self.arrays.append((array, written))
        return array

    def touches(self, array: Any) -> bool:
        """Whether some of the memory is this array's too, which stays on the host."""
        if type(array) is not np.ndarray or array.size == 0:
            return False
        start, stop = np.lib.array_utils.byte_bounds(array)
        return any(one.extent[0] < stop and start < one.extent[1] for one, _ in self.arrays)

    def send(self) -> None:
        """Copy all mirrored memory to the device."""
        for array, written in sorted(self.arrays, key=lambda one: one[0].extent):
            start, stop = array.extent
            if self.regions and start < self.regions[-1].stop:
                self.regions[-1].stop = max(stop, self.regions[-1].stop)
                self.regions[-1].written |= written
            else:
                self.regions.append(Region(start, stop, written))
        for region in self.regions:
            region.send()
        for array, _ in self.arrays:
            array.place(next(region for region in self.regions if region.holds(*array.extent)))

    def fetch(self) -> None:
        """Copy written memory back."""
        for region in self.regions:
            region.fetch()


class Counts:
    """How many calls ran on the device, and how many could not."""

    device = 0
    host = 0


def mirrored(name: str, counts: Counts) -> Any:
    """The kernel of this name on mirrors of its arrays; on the arrays themselves if one has no mirror."""
    kernel = getattr(core, name)
    signature = inspect.signature(getattr(oracle, name))
    read, written = VECTORS[name]

    @functools.wraps(kernel)
    def on_device(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        mirror = Mirror()
        try:
            if bound.arguments.get("sums") is not None:  # checksums are the host's
                raise HostOnlyError
            for argument in (read | written) & bound.arguments.keys():
                given = bound.arguments[argument]
                bound.arguments[argument] = mirror.of_argument(argument, given, argument in written)
            if any(mirror.touches(value) for name, value in bound.arguments.items() if name not in read | written):
                raise HostOnlyError
        except HostOnlyError:
            counts.host += 1
            return kernel(*args, **kwargs)
        counts.device += bool(mirror.arrays)
        mirror.send()
        try:
            return kernel(*bound.args, **bound.kwargs)
        finally:
            mirror.fetch()

    return on_device


def mirror_all(module: ModuleType = core) -> Counts:
    """Have all kernels run on the device, for the rest of this process."""
    counts = Counts()
    for name, kernel in {name: mirrored(name, counts) for name in VECTORS}.items():
        setattr(module, name, kernel)
    return counts
