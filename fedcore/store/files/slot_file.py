"""Slots in a file that is mapped into memory, which of them stay there, and the thread that reads ahead."""

import errno
import hashlib
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.errors import CorruptionError, StoreError
from fedcore.store.files import disk
from fedcore.store.slots import BLOCK, GRAINS, VERSION, Geometry, Memory, RowFormat, Slots, Sums

MAGIC = b"fedcore\x1a"
KINDS = ("rows", "vectors")

_FORMAT = struct.Struct("<8sII16s8sQQQQ")
_DIGEST = 8
_SIZE = 4096
SEQUENCE_AT = 512
_SEQUENCE = struct.Struct("<Q8s")


@dataclass(frozen=True)
class Header:
    """The header in which a file of slots describes itself.

    Attributes:
        store: 16 random bytes that the files of one store share.
        kind: "rows" or "vectors".
        codec, n: of the rows; "" and 0 for vectors.
        payload, stride: bytes of a slot that are used, and from one slot to the next.
        version: of the format, which decides where the first slot lies.
    """

    store: bytes
    kind: str
    codec: str
    n: int
    payload: int
    stride: int
    version: int = VERSION

    @classmethod
    def of_rows(cls, store: str, form: RowFormat, version: int = VERSION) -> "Header":
        """The header of the file of rows."""
        stride = Geometry.of(form.payload, version).stride
        return cls(bytes.fromhex(store), "rows", form.codec, form.n, form.payload, stride, version)

    @classmethod
    def of_vectors(cls, store: str, payload: int, version: int) -> "Header":
        """The header of the file of vectors of so many bytes."""
        return cls(bytes.fromhex(store), "vectors", "", 0, payload, Geometry.of(payload, version).stride, version)

    def packed(self) -> bytes:
        """The header, with a digest of itself."""
        kind, codec = KINDS.index(self.kind), self.codec.encode()
        numbers = self.n, self.payload, self.stride, BLOCK
        fields = _FORMAT.pack(MAGIC, self.version, kind, self.store, codec, *numbers)
        return (fields + digest(fields)).ljust(_SIZE, b"\0")

    @classmethod
    def read(cls, fd: int, path: Path) -> "Header":
        """The header of an open file."""
        page = os.pread(fd, _SIZE, 0)
        fields = page[: _FORMAT.size]
        if len(page) < _SIZE or not fields.startswith(MAGIC):
            size = os.fstat(fd).st_size
            raise StoreError(
                f"{path}: expected a file of a fedcore store, got {size} bytes that do not begin like one; if it was "
                "one, it is damaged: use a copy of the store"
            )
        version = struct.unpack_from("<I", fields, len(MAGIC))[0]
        if page[_FORMAT.size : _FORMAT.size + _DIGEST] != digest(fields):
            raise CorruptionError(f"{path}: its header was changed (format {version}); use a copy of the store")
        if version not in GRAINS:
            raise StoreError(
                f"{path}: expected a format up to {VERSION}, got {version}: open it with the version of fedcore that "
                "wrote it, or a newer one"
            )
        _, _, kind, store, codec, n, payload, stride, _ = _FORMAT.unpack(fields)
        if kind >= len(KINDS):
            raise CorruptionError(
                f"{path}: expected a file of rows or vectors, got kind {kind}; use a copy of the store"
            )
        return cls(store, KINDS[kind], codec.rstrip(b"\0").decode(errors="replace"), n, payload, stride, version)


def version_of(path: Path) -> int:
    """The version of a file's format, by its header. Errors are those of ``Header.read``."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return Header.read(fd, path).version
    finally:
        os.close(fd)


def is_made_by(path: Path, store: str) -> bool:
    """Return whether a file is of that store; a loss of power may leave a header of zeros, or half of one."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        page = os.pread(fd, _SIZE, 0)
    finally:
        os.close(fd)
    if not any(page):
        return True
    return len(page) >= _FORMAT.size and page.startswith(MAGIC) and _FORMAT.unpack_from(page)[3].hex() == store


def packed_sequence(sequence: int) -> bytes:
    """A sequence number as it stands in the header, at ``SEQUENCE_AT``."""
    number = struct.pack("<Q", sequence)
    return number + digest(number)


