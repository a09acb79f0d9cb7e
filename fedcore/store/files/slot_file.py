"""Slots in a file that is mapped into memory, their eviction, and a background thread for disk access."""

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

from fedcore.arrays import spans, track
from fedcore.errors import CorruptionError, StoreError
from fedcore.files import SAFE, OpenFolder, opened
from fedcore.store.files import disk
from fedcore.store.slots import BLOCK, GRAINS, VERSION, Geometry, Memory, RowFormat, Slots, Sums

MAGIC = b"fedcore\x1a"
KINDS = ("rows", "vectors")

_FORMAT = struct.Struct("<8sII16s8sQQQQ")
_DIGEST = 8
_SIZE = 4096
SEQUENCE_AT = 512


@dataclass(frozen=True)
class Header:
    """The header of a file of slots.

    Attributes:
        store: 16 random bytes that all files of one store share.
        kind: "rows" or "vectors".
        codec, n: the format of rows; "" and 0 for vectors.
        version: the format version, which determines the place of the first slot.
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
        """Return the header of the file of rows."""
        stride = Geometry.of(form.payload, version).stride
        return cls(bytes.fromhex(store), "rows", form.codec, form.n, form.payload, stride, version)

    @classmethod
    def of_vectors(cls, store: str, payload: int, version: int) -> "Header":
        """Return the header of the file of vectors of this size."""
        return cls(bytes.fromhex(store), "vectors", "", 0, payload, Geometry.of(payload, version).stride, version)

    def packed(self) -> bytes:
        """Return the header as bytes, with a digest of itself."""
        kind, codec = KINDS.index(self.kind), self.codec.encode()
        numbers = self.n, self.payload, self.stride, BLOCK
        fields = _FORMAT.pack(MAGIC, self.version, kind, self.store, codec, *numbers)
        return (fields + digest(fields)).ljust(_SIZE, b"\0")

    @classmethod
    def read(cls, fd: int, path: Path) -> "Header":
        """Return the header of an open file."""
        page = os.pread(fd, _SIZE, 0)
        fields = page[: _FORMAT.size]
        if len(page) < _SIZE or not fields.startswith(MAGIC):
            raise StoreError(f"{path}: not a file of a fedcore store, or damaged; use a copy of the store")
        version = struct.unpack_from("<I", fields, len(MAGIC))[0]
        if page[_FORMAT.size : _FORMAT.size + _DIGEST] != digest(fields):
            raise CorruptionError(f"{path}: the header has changed (format {version}); use a copy of the store")
        if version not in GRAINS:
            raise StoreError(f"{path}: {unknown_format(version)}")
        _, _, kind, store, codec, n, payload, stride, _ = _FORMAT.unpack(fields)
        if kind >= len(KINDS):
            raise CorruptionError(f"{path}: kind {kind} is neither rows nor vectors; use a copy of the store")
        return cls(store, KINDS[kind], codec.rstrip(b"\0").decode(errors="replace"), n, payload, stride, version)


def unknown_format(version: int) -> str:
    """Return the error text for a format that this version of fedcore cannot read."""
    return f"format {version} is unknown (this fedcore reads 1 to {VERSION}); use the fedcore that wrote the store"


def version_of(folder: OpenFolder, name: str) -> int:
    """Return the format version in a file's header. Errors: see ``Header.read``."""
    with opened(name, os.O_RDONLY | SAFE, folder.fd) as fd:
        return Header.read(fd, folder.path / name).version


def is_made_by(folder: OpenFolder, name: str, store: str) -> bool:
    """Whether a file belongs to this store. After a loss of power the header may be all or partly zeros."""
    with opened(name, os.O_RDONLY | SAFE, folder.fd) as fd:
        page = os.pread(fd, _SIZE, 0)
    if not any(page):
        return True
    return len(page) >= _FORMAT.size and page.startswith(MAGIC) and _FORMAT.unpack_from(page)[3].hex() == store


def digest(content: bytes) -> bytes:
    """Return a 64-bit digest."""
    return hashlib.blake2b(content, digest_size=_DIGEST).digest()


_PAGE = mmap.ALLOCATIONGRANULARITY  # bytes: the unit of mappings and madvise, 4 to 64 KiB
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # MADV_POPULATE_* of Linux 5.14
_AHEAD = 128 << 10  # bytes: the smallest common read-ahead
_RESERVE = 4 << 20  # bytes that a large file reserves in advance as it grows
RESIDENT_BYTES = 1 << 30  # default for the rows that stay in memory


