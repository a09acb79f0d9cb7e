"""Memory of rows and vectors: numbered slots, their geometry and checksums, and the format of a row."""

import heapq
import mmap
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import gcd
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from fedcore.arguments import whole
from fedcore.arrays import CPU, Recycled, copy_into, empty, freeze, zeros
from fedcore.errors import UnknownNameError
from fedcore.kernels import Codes, dequantise
from fedcore.kernels.rows import BLOCK as SCALED
from fedcore.native import core

VERSION = 3
"""The version of the files' format that new stores have."""

LINE = 64  # bytes: a cache line, to which every part of a slot is aligned
CHUNK = 64 << 20  # bytes that memory is asked for at a time
DEVICE_CHUNK = 16 << 20  # and on a device, where memory is taken whether it is written to or not
BLOCK = 64 << 10  # bytes under one checksum
HUGE = 1 << 20  # bytes of a slot from which on huge pages are asked for: they may waste one of 2 MiB

# The alignment of slots by the version. Version 1 was made for pages of 4 KiB, and 2 for the largest that processors
# have: chunks then begin on a page of every system, and large slots do. Version 3 changed the index alone.
GRAINS = {1: 4 << 10, 2: 64 << 10, 3: 64 << 10}

Memory = npt.NDArray[np.uint8]
Sums = npt.NDArray[np.uint64]
Codec = Literal["f32", "bf16", "int8"]
Row: TypeAlias = npt.NDArray[np.float32] | Codes

# As dtypes, not as classes that a call would first look one up for: on small rows that takes as long as the view.
_FLOAT, _BYTE = np.dtype(np.float32), np.dtype(np.uint8)
_CODES: dict[str, np.dtype[Any]] = {"f32": _FLOAT, "bf16": np.dtype(np.uint16), "int8": np.dtype(np.int8)}


def checksums(buffer: Any, block: int = 1 << 20) -> Sums:
    """A 64-bit checksum of each block of ``buffer``; ``csrc/store/checksum.h`` has the formula.

    It finds bytes that changed by accident (a torn write, a flipped bit), not those that an attacker changed.

    Args:
        buffer: any object that exports contiguous bytes: bytes, a memoryview, an mmap, an array of any shape and dtype.
            Read-only, and not to be changed meanwhile.
        block: bytes of a block, >= 1; the last block may be shorter.

    Returns:
        uint64[ceil(bytes / block)].

    Raises:
        RangeError: ``block`` is not an int in 1 .. 2^63 - 1.
        ArrayError: ``buffer`` exports no contiguous bytes.

    Determinism: the bytes and ``block`` alone, on every platform (bytes, not numbers: an array of another byte order
        is another buffer). A change within 8 bytes that are aligned in their block, one flipped bit for one, always
        changes the block's checksum, any other with a probability of about 1 - 2^-64.
    Cost: reads the buffer once, blocks on all threads, without the GIL: near the speed of a plain sum.

    >>> checksums(b"fedcore"), checksums(b"fedcorf")
    (array([9472247094406915468], dtype=uint64), array([15834520062922671200], dtype=uint64))
    """
    sums: Sums = core.checksum(buffer, whole("block", block, 1, 2**63 - 1))
    return sums


