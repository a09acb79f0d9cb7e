"""Numbered slots of memory for rows and vectors, their layout and checksums, and the format of a row."""

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

from fedcore.arrays import CPU, BufferPool, copy_into, core, empty, freeze, zeros
from fedcore.errors import UnknownNameError
from fedcore.kernels import Codes, dequantise
from fedcore.kernels.rows import BLOCK as SCALED
from fedcore.validation import check_integer

VERSION = 3
"""The version of the file format of new stores."""

LINE = 64  # bytes: a cache line; every part of a slot is aligned to it
CHUNK = 64 << 20  # bytes of one allocation
DEVICE_CHUNK = 16 << 20  # bytes of one allocation on a device, where unused pages take memory too
BLOCK = 64 << 10  # bytes per checksum
HUGE = 1 << 20  # bytes from which a slot uses huge pages, which may waste 2 MiB each

# The alignment of slots by format version. Version 1 assumes pages of 4 KiB. Version 2 uses the largest page size of
# any processor, so that chunks and large slots begin on a page everywhere. Version 3 changed only the index.
GRAINS = {1: 4 << 10, 2: 64 << 10, 3: 64 << 10}

Memory = npt.NDArray[np.uint8]
Sums = npt.NDArray[np.uint64]
Codec = Literal["f32", "bf16", "int8"]
Row: TypeAlias = npt.NDArray[np.float32] | Codes

# Instances of np.dtype, since looking up the dtype of a class takes as long as making a view of a small row.
_FLOAT, _BYTE = np.dtype(np.float32), np.dtype(np.uint8)
_CODES: dict[str, np.dtype[Any]] = {"f32": _FLOAT, "bf16": np.dtype(np.uint16), "int8": np.dtype(np.int8)}


def checksums(buffer: Any, block: int = 1 << 20) -> Sums:
    """Return a 64-bit checksum of each block of ``buffer``; ``csrc/store/checksum.h`` has the formula.

    Checksums detect accidental changes (a torn write, a flipped bit), not those of an attacker.

    Args:
        buffer: any object that exports contiguous bytes: bytes, a memoryview, an mmap, an array of any shape and dtype.
            Other threads must not change it during the call.
        block: bytes of a block, >= 1; the last block may be shorter.

    Returns:
        uint64[ceil(bytes / block)].

    Raises:
        RangeError: ``block`` is not an int in 1 .. 2^63 - 1.
        ArrayError: ``buffer`` exports no contiguous bytes.

    Determinism: the result depends only on the bytes and ``block``, on every platform. A change within 8 bytes that are
        aligned in their block, such as one flipped bit, always changes the block's checksum. Any other change does so
        with a probability of about 1 - 2^-64.
    Cost: reads the buffer once, with all threads and without the GIL, at nearly the speed of a plain sum.

    >>> checksums(b"fedcore"), checksums(b"fedcorf")
    (array([9472247094406915468], dtype=uint64), array([15834520062922671200], dtype=uint64))
    """
    return core.checksum(buffer, check_integer("block", block, 1, 2**63 - 1))