class SlotFile(Slots):
    """Slots in a file, after its header. The file grows as slots are taken.

    When a slot is first taken, its disk space is reserved and its pages are made writable. A full disk then raises an
    error at once, instead of a signal during a write. Checksums and the sequence number are written by system calls,
    not through the mapping. The system may have written a page back already, and a copy-on-write file system then needs
    new space for it.

    About ``resident`` recently used slots stay in this process's memory. Others stay in the page cache while it has
    room.

    ``is_read`` means that readers may use slots that the index no longer names, even slots after the last one in use.
    """

    def __init__(self, folder: OpenFolder, name: str, header: Header, *, writable: bool, is_read: bool = False) -> None:
        super().__init__(header.payload, header.version)
        path = folder.path / name
        self.path, self.where = path, str(path)
        self._writable, self.is_read = writable, is_read
        with disk.explained("opening", path):
            self._fd = folder.open(name, os.O_RDWR if writable else os.O_RDONLY)
        try:
            with disk.explained("opening", path):
                found = Header.read(self._fd, path)
                self._size = os.fstat(self._fd).st_size
            if found != header:
                raise CorruptionError(
                    f"{path}: the header is {found}, not {header}; the file may be of a different store"
                )
        except BaseException:
            os.close(self._fd)
            raise
        self._maps: dict[int, mmap.mmap] = {}
        self._reserved = bytearray()  # marks the slots whose disk space is certainly reserved
        self.resident = max(1, RESIDENT_BYTES // self.stride)
        self._used: dict[int, None] = {}  # slots in the order of their last use
        self._turn = threading.RLock()  # reentrant: a signal handler may read rows while this thread holds it

    @classmethod
    def create(cls, folder: OpenFolder, name: str, header: Header) -> "SlotFile":
        """Create a file without slots; it must not exist."""
        with disk.explained("creating", folder.path / name):
            fd = -1
            try:
                fd = folder.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                disk.write(fd, header.packed())
                disk.sync(fd)
            except BaseException as error:
                # An interrupt may occur when the file exists and fd is not set yet.
                if fd >= 0 or not isinstance(error, OSError):
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=folder.fd)
                raise
            finally:
                if fd >= 0:
                    os.close(fd)
        return cls(folder, name, header, writable=True)

    @property
    def sequence(self) -> int:
        """The number that ``mark`` wrote last; 0 if it is unknown."""
        with disk.explained("reading", self.path):
            content = os.pread(self._fd, 8 + _DIGEST, SEQUENCE_AT)
        return int.from_bytes(content[:8], "little") if content[8:] == digest(content[:8]) else 0

    @property
    def bytes(self) -> int:
        """The length of the file."""
        return self._size

    def mark(self, sequence: int) -> None:
        """Record in the header that the index has durably reached this transaction number.

        A full or failing disk is ignored, since the transaction is already durable and a later mark will follow.
        """
        number = sequence.to_bytes(8, "little")
        with suppress(OSError):
            disk.write(self._fd, number + digest(number), SEQUENCE_AT)

    def sync(self) -> None:
        """Make the content of the slots durable."""
        with disk.explained("syncing", self.path):
            disk.write_back(self._maps.values())
            disk.sync(self._fd)

    def erase(self) -> None:
        """Overwrite the free slots with zeros, durably."""
        with disk.explained("erasing", self.path):
            for slot in self._free:
                disk.write(self._fd, bytes(self.stride), self._end(slot - 1))
        self.sync()

    def require_whole(self) -> None:
        """Raise a CorruptionError if the writer's file was truncated. Reading its mapping would kill the process."""
        if self._writable:
            self._require(self._size)

    def memory(self, slot: int) -> Memory:
        """Return the payload; see ``Slots``. For a reader, check first that the file contains the slot."""
        if not self._writable:
            self._require(self._end(slot))
        return super().memory(slot)

    def payloads(self, slots: Iterable[int], dtype: np.dtype[Any], *, writable: bool) -> list[npt.NDArray[Any]]:
        """Return views of the payloads; see ``Slots``. For a reader, check first that the file contains the slots."""
        slots = list(slots)
        if not self._writable and slots:
            self._require(self._end(max(slots)))
        return super().payloads(slots, dtype, writable=writable)

    def damage(self, slot: int, seal: int) -> str | None:
        """See ``Slots``."""
        try:
            self._require(min(self._size, self._end(slot)))
        except CorruptionError:
            return "it is past the end of the file, which was truncated"
        if self._end(slot) > self._size and (not self._writable or self._end(slot - 1) >= self._size):
            return "it is past the end of the file"
        try:
            self._advise([slot], _POPULATE_READ)  # reports a bad sector as an error; reading it would raise a signal
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: the kernel is too old for it
                return "it cannot be read from the disk"
        return super().damage(slot, seal)

    def occupy(self, slots: npt.NDArray[np.int64], retired: int | None = None, high: int = 0) -> None:
        """Mark slots as taken; see ``Slots``. Slots after the end of the file are never free."""
        end = max(0, self._size - self.geometry.begin) // self.stride
        present = slots[slots <= end]
        if self.is_read and retired is not None:
            with disk.explained("reading", self.path):
                data_end = disk.data_end(self._fd, self._end(int(present.max(initial=0))))
            high = max(high, -(-(data_end - self.geometry.begin) // self.stride))
        super().occupy(present, retired, high)
        self.high = max(self.high, int(slots.max(initial=0)))

    def will_need(self, slot: int) -> None:
        """Start to read a slot from disk."""
        # Without madvise, which holds the GIL. In steps, since one request reads at most the device's read-ahead.
        for start in range(self._end(slot - 1), self._end(slot), _AHEAD):
            disk.start_reading(self._fd, start, min(_AHEAD, self._end(slot) - start))

    def start_writing(self) -> None:
        """Start to write changes to disk, without waiting."""
        disk.start_writing(self._fd)

    def use(self, slots: Iterable[int]) -> None:
        """Record that slots are used. At most twice ``resident`` slots stay between two evictions."""
        for slot in slots:
            with self._turn:
                self._used.pop(slot, None)
                self._used[slot] = None
                is_full = len(self._used) > 2 * self.resident
            if is_full:
                self.evict()

    def evict(self) -> None:
        """Evict the least recently used slots if more than ``resident`` are in memory."""
        with self._turn:
            surplus = max(0, len(self._used) - self.resident)
            oldest = [slot for slot, _ in zip(self._used, range(surplus), strict=False)]
            for slot in oldest:
                del self._used[slot]
        self.let_go(oldest)

    def let_go(self, slots: Iterable[int]) -> None:
        """Evict slots from this process's memory. They stay in the page cache while it has room."""
        self._advise(slots, mmap.MADV_DONTNEED)

    def look_again(self) -> None:
        """Read the new size of the file. A reader's views stay valid."""
        with disk.explained("reading", self.path):
            self._size = os.fstat(self._fd).st_size
        size = self._per_chunk * self.stride
        for number in [number for number, chunk in self._chunks.items() if len(chunk) < size]:
            self._forget_chunk(number)
            del self._maps[number]

    def trim(self) -> None:
        """Shorten the file to its last slot before it is closed, unless a view of the file exists."""
        self.shrink()
        held = [number for number in list(self._maps) if not self._unmap(number)]
        if not held and self._end(self.high) < self._size:
            with disk.explained("shrinking", self.path):
                disk.resize(self._fd, self._end(self.high))

    def close(self) -> None:
        """Close the file; views stay valid."""
        super().close()
        self._maps.clear()
        fd, self._fd = self._fd, -1  # another file may get the number next, and must not be written to
        if fd >= 0:
            os.close(fd)

    def _require(self, size: int) -> None:
        if self._fd < 0:  # the file is closed, but views stay valid
            return
        try:  # without ``explained``, which takes longer than the call
            actual = os.fstat(self._fd).st_size
        except OSError as error:
            raise StoreError(f"{self.path}: reading failed: {error.strerror or error}") from error
        if actual < size:
            raise CorruptionError(
                f"{self.path}: truncated to {actual:,} bytes while it was open (at least {size:,} are needed); close "
                "the store and use a copy of it"
            )

    def _cut(self, chunks: int) -> None:
        if self._end(self.high) >= self._size:  # the file was truncated, or the index is forged
            return
        for number in sorted((number for number in self._maps if number >= chunks), reverse=True):
            if not self._unmap(number):
                chunks = number + 1  # a view exists: the file must not end before it
                break
        del self._reserved[self.high + 1 :]  # done first, so that slots without disk space reserve it when taken
        with disk.explained("shrinking", self.path):
            end, size = self._end(self.high), self._end(chunks * self._per_chunk)
            # The file must never be shorter than its mappings: another thread may read there at any moment.
            if self._size > end and not disk.free(self._fd, end, self._size - end):
                self._size = end  # set before the resize: after an interrupt, a longer file still grows as usual
                disk.resize(self._fd, end)
            self._size = min(self._size, size)
            disk.resize(self._fd, size)  # added bytes take no disk space
            self._size = size

    def _unmap(self, number: int) -> bool:
        """Unmap a chunk. Return False if a view of it exists."""
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
        before = start % _PAGE  # nonzero only for version 1 on pages larger than 4 KiB
        with disk.explained("mapping", self.path):
            self._maps[number] = mmap.mmap(self._fd, before + size, offset=start - before, access=access)
        track(self._maps[number])
        return np.frombuffer(self._maps[number], np.uint8, offset=before)

    def _put(self, slot: int, sums: Sums) -> None:
        with disk.explained("writing checksums", self.path):
            disk.write(self._fd, sums.tobytes(), self._end(slot - 1) + self.geometry.sums_at)

    def _prepare(self, slot: int) -> None:
        if slot >= len(self._reserved):
            self._reserved.extend(bytes(max(_RESERVE // self.stride + 2, slot + 1)))
        if not self._reserved[slot]:
            self._whole(slot)  # maps the chunk, and extends the file to its end
            ahead = min(self._end(slot) // 8, _RESERVE) // self.stride
            last = slot if slot <= self.high else slot + ahead
            with disk.explained("reserving disk space", self.path):
                disk.reserve(self._fd, self._end(slot - 1), (last - slot + 1) * self.stride)
            self._reserved[slot : last + 1] = b"\1" * (last - slot + 1)
        with disk.explained("reserving memory", self.path):
            try:
                self._advise([slot], _POPULATE_WRITE)
            except OSError as error:
                if error.errno == errno.EFAULT:  # a write would raise a signal, and "Bad address" does not help
                    reasons = f"{os.strerror(errno.ENOSPC)}, or the disk failed, or the file was truncated"
                    raise OSError(errno.ENOSPC, reasons) from error
                if error.errno != errno.EINVAL:  # EINVAL: the kernel is too old; each page will fault separately
                    raise

    def _advise(self, slots: Iterable[int], advice: int) -> None:
        for slot in slots:
            if not self._writable and self._end(slot) > self._size:
                continue
            number = (slot - 1) // self._per_chunk
            self._whole(slot)
            mapped = self._end(number * self._per_chunk) // _PAGE * _PAGE
            start = (self._end(slot - 1) - mapped) // _PAGE * _PAGE
            for span in spans(self._end(slot) - mapped - start, 1):
                self._maps[number].madvise(advice, start + span.start, span.stop - span.start)


IDLE_SECONDS = 0.05
"""Seconds without another commit before a commit is written back."""


class DiskThread:
    """A background thread for a file of slots, started on first use.

    Reading ahead gives the disk many requests at once instead of one row after another. Writing back while nothing is
    committed leaves less for the next sync. During a series of rounds, writing back would only delay the rounds (by a
    factor of five on one disk).
    """

    def __init__(self, slots: SlotFile) -> None:
        self._slots = slots
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process = 0
        self._stopping = False
        self._commits = 0

    def read_ahead(self, slots: list[int]) -> None:
        """Start to read slots from disk, in the order of the file."""
        self._do(lambda: self._read(sorted(slots)))

    def write_back(self) -> None:
        """Start to write changes to disk, unless another commit follows soon."""
        self._commits += 1
        commits = self._commits
        self._do(lambda: self._write(commits))

    def close(self) -> None:
        """Stop the thread and wait for it. If the thread itself collects a dropped store, do not wait."""
        if self._thread is not None and self._process == os.getpid():
            self._stopping = True
            self._tasks.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join()
        self._thread = None

    def _do(self, task: Callable[[], None]) -> None:
        if self._thread is None or self._process != os.getpid():  # a fork does not inherit threads
            self._process, self._tasks, self._stopping = os.getpid(), SimpleQueue(), False
            self._thread = threading.Thread(target=self._run, args=(self._tasks,), name="fedcore-store", daemon=True)
            self._thread.start()
        self._tasks.put(task)

    def _run(self, tasks: "SimpleQueue[Callable[[], None] | None]") -> None:
        while (task := tasks.get()) is not None:
            try:  # noqa: SIM105  # suppress() itself needs memory
                task()
            except (OSError, MemoryError):  # the tasks only make other calls faster
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
