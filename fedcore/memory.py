"""The place where every vector of a model's length is made: its device, its place in memory, and how memory comes back.

On a processor a vector starts where a cache line does, so that no vector of the processor's lies in two lines: where
the sum and the rows do, ``exchange`` takes 5 to 10 % less time (8 clients of 11 M, AVX-512); what a client sent need
not. One of 2 MiB and more starts within the first lines of a huge page, and asks for such pages.

On a device a vector is a ``DeviceArray``, which the host cannot look into. What knows of both kinds lies here: births,
copies, zeros; arithmetic is the kernels', which go by where their vectors lie.
"""

import mmap
from contextlib import suppress
from itertools import cycle
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcore import devices
from fedcore.native import core

LINE = 64
"""Bytes of a cache line, and of the widest vector."""

HUGE = 2 << 20
"""Bytes of a huge page. A shorter vector would not fill one."""

SETS = 4096
"""Bytes after which lines fall into the same set of a first-level cache; a set holds eight or twelve lines."""

_STARTS = cycle(range(0, SETS, 9 * LINE))  # eight of them, evenly spread
_BASE = vars(np.ndarray)["base"].__get__

Vector: TypeAlias = npt.NDArray[Any]
Dtype: TypeAlias = type[np.generic] | np.dtype[Any]


def empty(n: int, dtype: Dtype = np.float32, *, device: str = "cpu") -> Vector:
    """A vector of n numbers, whatever they are.

    Args:
        n: its length.
        dtype: of its numbers.
        device: where it lies: "cpu", "cuda" or "cuda:1", say.

    Raises:
        UnknownNameError, DeviceError: there is no such device.
        DeviceMemoryError: it has not so much memory. (The host's own is a MemoryError.)

    >>> empty(3).dtype
    dtype('float32')
    """
    return _born(n, dtype, device, zero=False)


def empty_beside(array: Any, n: int, dtype: Dtype = np.float32) -> Vector:
    """A vector of n numbers, whatever they are, on the device on which an array of anybody's lies.

    Errors are those of ``empty``.

    >>> empty_beside(np.zeros(3), 2).shape
    (2,)
    """
    try:
        device = devices.of(array)
    except Exception:  # of somebody else's: who reads the array says why that cannot be
        device = devices.CPU
    return empty(n, dtype, device=device)


def zeros(n: int, dtype: Dtype = np.float32, *, device: str = "cpu") -> Vector:
    """A vector of n zeros; arguments and errors are those of ``empty``.

    Cost: a large one takes no memory before it is written to.

    >>> zeros(3)
    array([0., 0., 0.], dtype=float32)
    """
    return _born(n, dtype, device, zero=True)


def full(n: int, value: float, dtype: Dtype = np.float32, *, device: str = "cpu") -> Vector:
    """A vector of n times the same value; the other arguments, and errors, are those of ``empty``.

    >>> full(2, 0.5)
    array([0.5, 0.5], dtype=float32)
    """
    vector = empty(n, dtype)
    vector[:] = value
    return vector if device == devices.CPU else copied(vector, device=device)


def copied(vector: Vector, *, device: str | None = None) -> Vector:
    """A copy of a vector, of its dtype and shape; errors are those of ``empty``.

    Args:
        device: where the copy lies; None for where the vector does.

    >>> copied(np.float64([1, 2]))
    array([1., 2.])
    """
    device = devices.of(vector) if device is None else device
    copy = empty(vector.size, vector.dtype, device=device)
    if isinstance(copy, np.ndarray):
        copy = copy.reshape(vector.shape)
    copy_into(copy, vector)
    return copy


def copy_into(vector: Any, source: Any) -> None:
    """Copy the numbers of one vector into another as long and of its dtype, wherever the two lie.

    The host waits where the copy comes to it; to a device it is made in the order of the kernels' calls.

    >>> vector = zeros(2)
    >>> copy_into(vector, np.float32([1, 2]))
    >>> vector
    array([1., 2.], dtype=float32)
    """
    if not isinstance(vector, np.ndarray):
        vector.copy_from(source)
    elif isinstance(source, np.ndarray):
        vector[...] = source
    else:
        source.copy_to(vector)


def set_to_zero(vector: Any) -> None:
    """Make every number of a vector zero."""
    if isinstance(vector, np.ndarray):
        vector[:] = 0
    else:
        vector.fill_with_zeros()


def freeze(vector: Any) -> None:
    """Let nobody write to a vector by this object, or by views of it that are made from now on."""
    if isinstance(vector, np.ndarray):
        vector.setflags(write=False)
    else:
        vector.writeable = False


def view_of(vector: Any) -> Any:
    """Another object for the same memory, as writable as the first."""
    return vector.view() if isinstance(vector, np.ndarray) else vector[:]


def to_host(vector: Any) -> Vector:
    """A vector as NumPy's: itself, or a copy of what lies on a device, for which the host waits.

    >>> to_host(np.float32([1, 2]))
    array([1., 2.], dtype=float32)
    """
    host: Vector = vector if isinstance(vector, np.ndarray) else vector.to_host()
    return host