def read_sequence(fd: int) -> int:
    """The number that the index had reached at least; 0 where it is unknown."""
    number, check = _SEQUENCE.unpack(os.pread(fd, _SEQUENCE.size, SEQUENCE_AT))
    return int(number) if check == digest(struct.pack("<Q", number)) else 0


def digest(content: bytes) -> bytes:
    """64 bits that change when the content does."""
    return hashlib.blake2b(content, digest_size=_DIGEST).digest()


_PAGE = mmap.ALLOCATIONGRANULARITY  # bytes: what the system maps from and advises, 4 to 64 KiB
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # MADV_POPULATE_* of Linux 5.14
_AHEAD = 128 << 10  # bytes; the smallest read-ahead that is usual
_RESERVE = 4 << 20  # bytes that a large file reserves ahead as it grows
RESIDENT_BYTES = 1 << 30  # of rows that stay in memory by default


class SlotFile(Slots):
    """Slots behind the header of a file, which grows as they are taken.

    A slot gets its place on the disk when it is first taken, and its pages are made writable in one call: a full
    disk is an error there, not a signal in the middle of a write, and it is quicker than a fault for each page.
    Checksums and the mark are written by calls, not through the mapping: by then the system may have written the page
    back, and a file system that copies on writing needs new room for it.

    Slots that were used last stay in this process's memory, about ``resident`` of them. Others stay in the page cache
    as long as it has room, so that coming back is cheap then.

    Args:
        path: an existing file.
        header: the header that it must have.
        writable: whether slots may be taken and written.
        looked_at: whether readers may look at slots that the index names no more: any slot that was ever written then,
            also one behind all that are in use.
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
        self.resident = max(1, RESIDENT_BYTES // self.stride)
        self._used: dict[int, None] = {}  # in the order of their last use
        self._turn = threading.RLock()  # a handler of a signal may read rows in the midst of it

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
        """The number that ``mark`` wrote last; 0 if it is unknown."""
        with disk.explained("reading", self.path):
            return read_sequence(self._fd)

    @property
    def bytes(self) -> int:
        """The length of the file."""
        return self._size

    def mark(self, sequence: int) -> None:
        """Note in the header that the index has durably reached this number.

        The index counts already: that the disk is full, or fails, is no error here: another mark will follow.
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
        """See ``Slots``; for a reader, ``require_whole`` of this slot."""
        if not self._writable:
            self._require(self._end(slot))
        return super().memory(slot)

    def payloads(self, slots: Iterable[int], dtype: np.dtype[Any], *, writable: bool) -> list[npt.NDArray[Any]]:
        """See ``Slots``; for a reader, ``require_whole`` of these slots."""
        slots = list(slots)
        if not self._writable and slots:
            self._require(self._end(max(slots)))
        return super().payloads(slots, dtype, writable=writable)

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
        """See ``Slots``. Behind the end of the file nothing is free, whatever the index names there."""
        end = max(0, self._size - self.geometry.begin) // self.stride
        present = slots[slots <= end]
        if self.looked_at and retired is not None:
            with disk.explained("reading", self.path):
                behind = disk.data_end(self._fd, self._end(int(present.max(initial=0))))
            high = max(high, -(-(behind - self.geometry.begin) // self.stride))
        super().occupy(present, retired, high)
        self.high = max(self.high, int(slots.max(initial=0)))

    def will_need(self, slot: int) -> None:
        """Start reading a slot from the disk."""
        # Not madvise, which keeps Python's lock. In steps, since no request reads more than the device's read-ahead.
        for start in range(self._end(slot - 1), self._end(slot), _AHEAD):
            disk.start_reading(self._fd, start, min(_AHEAD, self._end(slot) - start))

    def start_writing(self) -> None:
        """Start writing what was changed to the disk, without waiting for it."""
        disk.start_writing(self._fd)

    def use(self, slots: Iterable[int]) -> None:
        """Note that slots are used; twice as many as should stay are the most that ever do between two trims."""
        for slot in slots:
            with self._turn:
                self._used.pop(slot, None)
                self._used[slot] = None
                many = len(self._used) > 2 * self.resident
            if many:
                self.evict()

    def evict(self) -> None:
        """Let go of the slots that were not used for longest, if more than ``resident`` are in memory."""
        with self._turn:
            surplus = max(0, len(self._used) - self.resident)
            oldest = [slot for slot, _ in zip(self._used, range(surplus), strict=False)]
            for slot in oldest:
                del self._used[slot]
        self.let_go(oldest)

    def let_go(self, slots: Iterable[int]) -> None:
        """Take slots out of this process's memory; they stay in the page cache as long as there is room."""
        self._advise(slots, mmap.MADV_DONTNEED)

    def look_again(self) -> None:
        """See how far the file has grown; a reader's views stay valid."""
        with disk.explained("reading", self.path):
            self._size = os.fstat(self._fd).st_size
        size = self._per_chunk * self.stride
        for number in [number for number, chunk in self._chunks.items() if len(chunk) < size]:
            self._forget_chunk(number)
            del self._maps[number]

    def trim(self) -> None:
        """Let the file end behind its last slot, before it is closed, unless a view of it is held."""
        self.shrink()
        held = [number for number in list(self._maps) if not self._unmap(number)]
        if not held and self._end(self.high) < self._size:
            with disk.explained("shrinking", self.path):
                disk.resize(self._fd, self._end(self.high))

    def close(self) -> None:
        """Close the file; views stay valid."""
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
                chunks = number + 1  # a view is held: the file must not end before it
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
        """Give a chunk's addresses back, unless a view of it is held."""
        self._forget_chunk(number)
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

    def _put(self, slot: int, sums: Sums) -> None:
        with disk.explained("writing checksums", self.path):
            disk.write(self._fd, sums.tobytes(), self._end(slot - 1) + self.geometry.sums_at)

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
                if error.errno == errno.EFAULT:  # it would have been a signal, and "Bad address" helps nobody
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


IDLE_SECONDS = 0.05
"""How long after a commit nothing else must have been committed before its writing begins."""


class DiskThread:
    """One thread for a file of slots, which is started when it is first needed.

    Reading ahead is what makes a cold cohort quick: the disk gets many requests at a time, where reading row by row
    gives it one. Writing back while nothing is committed leaves little to do for the next sync; beside rounds that
    follow each other at once it would only hold them up (by five times, on one disk).
    """

    def __init__(self, slots: SlotFile) -> None:
        self._slots = slots
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process = 0
        self._stopping = False
        self._commits = 0

    def read_ahead(self, slots: list[int]) -> None:
        """Start reading slots from the disk, in their order there."""
        self._do(lambda: self._read(sorted(slots)))

    def write_back(self) -> None:
        """Start writing what was changed to the disk, unless more is committed soon."""
        self._commits += 1
        commits = self._commits
        self._do(lambda: self._write(commits))

    def close(self) -> None:
        """Stop, and wait until the thread has; it may be this very one, where a dropped store is collected."""
        if self._thread is not None and self._process == os.getpid():
            self._stopping = True
            self._tasks.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join()
        self._thread = None

    def _do(self, task: Callable[[], None]) -> None:
        if self._thread is None or self._process != os.getpid():  # a fork has no threads of its parent
            self._process, self._tasks, self._stopping = os.getpid(), SimpleQueue(), False
            self._thread = threading.Thread(target=self._run, args=(self._tasks,), name="fedcore-store", daemon=True)
            self._thread.start()
        self._tasks.put(task)

    def _run(self, tasks: "SimpleQueue[Callable[[], None] | None]") -> None:
        while (task := tasks.get()) is not None:
            try:  # noqa: SIM105  # suppress() needs memory itself
                task()
            except (OSError, MemoryError):  # a system that cannot do this does without
                pass

    def _write(self, commits: int) -> None:
        if commits == self._commits and not self._stopping:
            time.sleep(IDLE_SECONDS)
            if commits == self._commits:
                self._slots.start_writing()

    def _read(self, slots: list[int]) -> None:
        for slot in slots:
            if self._stopping:
                return
            self._slots.will_need(slot)