@dataclass(frozen=True)
class Geometry:
    """The places of slots of one size.

    Attributes:
        sums_at: bytes from a slot's beginning to the checksums of its blocks, behind the payload.
        blocks: how many checksums there are.
        stride: bytes from one slot to the next.
        begin: where the first slot lies in a file.
        per_chunk: slots in a chunk.
    """

    sums_at: int
    blocks: int
    stride: int
    begin: int
    per_chunk: int

    @classmethod
    def of(cls, payload: int, version: int = VERSION) -> "Geometry":
        """The geometry of slots for so many bytes.

        A slot of 16 grains or more is rounded up to whole ones (of 4 KiB from 64 KiB on, of 64 KiB from 1 MiB on):
        it takes at most a sixteenth more, and shares no page. A chunk is whole grains always.
        """
        grain = GRAINS[version]
        sums_at, blocks = padded(payload, LINE), -(-payload // BLOCK)
        stride = sums_at + padded(8 * blocks, LINE)
        for unit in sorted({grain, 4 << 10}, reverse=True):
            if stride >= 16 * unit:
                stride = padded(stride, unit)
                break
        together = grain // gcd(stride, grain)
        return cls(sums_at, blocks, stride, grain, max(1, CHUNK // stride // together) * together)


def padded(size: int, to: int) -> int:
    """The size rounded up to a multiple."""
    return -(-size // to) * to


class Slots:
    """Slots of one size in memory; ``SlotFile`` keeps them in a file.

    They count from 1, so that 0 can stand for "none". A slot is a payload and, behind it, the checksums of its blocks.
    Memory comes in chunks that never move, so that views stay valid while more slots come.

    Args:
        payload: bytes of a slot that its user sees.
        version: of the format, which gives the slots' geometry.

    Attributes:
        geometry, stride: how slots lie, and bytes from one to the next.
        where: the name of the memory in messages.
        high: the highest slot that was ever taken.

    Cost: pages that were never written to take no memory.
    """

    def __init__(self, payload: int, version: int = VERSION) -> None:
        self.where = "memory"
        self.payload = payload
        self.geometry = Geometry.of(payload, version)
        self.stride, self._per_chunk = self.geometry.stride, self.geometry.per_chunk
        self.high = 0
        self._chunks: dict[int, Memory] = {}
        self._tables: dict[tuple[int, bool], npt.NDArray[Any]] = {}  # of each chunk's payloads
        self._free: list[int] = []  # a heap: low slots first, which keeps a round's rows together
        self._retired: deque[tuple[int, list[int]]] = deque()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tables": {}}  # views of chunks, of which a copy would have copies of their own

    @property
    def free(self) -> int:
        """The number of slots below ``high`` that are free, or will be when readers have gone on."""
        return len(self._free) + self.waiting

    @property
    def waiting(self) -> int:
        """The number of them that readers may still look at."""
        return sum(len(slots) for _, slots in self._retired) if self._retired else 0

    def memory(self, slot: int) -> Memory:
        """The payload, uint8[payload]."""
        return self._bytes(slot, self.payload)

    def payloads(self, slots: Iterable[int], dtype: np.dtype[Any], *, writable: bool) -> list[npt.NDArray[Any]]:
        """The payloads of many slots as arrays of a dtype: views."""
        found = []
        for slot in slots:
            number, place = divmod(slot - 1, self._per_chunk)
            table = self._tables.get((number, writable))
            if table is None or table.dtype is not dtype:
                _, memory = self.chunk(slot)
                shape = len(memory) // self.stride, self.payload // dtype.itemsize
                table = np.ndarray(shape, dtype, memory, strides=(self.stride, dtype.itemsize))
                table.setflags(write=writable)
                self._tables[number, writable] = table
            found.append(table[place])
        return found

    def take(self) -> int:
        """A slot of undefined content that has no other user."""
        slot = self._free[0] if self._free else self.high + 1
        self._prepare(slot)
        if slot > self.high:
            self.high = slot
        else:
            heapq.heappop(self._free)
        return slot

    def give(self, slots: Iterable[int]) -> None:
        """Let slots be taken again at once."""
        for slot in slots:
            heapq.heappush(self._free, slot)

    def retire(self, slots: list[int], sequence: int) -> None:
        """Let slots be taken again as soon as ``reclaim`` gets to ``sequence``."""
        if slots:
            self._retired.append((sequence, slots))

    def reclaim(self, sequence: int) -> None:
        """Give the slots that were retired with ``sequence`` or before."""
        while self._retired and self._retired[0][0] <= sequence:
            self.give(self._retired.popleft()[1])

    def has_free_below(self, slot: int) -> bool:
        """Return whether ``take`` would return a lower slot than this one."""
        return bool(self._free) and self._free[0] < slot

    def shrink(self) -> None:
        """Forget the free slots above the highest that is used, and their memory."""
        free, high = set(self._free), self.high
        while high in free:
            free.remove(high)
            high -= 1
        self._free, self.high = sorted(free), high  # both or neither, also after an interrupt
        self._cut(-(-self.high // self._per_chunk))

    def occupy(self, slots: npt.NDArray[np.int64], retired: int | None = None, high: int = 0) -> None:
        """Take just these slots, all at once; the others below the highest are free.

        Args:
            slots: the slots in use.
            retired: if given, the others are not free yet, but retired with this sequence number.
            high: a slot that was taken once, and may be the highest.
        """
        self.high = max(high, int(slots.max(initial=0)))
        used = np.zeros(self.high + 1, np.bool_)
        used[slots] = True
        others: list[int] = np.flatnonzero(~used)[1:].tolist()  # sorted, and so a heap
        self._free, self._retired = ([], deque()) if retired is not None else (others, deque())
        if retired is not None:
            self.retire(others, retired)

    def copy(self, slot: int) -> int:
        """A new slot with the same payload, and with its checksums if they were kept."""
        copy = self.take()
        self.memory(copy)[:] = self.memory(slot)
        sums_at = self.geometry.sums_at
        self._put(copy, self._whole(slot)[sums_at : sums_at + 8 * self.geometry.blocks].view(np.uint64))
        return copy

    def seal(self, slot: int, sums: Sums | None = None) -> int:
        """Write the checksums of the slot's blocks behind them, and return the checksum of them all.

        Args:
            slot: which.
            sums: uint64[blocks], where they are known; else the payload is read.
        """
        if sums is None:
            sums = checksums(self.memory(slot), BLOCK)
        self._put(slot, sums)
        return _folded(sums)

    def damage(self, slot: int, seal: int) -> str | None:
        """The damage of a slot that was sealed so, or None."""
        whole = self._whole(slot)
        found = checksums(whole[: self.payload], BLOCK)
        if _folded(found) == seal:
            return None
        kept = whole[self.geometry.sums_at : self.geometry.sums_at + found.nbytes].view(np.uint64)
        if _folded(kept) != seal:
            return f"none of its {len(kept)} blocks can be trusted"  # it holds something else
        blocks = np.flatnonzero(found != kept).tolist()
        return f"block {', '.join(map(str, blocks))} of {len(kept)} changed"

    def chunk(self, slot: int) -> tuple[int, Memory]:
        """The chunk of memory in which a slot lies, and its number."""
        number = (slot - 1) // self._per_chunk
        chunk = self._chunks.get(number)
        if chunk is None:
            chunk = self._chunks[number] = self._open_chunk(number)
        return number, chunk

    def require_whole(self) -> None:
        """Raise an error if some of the memory is gone, as that of a file that was cut short."""

    def use(self, slots: Iterable[int]) -> None:
        """Note that slots are used."""

    def let_go(self, slots: Iterable[int]) -> None:
        """Take slots out of this process's memory, if they lie elsewhere too."""

    def close(self) -> None:
        """Let the memory go; views stay valid."""
        self._tables.clear()
        self._chunks.clear()

    def _whole(self, slot: int) -> Memory:
        return self._bytes(slot, self.stride)

    def _bytes(self, slot: int, count: int) -> Memory:
        """The first bytes of a slot."""
        start = (slot - 1) % self._per_chunk * self.stride
        return self.chunk(slot)[1][start : start + count]

    def _forget_chunk(self, number: int) -> None:
        for writable in (True, False):
            self._tables.pop((number, writable), None)
        self._chunks.pop(number, None)

    def _cut(self, chunks: int) -> None:
        """Let go of all but the first chunks."""
        for number in [number for number in self._chunks if number >= chunks]:
            self._forget_chunk(number)

    def _put(self, slot: int, sums: Sums) -> None:
        """Write checksums into a slot."""
        self._whole(slot)[self.geometry.sums_at :][: sums.nbytes].view(np.uint64)[:] = sums

    def _prepare(self, slot: int) -> None:
        """Make sure that the slot can be written to."""

    def _open_chunk(self, number: int) -> Memory:
        # Private: a process that is forked has rows of its own.
        size = self._per_chunk * self.stride
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError):
            raise MemoryError(f"rows of {size:,} bytes: the system has no memory for them") from None
        if self.stride >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a system without them does without
                memory.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(memory, np.uint8)


class DeviceSlots(Slots):
    """Slots of one size on a device: of a store in its memory, and the cached rows of other stores.

    They have no checksums, since their content ends with the process.
    """

    def __init__(self, payload: int, device: str) -> None:
        super().__init__(payload)
        self.where, self._device = device, device
        self._per_chunk = max(1, min(self._per_chunk, DEVICE_CHUNK // self.stride))

    def payloads(self, slots: Iterable[int], dtype: np.dtype[Any], *, writable: bool) -> list[Any]:
        """See ``Slots``."""
        found: list[Any] = [self.memory(slot) for slot in slots]
        for memory in () if writable else found:
            freeze(memory)
        return [memory.view(dtype) for memory in found]

    def take(self) -> int:
        """A slot of undefined content that has no other user."""
        slot = super().take()
        try:
            self.memory(slot)
        except BaseException:
            self.give([slot])
            raise
        return slot

    def copy(self, slot: int) -> int:
        """A new slot with the same payload."""
        copy = self.take()
        copy_into(self.memory(copy), self.memory(slot))
        return copy

    def _open_chunk(self, number: int) -> Any:
        return empty(self._per_chunk * self.stride, np.uint8, device=self._device)


def _folded(sums: Sums) -> int:
    """One checksum of the blocks' checksums."""
    return int(sums[0] if len(sums) == 1 else checksums(sums, sums.nbytes)[0])


class RowFormat:
    """A row of n elements through a codec.

    Args:
        codec: "f32"; "bf16", two bytes an element; or "int8", one byte and a float32 scale for every 64 elements.
        n: elements of a row.
        device: of the rows, and of their decoded copies.

    Attributes:
        payload: bytes of a row.
    """

    def __init__(self, codec: Codec, n: int, device: str = CPU) -> None:
        if codec not in get_args(Codec):
            raise UnknownNameError.of("codec", codec, get_args(Codec))
        self.codec, self.device = codec, device
        self.n = whole("n", n, 1)
        self._codes = self.n * _CODES[codec].itemsize
        self._scales_at = padded(self._codes, LINE)
        self._decoded = Recycled(self.n, device=device)
        self.payload = self._scales_at + 4 * -(-self.n // SCALED) if codec == "int8" else self._codes

    def rows(self, slots: Slots, of: Sequence[int], *, writable: bool) -> list[Row]:
        """The rows in these slots, each float32[n] or Codes: views."""
        if self.codec == "f32":
            return slots.payloads(of, _FLOAT, writable=writable)  # type: ignore[return-value]
        return list(map(self._coded, slots.payloads(of, _BYTE, writable=writable)))

    def _coded(self, memory: Memory) -> Codes:
        codes = memory[: self._codes].view(_CODES[self.codec])
        scales = memory[self._scales_at :].view(_FLOAT) if self.codec == "int8" else None
        return Codes(self.codec, codes, scales)

    def decoded(self, row: Row | None) -> npt.NDArray[np.float32]:
        """A copy of a row's numbers, float32[n]; zeros for None."""
        if row is None:
            return zeros(self.n, device=self.device)
        vector = self._decoded.take()
        if isinstance(row, Codes):
            dequantise(row, vector)
        else:
            copy_into(vector, row)
        return vector