class Recycled:
    """Makes float32 vectors of one length, and keeps the memory of some of them that have become garbage.

    Fresh memory costs more than what is written into it: every page of it is first filled with zeros.

    A vector's memory comes back when the vector and all views of it, of whatever library, are gone: never before.

    Args:
        n: their length.
        most: memories that are kept at a time.
        device: as for ``empty``.

    Raises:
        UnknownNameError, DeviceError: as for ``empty``.

    Cost: 4 n bytes for each memory that waits for its next use.

    >>> vectors = Recycled(3)
    >>> first = vectors.take()
    >>> address = first.ctypes.data
    >>> view = first[1:]
    >>> del first  # the view still needs it
    >>> vectors.take().ctypes.data == address
    False
    >>> del view
    >>> vectors.take().ctypes.data == address
    True
    """

    def __init__(self, n: int, *, most: int = 1, device: str = "cpu") -> None:
        self._made_by = n, most, device
        self._n = n
        self._there = None if device == devices.CPU else _RecycledThere(n, most, devices.named(device))
        self._spares = _Spares(most)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Recycled":
        """Another one, which has no memory yet: that of this one is known by its address."""
        n, most, device = self._made_by
        copied = memo[id(self)] = Recycled(n, most=most, device=device)
        return copied

    def take(self) -> npt.NDArray[np.float32]:
        """A vector, float32[n], of whatever values."""
        if self._there is not None:
            there: npt.NDArray[np.float32] = self._there.take()
            return there
        try:
            memory = self._spares.pop()
        except IndexError:
            vector = empty(self._n)
            memory = Memory(vector, vector.__array_interface__)
        return np.asarray(_Lent(memory, self._spares))

    def lent(self, vector: Any) -> bool:
        """Tell whether a vector was taken here, or is a view of one that was.

        >>> vectors = Recycled(3)
        >>> vectors.lent(vectors.take()[1:]), vectors.lent(empty(3))
        (True, False)
        """
        if self._there is not None:
            return self._there.lent(vector)
        while isinstance(vector, np.ndarray):
            vector = _BASE(vector)  # as NumPy has it: a class of the caller's may show another, and for ever
        return isinstance(vector, _Lent) and vector._spares is self._spares


class Memory(NamedTuple):
    """A vector that is never shown itself, and how NumPy describes it, which takes as long to ask as to make one."""

    vector: Vector
    interface: dict[str, Any]


class _Spares(list[Memory]):
    """Memories that nobody uses; the latest ``most`` of them."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def give(self, memory: Memory) -> None:
        # Whatever another thread does meanwhile, each memory is in one place. When the interpreter ends, the names of
        # this module may be gone already: only Python's own are used here.
        self.append(memory)
        if len(self) > self._most:
            try:  # noqa: SIM105
                self.pop(0)
            except IndexError:
                pass


class _Lent:
    """The base of a vector and of every view of it."""

    __slots__ = ("__array_interface__", "_memory", "_spares")

    def __init__(self, memory: Memory, spares: _Spares) -> None:
        self._memory, self._spares = memory, spares
        self.__array_interface__ = memory.interface

    def __del__(self) -> None:
        self._spares.give(self._memory)


class _RecycledThere:
    """``Recycled`` on a device, whose vectors say how many objects, of whatever library, hold their memory."""

    def __init__(self, n: int, most: int, device: str) -> None:
        self._n, self._most, self._device = n, most, device
        self._all: list[Any] = []  # the memories themselves, which are never shown
        self._turn = Lock()

    def take(self) -> Any:
        with self._turn:
            unused = [memory for memory in self._all if memory.holders == 1]
            gone = {id(memory) for memory in unused[max(self._most, 1) :]}
            self._all = [memory for memory in self._all if id(memory) not in gone]
            if not unused:
                unused.append(empty(self._n, device=self._device))
                self._all.append(unused[0])
            return unused[0][:]

    def lent(self, vector: Any) -> bool:
        if not devices.is_device_array(vector):
            return False
        with self._turn:
            return any(
                memory.device == vector.device and 0 <= vector.address - memory.address < memory.nbytes
                for memory in self._all
            )


def _born(n: int, dtype: Dtype, device: str, *, zero: bool) -> Vector:
    if device != devices.CPU:
        there: Vector = _born_there(n, dtype, devices.named(device), zero=zero)
        return there
    size = np.dtype(dtype).itemsize
    if n * size >= HUGE:
        return _mapped(n * size).view(dtype)
    memory = (np.zeros if zero else np.empty)(n + LINE // size, dtype)
    start = -memory.__array_interface__["data"][0] % LINE // size
    return memory[start : start + n]


def _born_there(n: int, dtype: Dtype, device: str, *, zero: bool) -> Any:
    vector = core.DeviceArray(n, np.dtype(dtype).name, devices.ordinal(device))
    if zero:
        vector.fill_with_zeros()
    return vector


def _mapped(count: int) -> npt.NDArray[np.uint8]:
    """uint8[count] of zeros, mapped for itself, on huge pages; an end of less than 3/4 of one is on small ones.

    Small pages cost microseconds each when they are first written to, 512 times as many as huge ones. Eight
    vectors in a row start at eight different places of a huge page: a fold of vectors whose lines all fall into the
    same set of the cache takes 1.3 times as long (8 rows of 11 M, Emerald Rapids).
    """
    pages = (count + HUGE // 4) // HUGE
    try:  # private: a process that is forked has vectors of its own
        memory = mmap.mmap(-1, max(count, pages * HUGE) + HUGE + SETS, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):
        raise MemoryError(f"a vector of {count:,} bytes: the system has no memory for it") from None
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.__array_interface__["data"][0] % HUGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them does without
            memory.madvise(mmap.MADV_HUGEPAGE, start, pages * HUGE)
    start += next(_STARTS)
    return whole[start : start + count]
