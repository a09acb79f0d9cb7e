"""Slots in a file that is mapped into memory."""

import errno
import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedcore.errors import CorruptionError, StoreError
from fedcore.store.files import system_calls as disk
from fedcore.store.files.slot_file_header import SEQUENCE_AT, Header, packed_sequence, read_sequence
from fedcore.store.slots import Memory, Slots

_PAGE = mmap.ALLOCATIONGRANULARITY  # bytes: what the system maps from and advises, 4 to 64 KiB
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # MADV_POPULATE_* of Linux 5.14
_AHEAD = 128 << 10  # bytes; the smallest read-ahead that is usual
_RESERVE = 4 << 20  # bytes that a large file reserves ahead as it grows


class SlotFile(Slots):
    """Slots behind the header of a file, which grows as they are taken.

    A slot gets its place on the disk when it is first taken, and its pages are made writable in one call: a full
    disk is an error there, not a signal in the middle of a write, and it is quicker than a fault for each page.
    Checksums and the mark are written by calls, not through the mapping: by then the system may have written the page
    back, and a file system that copies on writing needs new room for it.

    Args:
        path: an existing file.
        header: what its header must be like (kind, codec, n, payload), with whatever store if that is empty.
        writable: whether slots may be taken and written.
        looked_at: whether readers may look at slots that the index names no more: then it may be any slot that was ever
            written, also one behind all that are in use.

    Raises:
        StoreError: the file cannot be opened, or is no store's, or newer.
        CorruptionError: its header is damaged, or not this store's.
    """

    def __init__(self, path: Path, header: Header, *, writable: bool, looked_at: bool = False) -> None:
        super().__init__(header.payload, header.version)
        self.path, self.where = path, str(path)
        self._writable, self.looked_at = writable, looked_at
        with disk.explained("opening", path):
            self._fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            with disk.explained("opening", path):
                found = Header.read(self._fd, path)
                self._size = os.fstat(self._fd).st_size
            if found != header:
                raise CorruptionError(f"{path}: expected the header {header}, got {found}: files of two stores?")
        except BaseException:
            os.close(self._fd)
            raise
        self._maps: dict[int, mmap.mmap] = {}
        self._reserved = bytearray()  # which slots have their place on the disk for sure

    @classmethod
    def create(cls, path: Path, header: Header) -> "SlotFile":
        """A new file without slots; it must not exist."""
        with disk.explained("creating", path):
            fd = -1
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                disk.write(fd, header.packed())
                disk.sync(fd)
            except BaseException as error:
                # From outside, one may come when the file is there, and its number not yet.
                if fd >= 0 or not isinstance(error, OSError):
                    path.unlink(missing_ok=True)
                raise
            finally:
                if fd >= 0:
                    os.close(fd)
        return cls(path, header, writable=True)

    @property
    def sequence(self) -> int:
        """The number that ``mark`` wrote last; 0 if that cannot be told."""
        with disk.explained("reading", self.path):
            return read_sequence(self._fd)

    @property
    def bytes(self) -> int:
        """The length of the file."""
        return self._size

    def mark(self, sequence: int) -> None:
        """Note in the header that the index has durably reached this number.

        The index counts already: that the disk is full, or fails, is no error here. The next mark says more.
        """
        with suppress(OSError):
            disk.write(self._fd, packed_sequence(sequence), SEQUENCE_AT)

    def sync(self) -> None:
        """Make durable what the slots hold."""
        with disk.explained("syncing", self.path):
            disk.write_back(self._maps.values())
            disk.sync(self._fd)

    def require_whole(self) -> None:
        """Raise a CorruptionError if the writer's file was cut short: reading what is mapped there ends the process."""
        if self._writable:
            self._require(self._size)

    def memory(self, slot: int) -> Memory:
        """See ``Slots``; a reader knows of each slot alone that its place does not go."""
        if not self._writable:
            self._require(self._end(slot))
        return super().memory(slot)

    def damage(self, slot: int, seal: int) -> str | None:
        """The damage of a slot that was sealed so, or None."""
        try:
            self._require(min(self._size, self._end(slot)))
        except CorruptionError:
            return "it lies past the end of the file, which was cut short"
        if self._end(slot) > self._size and (not self._writable or self._end(slot - 1) >= self._size):
            return "it lies past the end of the file"
        try:
            self._advise([slot], _POPULATE_READ)  # a bad sector is an error here, and a signal where a checksum is made
        except OSError as error:
            if error.errno != errno.EINVAL:  # an older kernel
                return "it cannot be read from the disk"
        return super().damage(slot, seal)

    def occupy(self, slots: npt.NDArray[np.int64], retired: int | None = None, high: int = 0) -> None:
        """See ``Slots``. Behind the end of the file nothing is free: who says that slots are used there is wrong."""
        end = max(0, self._size - self.geometry.begin) // self.stride
        slots_there = slots[slots <= end]
        if self.looked_at and retired is not None:
            with disk.explained("reading", self.path):
                behind = disk.data_end(self._fd, self._end(int(slots_there.max(initial=0))))
            high = max(high, -(-(behind - self.geometry.begin) // self.stride))
        super().occupy(slots_there, retired, high)
        self.high = max(self.high, int(slots.max(initial=0)))

    def will_need(self, slot: int) -> None:
        """Start reading a slot from the disk."""
        # Not madvise, which keeps Python's lock. In steps, since no request reads more than the device's read-ahead.
        for start in range(self._end(slot - 1), self._end(slot), _AHEAD):
            disk.start_reading(self._fd, start, min(_AHEAD, self._end(slot) - start))

    def start_writing(self) -> None:
        """Start writing what was changed to the disk, without waiting for it."""
        disk.start_writing(self._fd)

    def let_go(self, slots: Iterable[int]) -> None:
        """Take slots out of this process's memory; they stay in the page cache as long as there is room."""
        self._advise(slots, mmap.MADV_DONTNEED)

    def look_again(self) -> None:
        """See how far the file has grown; a reader's views stay valid."""
        with disk.explained("reading", self.path):
            self._size = os.fstat(self._fd).st_size
        size = self._per_chunk * self.stride
        for number in [number for number, chunk in self._chunks.items() if len(chunk) < size]:
            del self._maps[number], self._chunks[number]

    def trim(self) -> None:
        """Let the file end behind its last slot, before it is closed, unless somebody still holds a view."""
        self.shrink()
        held = [number for number in list(self._maps) if not self._unmap(number)]
        if not held and self._end(self.high) < self._size:
            with disk.explained("shrinking", self.path):
                disk.resize(self._fd, self._end(self.high))

    def close(self) -> None:
        """Close the file; views that somebody still holds stay valid."""
        super().close()
        self._maps.clear()
        fd, self._fd = self._fd, -1  # whose number another file may have next: nothing may be written to it by mistake
        if fd >= 0:
            os.close(fd)

    def _require(self, size: int) -> None:
        if self._fd < 0:  # of a closed one views stay valid, and nothing is known
            return
        try:  # not by ``explained``, which takes longer than the call
            there = os.fstat(self._fd).st_size
        except OSError as error:
            raise StoreError(f"{self.path}: reading failed: {error.strerror or error}") from error
        if there < size:
            raise CorruptionError(
                f"{self.path}: expected at least {size:,} bytes, got {there:,}: the file was cut short while it was "
                "open: close the store, and use a copy of it"
            )

    def _cut(self, chunks: int) -> None:
        if self._end(self.high) >= self._size:  # past it where the file was cut, or the index forged
            return
        for number in sorted((number for number in self._maps if number >= chunks), reverse=True):
            if not self._unmap(number):
                chunks = number + 1  # somebody still holds a view: the file must not end before it
                break
        del self._reserved[self.high + 1 :]  # first, so that what loses its place on the disk has it again when taken
        with disk.explained("shrinking", self.path):
            end, size = self._end(self.high), self._end(chunks * self._per_chunk)
            # The file must not be shorter than what is mapped, not even for a moment: another thread may read there.
            if self._size > end and not disk.free(self._fd, end, self._size - end):
                self._size = end  # before it is: a file that is longer than that grows as a shorter one does
                disk.resize(self._fd, end)
            self._size = min(self._size, size)
            disk.resize(self._fd, size)  # what is added again takes no disk
            self._size = size

    def _unmap(self, number: int) -> bool:
        """Give a chunk's addresses back, unless somebody holds a view of it."""
        self._chunks.pop(number, None)
        try:
            self._maps[number].close()
        except BufferError:
            return False
        del self._maps[number]
        return True

    def _end(self, slot: int) -> int:
        return self.geometry.begin + slot * self.stride

    def _open_chunk(self, number: int) -> Memory:
        size = self._per_chunk * self.stride
        start = self.geometry.begin + number * size
        if self._size < start + size:
            if self._writable:
                with disk.explained("growing", self.path):
                    disk.resize(self._fd, start + size)
                self._size = start + size
            else:
                size = self._size - start
        access = mmap.ACCESS_WRITE if self._writable else mmap.ACCESS_READ
        before = start % _PAGE  # of version 1 alone, on pages larger than it knew
        with disk.explained("mapping", self.path):
            self._maps[number] = mmap.mmap(self._fd, before + size, offset=start - before, access=access)
        return np.frombuffer(self._maps[number], np.uint8, offset=before)

    def _put(self, slot: int, start: int, sums: npt.NDArray[np.uint64]) -> None:
        with disk.explained("writing checksums", self.path):
            disk.write(self._fd, sums.tobytes(), self._end(slot - 1) + start)

    def _prepare(self, slot: int) -> None:
        if slot >= len(self._reserved):
            self._reserved.extend(bytes(max(_RESERVE // self.stride + 2, slot + 1)))
        if not self._reserved[slot]:
            self._whole(slot)  # the chunk is mapped, and the file as long as it
            ahead = min(self._end(slot) // 8, _RESERVE) // self.stride
            last = slot if slot <= self.high else slot + ahead
            with disk.explained("reserving room on the disk", self.path):
                disk.reserve(self._fd, self._end(slot - 1), (last - slot + 1) * self.stride)
            self._reserved[slot : last + 1] = b"\1" * (last - slot + 1)
        with disk.explained("reserving memory", self.path):
            try:
                self._advise([slot], _POPULATE_WRITE)
            except OSError as error:
                if error.errno == errno.EFAULT:  # what would have been a signal, and "Bad address" to nobody's help
                    reasons = f"{os.strerror(errno.ENOSPC)}, or the disk fails, or the file was cut short"
                    raise OSError(errno.ENOSPC, reasons) from error
                if error.errno != errno.EINVAL:  # an older kernel, on which each page is its own fault
                    raise

    def _advise(self, slots: Iterable[int], advice: int) -> None:
        for slot in slots:
            if not self._writable and self._end(slot) > self._size:
                continue
            number = (slot - 1) // self._per_chunk
            self._whole(slot)
            mapped = self._end(number * self._per_chunk) // _PAGE * _PAGE
            start = (self._end(slot - 1) - mapped) // _PAGE * _PAGE
            self._maps[number].madvise(advice, start, self._end(slot) - mapped - start)
