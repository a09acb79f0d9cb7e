"""Numbered pieces of memory of one size, taken, given back and taken again: where rows and vectors lie."""

import heapq
import mmap
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from fedcore.store.checksum import checksums
from fedcore.store.geometry import BLOCK, VERSION, Geometry

Memory = npt.NDArray[np.uint8]

HUGE = 1 << 20  # bytes of a slot from which on huge pages are asked for: they may waste one of 2 MiB


class Slots:
    """Slots of one size in memory; ``SlotFile`` keeps them in a file.

    They count from 1, so that 0 can say "none". A slot is a payload and, behind it, the checksums of its blocks.
    Memory comes in chunks that never move, so that views stay valid while more slots come.

    Args:
        payload: bytes of a slot that its user sees.
        version: of the format, which says how slots lie.

    Attributes:
        geometry, stride: how slots lie, and bytes from one to the next.
        where: what messages call them.
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
        self._free: list[int] = []  # a heap: low slots first, which keeps a round's rows together
        self._retired: deque[tuple[int, list[int]]] = deque()

    @property
    def free(self) -> int:
        """The number of slots below ``high`` that nobody needs, or will not when readers have gone on."""
        return len(self._free) + self.waiting

    @property
    def waiting(self) -> int:
        """The number of them that readers may still look at."""
        return sum(len(slots) for _, slots in self._retired)

    def memory(self, slot: int) -> Memory:
        """The payload, uint8[payload]."""
        return self._bytes(slot, self.payload)

    def take(self) -> int:
        """A slot of undefined content that nobody else has."""
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
        """Tell whether ``take`` would return a lower slot than this one."""
        return bool(self._free) and self._free[0] < slot

    def shrink(self) -> None:
        """Forget the free slots above the highest that is used, and their memory."""
        free, high = set(self._free), self.high
        while high in free:
            free.remove(high)
            high -= 1
        self._free, self.high = sorted(free), high  # both or neither, whatever comes from outside
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
        sums = self._whole(slot)[self.geometry.sums_at : self.geometry.sums_at + 8 * self.geometry.blocks]
        self._put(copy, self.geometry.sums_at, sums.view(np.uint64))
        return copy

    def seal(self, slot: int, sums: npt.NDArray[np.uint64] | None = None) -> int:
        """Write the checksums of the slot's blocks behind them, and return the checksum of them all.

        Args:
            slot: which.
            sums: uint64[blocks], where they are known; else the payload is read.
        """
        if sums is None:
            sums = checksums(self.memory(slot), BLOCK)
        self._put(slot, self.geometry.sums_at, sums)
        return folded(sums)

    def damage(self, slot: int, seal: int) -> str | None:
        """The damage of a slot that was sealed so, or None."""
        whole = self._whole(slot)
        found = checksums(whole[: self.payload], BLOCK)
        if folded(found) == seal:
            return None
        kept = whole[self.geometry.sums_at : self.geometry.sums_at + found.nbytes].view(np.uint64)
        if folded(kept) != seal:
            return f"none of its {len(kept)} blocks can be trusted"  # it holds something else
        blocks = np.flatnonzero(found != kept).tolist()
        return f"block {', '.join(map(str, blocks))} of {len(kept)} changed"

    def chunk(self, slot: int) -> tuple[int, Memory]:
        """The chunk of memory in which a slot lies, and its number."""
        self._whole(slot)
        number = (slot - 1) // self._per_chunk
        return number, self._chunks[number]

    def require_whole(self) -> None:
        """Raise an error if some of the memory is gone, as that of a file that was cut short."""

    def let_go(self, slots: Iterable[int]) -> None:
        """Take slots out of this process's memory, if they lie elsewhere too."""

    def close(self) -> None:
        """Let the memory go; views that somebody still holds stay valid."""
        self._chunks.clear()

    def _whole(self, slot: int) -> Memory:
        return self._bytes(slot, self.stride)

    def _bytes(self, slot: int, count: int) -> Memory:
        """The first bytes of a slot."""
        number, place = divmod(slot - 1, self._per_chunk)
        chunk = self._chunks.get(number)
        if chunk is None:
            chunk = self._chunks[number] = self._open_chunk(number)
        start = place * self.stride
        return chunk[start : start + count]

    def _cut(self, chunks: int) -> None:
        """Let go of all but the first chunks."""
        for number in [number for number in self._chunks if number >= chunks]:
            del self._chunks[number]

    def _put(self, slot: int, start: int, sums: npt.NDArray[np.uint64]) -> None:
        """Write checksums into a slot."""
        self._whole(slot)[start : start + sums.nbytes].view(np.uint64)[:] = sums

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


def folded(sums: npt.NDArray[np.uint64]) -> int:
    """One checksum of the blocks' checksums."""
    return int(sums[0] if len(sums) == 1 else checksums(sums, sums.nbytes)[0])