@dataclass(frozen=True)
class Geometry:
    """The layout of slots of one size.

    Attributes:
        sums_at, blocks: bytes before the checksums in a slot, and their number.
        stride, begin: bytes from one slot to the next, and before the first slot of a file.
    """

    sums_at: int
    blocks: int
    stride: int
    begin: int
    per_chunk: int

    @classmethod
    def of(cls, payload: int, version: int = VERSION) -> "Geometry":
        """Return the layout of slots with ``payload`` usable bytes.

        From 64 KiB on, the slot size is a multiple of 4 KiB. From 1 MiB on, it is a multiple of the version's alignment
        in ``GRAINS``. The rounding adds at most a sixteenth, and such slots share no page of 4 KiB. Chunks are always
        multiples of the alignment.
        """
        grain = GRAINS[version]
        sums_at, blocks = padded(payload, LINE), -(-payload // BLOCK)
        stride = sums_at + padded(8 * blocks, LINE)
        for unit in sorted({grain, 4 << 10}, reverse=True):
            if stride >= 16 * unit:
                stride = padded(stride, unit)
                break
        multiple = grain // gcd(stride, grain)
        return cls(sums_at, blocks, stride, grain, max(1, CHUNK // stride // multiple) * multiple)


def padded(size: int, to: int) -> int:
    """Return the size rounded up to a multiple of ``to``."""
    return -(-size // to) * to


class Slots:
    """Slots of one size in memory; ``SlotFile`` keeps slots in a file.

    Slots are numbered from 1; 0 means no slot. A slot is a payload, followed by the checksums of its blocks. Memory is
    allocated in chunks that never move, so views stay valid while slots are added.

    Attributes:
        payload, stride: usable bytes of a slot, and bytes from one slot to the next.
        where: the name of the memory in messages.
        high: the highest slot that was ever taken.

    Cost: pages that were never written to use no memory.
    """

    def __init__(self, payload: int, version: int = VERSION) -> None:
        self.where = "memory"
        self.payload = payload
        self.geometry = Geometry.of(payload, version)
        self.stride, self._per_chunk = self.geometry.stride, self.geometry.per_chunk
        self.high = 0
        self._chunks: dict[int, Memory] = {}
        self._tables: dict[tuple[int, bool], npt.NDArray[Any]] = {}  # of each chunk's payloads
        self._free: list[int] = []  # a heap: low slots first, which keeps a round's rows close
        self._retired: deque[tuple[int, list[int]]] = deque()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tables": {}}  # a copy of a view of a chunk would be separate memory

    @property
    def free(self) -> int:
        """The number of slots below ``high`` that are free, or will be once readers move on."""
        return len(self._free) + self.waiting

    @property
    def waiting(self) -> int:
        """The number of unused slots that readers may still use."""
        return sum(len(slots) for _, slots in self._retired) if self._retired else 0

    def memory(self, slot: int) -> Memory:
        """Return the payload of a slot, uint8[payload]."""
        return self._bytes(slot, self.payload)

    def payloads(self, slots: Iterable[int], dtype: np.dtype[Any], *, writable: bool) -> list[npt.NDArray[Any]]:
        """Return views of the payloads of many slots, as arrays of a dtype."""
        found, last, per_chunk = [], -1, self._per_chunk
        for slot in slots:
            if (number := (slot - 1) // per_chunk) != last:
                table, last = self._table(number, slot, dtype, writable), number
            found.append(table[(slot - 1) % per_chunk])
        return found

    def _table(self, number: int, slot: int, dtype: np.dtype[Any], writable: bool) -> npt.NDArray[Any]:
        """Return the payloads of a chunk, which has the slot, as rows of an array."""
        table = self._tables.get((number, writable))
        if table is None or table.dtype is not dtype:
            _, memory = self.chunk(slot)
            shape = len(memory) // self.stride, self.payload // dtype.itemsize
            table = np.ndarray(shape, dtype, memory, strides=(self.stride, dtype.itemsize))
            table.setflags(write=writable)
            self._tables[number, writable] = table
        return table

    def take(self) -> int:
        """Return a slot of undefined content that has no other user."""
        slot = self._free[0] if self._free else self.high + 1
        self._prepare(slot)
        if slot > self.high:
            self.high = slot
        else:
            heapq.heappop(self._free)
        return slot

    def give(self, slots: Iterable[int]) -> None:
        """Free slots at once."""
        for slot in slots:
            heapq.heappush(self._free, slot)

    def retire(self, slots: list[int], sequence: int) -> None:
        """Free slots once ``reclaim`` reaches ``sequence``."""
        if slots:
            self._retired.append((sequence, slots))

    def reclaim(self, sequence: int) -> None:
        """Free the slots that were retired with at most ``sequence``."""
        while self._retired and self._retired[0][0] <= sequence:
            self.give(self._retired.popleft()[1])

    def has_free_below(self, slot: int) -> bool:
        """Whether ``take`` would return a lower slot."""
        return bool(self._free) and self._free[0] < slot

    def shrink(self) -> None:
        """Free the memory after the highest used slot."""
        free, high = set(self._free), self.high
        while high in free:
            free.remove(high)
            high -= 1
        self._free, self.high = sorted(free), high  # one statement, so that an interrupt leaves both or neither
        self._cut(-(-self.high // self._per_chunk))

    def occupy(self, slots: npt.NDArray[np.int64], retired: int | None = None, high: int = 0) -> None:
        """Mark exactly these slots as taken; the others below the highest are free.

        With ``retired``, the others are retired with this sequence number. ``high`` is a slot that was taken before.
        """
        self.high = max(high, int(slots.max(initial=0)))
        used = np.zeros(self.high + 1, np.bool_)
        used[slots] = True
        others: list[int] = np.flatnonzero(~used)[1:].tolist()  # a sorted list is a heap
        self._free, self._retired = ([], deque()) if retired is not None else (others, deque())
        if retired is not None:
            self.retire(others, retired)

    def copy(self, slot: int) -> int:
        """Return a new slot with the same payload and checksums."""
        copy = self.take()
        copy_into(self.memory(copy), self.memory(slot))
        self._put(copy, self._sums(slot))
        return copy

    def seal(self, slot: int, sums: Sums | None = None) -> int:
        """Write the checksums of the blocks, uint64[blocks], or compute them. Return one checksum of them all."""
        if sums is None:
            sums = checksums(self.memory(slot), BLOCK)
        self._put(slot, sums)
        return _folded(sums)

    def damage(self, slot: int, seal: int) -> str | None:
        """Return the damage of a slot with this seal, or None."""
        found = checksums(self._bytes(slot, self.payload), BLOCK)
        if _folded(found) == seal:
            return None
        kept = self._sums(slot)
        if _folded(kept) != seal:  # the slot has other content
            return f"all of its {len(kept)} blocks are invalid"
        blocks = np.flatnonzero(found != kept).tolist()
        return f"block {', '.join(map(str, blocks))} of {len(kept)} changed"

    def chunk(self, slot: int) -> tuple[int, Memory]:
        """Return the number and the memory of a slot's chunk."""
        number = (slot - 1) // self._per_chunk
        chunk = self._chunks.get(number)
        if chunk is None:
            chunk = self._chunks[number] = self._open_chunk(number)
        return number, chunk

    def require_whole(self) -> None:
        """Raise an error if memory is missing because a file was truncated."""

    def use(self, slots: Iterable[int]) -> None:
        """Record that slots are used."""

    def let_go(self, slots: Iterable[int]) -> None:
        """Evict slots from this process's memory if they are also in a file."""

    def close(self) -> None:
        """Free the memory; views stay valid."""
        self._tables.clear()
        self._chunks.clear()

    def _whole(self, slot: int) -> Memory:
        return self._bytes(slot, self.stride)

    def _bytes(self, slot: int, count: int) -> Memory:
        start = (slot - 1) % self._per_chunk * self.stride
        return self.chunk(slot)[1][start : start + count]

    def _sums(self, slot: int) -> Sums:
        """Return a view of the stored checksums of a slot."""
        return self._whole(slot)[self.geometry.sums_at :][: 8 * self.geometry.blocks].view(np.uint64)

    def _forget_chunk(self, number: int) -> None:
        for writable in (True, False):
            self._tables.pop((number, writable), None)
        self._chunks.pop(number, None)

    def _cut(self, chunks: int) -> None:
        for number in [number for number in self._chunks if number >= chunks]:
            self._forget_chunk(number)

    def _put(self, slot: int, sums: Sums) -> None:
        self._sums(slot)[:] = sums

    def _prepare(self, slot: int) -> None:
        """Make a slot writable."""

    def _open_chunk(self, number: int) -> Memory:
        # Private memory, so that a forked process has its own rows.
        size = self._per_chunk * self.stride
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError):
            raise MemoryError(f"not enough memory for {size:,} bytes of rows") from None
        if self.stride >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # some systems do not support huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(memory, np.uint8)


class DeviceSlots(Slots):
    """Slots of one size on a device, for a store in device memory or for cached rows. They have no checksums."""

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

    def copy(self, slot: int) -> int:
        """Return a new slot with the same payload."""
        copy = self.take()
        copy_into(self.memory(copy), self.memory(slot))
        return copy

    def _prepare(self, slot: int) -> None:
        self.chunk(slot)  # raises an error if the device's memory is full

    def _open_chunk(self, number: int) -> Any:
        return empty(self._per_chunk * self.stride, np.uint8, device=self._device)


def _folded(sums: Sums) -> int:
    return int(sums[0] if len(sums) == 1 else checksums(sums, sums.nbytes)[0])


class RowFormat:
    """The format of a row of n elements, ``payload`` bytes in all, on a device.

    "bf16" has two bytes an element; "int8" has one, and one float32 scale per 64 elements.
    """

    def __init__(self, codec: Codec, n: int, device: str = CPU) -> None:
        if codec not in get_args(Codec):
            raise UnknownNameError.of("codec", codec, get_args(Codec))
        self.codec, self.device = codec, device
        self.n = check_integer("n", n, 1)
        self._codes = self.n * _CODES[codec].itemsize
        self._scales_at = padded(self._codes, LINE)
        self._decoded = BufferPool(self.n, device=device)
        self.payload = self._scales_at + 4 * -(-self.n // SCALED) if codec == "int8" else self._codes

    def read_into(self, device: str) -> None:
        """Let ``decoded`` return vectors on this device."""
        self.device, self._decoded = device, BufferPool(self.n, device=device)

    def rows(self, slots: Slots, of: Sequence[int], *, writable: bool) -> list[Row]:
        """Return views of the rows in these slots, each float32[n] or Codes."""
        if self.codec == "f32":
            return slots.payloads(of, _FLOAT, writable=writable)  # type: ignore[return-value]
        return list(map(self._coded, slots.payloads(of, _BYTE, writable=writable)))

    def _coded(self, memory: Memory) -> Codes:
        codes = memory[: self._codes].view(_CODES[self.codec])
        scales = memory[self._scales_at :].view(_FLOAT) if self.codec == "int8" else None
        return Codes(self.codec, codes, scales)

    def decoded(self, row: Row | None) -> npt.NDArray[np.float32]:
        """Return a copy of a row's numbers, float32[n]; zeros for None."""
        if row is None:
            return zeros(self.n, device=self.device)
        vector = self._decoded.get()
        if isinstance(row, Codes):
            dequantise(row, vector)
        else:
            copy_into(vector, row)
        return vector
