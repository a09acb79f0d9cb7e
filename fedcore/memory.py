"""The place where every vector of a model's length is made: its device, its place in memory, and how memory comes back.

On a processor a vector starts where a cache line does, so that no vector of the processor's lies in two lines: where
the sum and the rows do, ``exchange`` takes 5 to 10 % less time (8 clients of 11 M, AVX-512); what a client sent need
not. One of 2 MiB and more starts where a huge page does, and asks for such pages.
"""

import mmap
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcore.errors import UnknownNameError

LINE = 64
"""Bytes of a cache line, and of the widest vector."""

HUGE = 2 << 20
"""Bytes of a huge page. A shorter vector would not fill one."""

DEVICES = ("cpu",)
"""What a vector's device may be called."""

Vector: TypeAlias = npt.NDArray[Any]
Dtype: TypeAlias = type[np.generic] | np.dtype[Any]


def empty(n: int, dtype: Dtype = np.float32, *, device: str = "cpu") -> Vector:
    """A vector of n numbers, whatever they are.

    Args:
        n: its length.
        dtype: of its numbers.
        device: where it lies, one of ``DEVICES``.

    Raises:
        UnknownNameError: the package has no memory on such a device.

    >>> empty(3).dtype
    dtype('float32')
    """
    return _born(n, dtype, device, zero=False)


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
    vector = empty(n, dtype, device=device)
    vector[:] = value
    return vector


def copied(vector: Vector, *, device: str = "cpu") -> Vector:
    """A copy of a vector, of its dtype and shape; errors are those of ``empty``.

    >>> copied(np.float64([1, 2]))
    array([1., 2.])
    """
    copy = empty(vector.size, vector.dtype, device=device).reshape(vector.shape)
    copy[...] = vector
    return copy


class Recycled:
    """Makes float32 vectors of one length, and keeps the memory of some of them that have become garbage.

    Fresh memory costs more than what is written into it: every page of it is first filled with zeros.

    A vector's memory comes back when the vector and all views of it, of whatever library, are gone: never before.

    Args:
        n: their length.
        most: memories that are kept at a time.
        device: as for ``empty``.

    Raises:
        UnknownNameError: as for ``empty``.

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
        _require(device)
        self._n, self._device = n, device
        self._spares = _Spares(most)

    def take(self) -> npt.NDArray[np.float32]:
        """A vector, float32[n], of whatever values."""
        try:
            memory = self._spares.pop()
        except IndexError:
            vector = empty(self._n, device=self._device)
            memory = Memory(vector, vector.__array_interface__)
        return np.asarray(_Lent(memory, self._spares))

    def lent(self, vector: Any) -> bool:
        """Tell whether a vector was taken here, or is a view of one that was.

        >>> vectors = Recycled(3)
        >>> vectors.lent(vectors.take()[1:]), vectors.lent(empty(3))
        (True, False)
        """
        while isinstance(vector, np.ndarray):
            vector = vector.base
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
        self.append(memory)  # whatever another thread does meanwhile, each memory is in one place
        if len(self) > self._most:
            with suppress(IndexError):
                self.pop(0)


class _Lent:
    """The base of a vector and of every view of it."""

    __slots__ = ("__array_interface__", "_memory", "_spares")

    def __init__(self, memory: Memory, spares: _Spares) -> None:
        self._memory, self._spares = memory, spares
        self.__array_interface__ = memory.interface

    def __del__(self) -> None:
        self._spares.give(self._memory)


def _require(device: str) -> None:
    if device not in DEVICES:
        raise UnknownNameError.of("device", device, DEVICES)


def _born(n: int, dtype: Dtype, device: str, *, zero: bool) -> Vector:
    _require(device)
    size = np.dtype(dtype).itemsize
    if n * size >= HUGE:
        return _mapped(n * size).view(dtype)
    memory = (np.zeros if zero else np.empty)(n + LINE // size, dtype)
    start = -memory.__array_interface__["data"][0] % LINE // size
    return memory[start : start + n]


def _mapped(count: int) -> npt.NDArray[np.uint8]:
    """uint8[count] of zeros, mapped for itself, on huge pages; an end of less than half of one is on small ones.

    Small pages cost microseconds each when they are first written to, 512 times as many as huge ones.
    """
    pages = (count + HUGE // 2) // HUGE
    try:  # private: a process that is forked has vectors of its own
        memory = mmap.mmap(-1, max(count, pages * HUGE) + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):
        raise MemoryError(f"a vector of {count:,} bytes: the system has no memory for it") from None
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.__array_interface__["data"][0] % HUGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them does without
            memory.madvise(mmap.MADV_HUGEPAGE, start, pages * HUGE)
    return whole[start : start + count]
