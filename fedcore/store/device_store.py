"""A store in host memory or files that a device reads and writes through a cache of rows."""

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcore.arrays import I64, core, device_ordinal
from fedcore.errors import DeviceError, DeviceMemoryError
from fedcore.runtime import uninterrupted
from fedcore.store.client_store import ClientStore
from fedcore.store.reader import CommittedRows
from fedcore.store.registry import ClientId
from fedcore.store.slots import DeviceSlots, Row, RowFormat
from fedcore.validation import check_integer

LEAST = 1 << 20
"""Bytes from which a slot is pinned, so that the device copies it directly. Smaller slots are staged."""

CACHE_BYTES = 4 << 30
"""Bytes of cached and prefetched rows on a device; a GPU with 24 GB can spare this much."""

PART_OF_MEMORY = 6
"""By default the cache uses at most 1 / PART_OF_MEMORY of the device's memory."""

BUFFER_BYTES = 64 << 20
"""Bytes of each of the two pinned staging areas, or of one row if that is less."""


class CachedRow(NamedTuple):
    """A row on the device, and the store's row that it copies."""

    place: int
    """The slot on the device."""
    slot: int
    """The slot in the store."""
    round: int
    """The round of the row."""


class DeviceStore(ClientStore):
    """A store in host memory or files with a cache of its rows on a device.

    Reading a row copies it to the device unless it is cached. Staged rows are on the device, and each also has a staged
    slot in the store. They are copied back while the next kernels run, and ``commit`` waits for the copies. A crash
    therefore leaves the same store as without a device.

    The cache keeps the rows that were used last. It first evicts rows that a staged row replaces.

    Args:
        store: the store in host memory or files. Only this object may use it from now on.
        device: the device.
        cached_rows: the approximate number of rows that stay on the device between rounds. Default: as many as fit into
            4 GiB or a sixth of the device's memory, whichever is less.

    Rows of 1 MiB or more in host memory are pinned in chunks of 64 MiB, if the system allows it.

    Cost: device memory for the cached rows and those of a batch, in chunks of 16 MiB; two pinned staging areas.
    """

    def __init__(self, store: ClientStore, device: str, cached_rows: int | None = None) -> None:
        CommittedRows.__init__(self, store._session)
        form = self._content.form
        self._form = RowFormat(form.codec, form.n, device)
        self._ordinal = device_ordinal(device)
        spared = min(CACHE_BYTES, core.cuda_devices()[self._ordinal][2] // PART_OF_MEMORY)
        self._most_ahead = max(1, spared // form.payload)  # rows of a prefetch
        self._most = self._most_ahead if cached_rows is None else check_integer("cached_rows", cached_rows, 0)
        self._slots = DeviceSlots(form.payload, device)
        self._copies = core.CopyStream(self._ordinal, min(BUFFER_BYTES, form.payload))
        self._cache: OrderedDict[int, CachedRow] = OrderedDict()  # by number, the next rows to evict first
        self._staged: dict[int, int] = {}  # by number: the slot on the device
        self._sent: set[int] = set()  # staged rows whose copy back has started
        self._only_in_store: set[int] = set()  # staged rows that have left the device
        self._pins = self._folder is None and form.payload >= LEAST
        self._pinned: dict[int, core.PinnedArray] = {}  # chunks of the store's memory
        self._in_flight = False  # whether a copy back may still run
        self._unsafe: list[int] = []  # unused slots on the device that a copy may still read
        self._ahead: set[int] = set()  # prefetched rows that were not used yet
        self._in_use: frozenset[int] = frozenset()  # the rows of the present batch
        self._prefetching: threading.Thread | None = None
        self._missing: list[tuple[int, CachedRow]] = []  # rows that the thread copies
        self._copied: set[int] = set()  # the device slots of rows that the thread has copied

    def prefetch(self, clients: Iterable[ClientId]) -> None:
        """Start to copy the rows of the next cohort to the device while its clients train.

        Rows beyond 4 GiB, or a sixth of the device's memory, are copied when a batch needs them.

        Cost: a thread reads the rows and copies them through two pinned staging areas.
        """
        listed = list(clients)
        super().prefetch(listed)
        self._settle()
        numbers = self._numbers(listed)
        missing: list[tuple[int, CachedRow]] = []
        rows = self._content.rows
        wanted = list(zip(numbers.tolist(), rows.slots_of(numbers), strict=True))
        wanted = [(number, slot) for number, slot in wanted if slot][: max(self._most, self._most_ahead)]
        for number, slot in wanted:
            if self._is_cached(number, slot):
                self._cache.move_to_end(number)
        self._ahead = {number for number, _ in wanted}
        for number, slot in wanted:
            if number not in self._cache:
                self._make_room(len(missing) + 1, keep=())
                rows.slots.memory(slot)  # maps its chunk in this thread
                with suppress(DeviceMemoryError):  # the row is copied when it is needed
                    missing.append((number, CachedRow(self._slots.take(), slot, int(rows.round[number]))))
        if missing:
            self._missing, self._copied = missing, set()
            self._prefetching = threading.Thread(target=self._copy_missing, name="fedcore-prefetch", daemon=True)
            self._prefetching.start()

    def room_for_checksums(self, rows: int) -> npt.NDArray[np.uint64] | None:
        """Return None: checksums of rows from a device are computed after the rows are copied back."""
        return None

    def unstage(self, client: object) -> None:
        """See ``ClientStore.unstage``."""
        self._settle()
        self._drop([self._number(client)])
        super().unstage(client)

    def discard(self) -> None:
        """See ``ClientStore.discard``."""
        self._drop_staged()
        super().discard()

    def rollback(self) -> None:
        """See ``ClientStore.rollback``."""
        self._drop_staged()
        super().rollback()

    def commit(self, round: int, *content: Any, **documents: Any) -> None:
        """Wait until the staged rows are copied back, then commit. If a copy fails, nothing has changed."""
        self._settle()
        self._send_back(self._staged)
        self._wait()
        commits = self.commits
        try:
            super().commit(round, *content, **documents)
        finally:
            if self.commits != commits:
                with uninterrupted():
                    self._cache_staged()

    def undo(self) -> bool:
        """Undo the last transaction, and evict the undone rows; see ``ClientStore.undo``."""
        self._drop_staged()
        was_undone = super().undo()
        for number in list(self._cache):
            self._is_cached(number, self._content.rows.slot_of(number))
        return was_undone

    def compact(self, *, erase: bool = False) -> None:
        """Compact the store, and empty the cache; see ``ClientStore.compact``."""
        self._settle()
        self._unpin()
        super().compact(erase=erase)
        for number in list(self._cache):
            self._evict(number)

    def close(self) -> None:
        """Free the device's memory, and close the store."""
        self._drop_staged()
        with suppress(DeviceError):  # the device may have failed
            self._unpin()
        self._cache.clear()
        self._slots.close()
        super().close()

    def add_all(self, clients: Iterable[ClientId]) -> list[int]:
        """See ``ClientStore.add_all``."""
        self._settle()
        return super().add_all(clients)

    def forget(self, client: ClientId) -> None:
        """See ``ClientStore.forget``."""
        self._settle()
        super().forget(client)

    def _read_all(self, numbers: I64) -> list[Row | None]:
        self._settle()
        self._in_use = frozenset(numbers.tolist())
        self._make_room(0, keep=self._in_use)
        try:
            return self._read(numbers)
        except BaseException:
            self._in_use = frozenset()
            raise

    def _read(self, numbers: I64) -> list[Row | None]:
        self._settle()
        rows = self._content.rows
        rows.slots.require_whole()
        found = [self._row(number, slot) for number, slot in zip(numbers.tolist(), rows.slots_of(numbers), strict=True)]
        self._copies.join()
        return found

    def _row(self, number: int, slot: int) -> Row | None:
        if slot == 0:
            return None
        if not self._is_cached(number, slot):
            row = CachedRow(self._take(), slot, int(self._content.rows.round[number]))
            try:
                self._copy_to_device(number, row)
            except BaseException:
                self._slots.give([row.place])
                raise
            self._cache[number] = row
        self._cache.move_to_end(number)
        return self._form.rows(self._slots, [self._cache[number].place], writable=False)[0]

    def _stage(self, numbers: I64, round: int | None) -> list[Row]:
        self._settle()
        listed = numbers.tolist()
        # Rows of an earlier batch are complete, and are not written to again.
        self._send_back([number for number in self._staged if number not in listed])
        super()._stage(numbers, round)
        self._drop([number for number in listed if number in self._sent])
        fresh = [number for number in listed if number not in self._staged]
        self._make_room(len(fresh), keep=frozenset(listed))
        for number in fresh:
            self._staged[number] = self._take()
        self._ahead -= set(listed)
        for number in listed:
            if number in self._cache:  # the staged row will replace it
                self._cache.move_to_end(number, last=False)
        return self._form.rows(self._slots, [self._staged[number] for number in listed], writable=True)

    def _copy_missing(self) -> None:
        for number, row in self._missing:
            with suppress(Exception):  # reading the row raises it again
                self._copy_to_device(number, row)
                self._copied.add(row.place)

    def _copy_to_device(self, number: int, row: CachedRow) -> None:
        """Copy a row of the store to the device. ``CopyStream.join`` orders the copy before later kernels."""
        self._content.check(number)
        slots = self._content.rows.slots
        slots.use([row.slot])
        to: Any = self._slots.memory(row.place)
        self._copies.upload(slots.memory(row.slot), to, self._is_pinned(row.slot))

    def _is_pinned(self, slot: int) -> bool:
        """Pin a slot's memory; return whether it is pinned.

        Cost: a chunk, of 64 MiB or one slot, cannot be swapped and uses memory even if it is never written to.
        """
        if not self._pins:
            return False
        number, memory = self._content.rows.slots.chunk(slot)
        if number not in self._pinned:
            try:
                self._pinned[number] = core.PinnedArray(memory, self._ordinal)
            except DeviceError:
                self._pins = False
                return False
        return True

    def _unpin(self) -> None:
        self._copies.wait()
        self._pinned.clear()

    def _settle(self) -> None:
        """Wait for a prefetch, and add its rows to the cache."""
        if self._prefetching is None:
            return
        self._prefetching.join()
        self._prefetching = None  # after the join, so that after an interrupt the next call waits
        self._slots.give(row.place for _, row in self._missing if row.place not in self._copied)
        for number, row in self._missing:
            if row.place in self._copied:
                self._evict(number)
                self._cache[number] = row
        self._copies.join()

    def _is_cached(self, number: int, slot: int) -> bool:
        """Whether the row in this slot is cached. Evict an outdated copy."""
        row = self._cache.get(number)
        if row is None or (row.slot, row.round) == (slot, int(self._content.rows.round[number])):
            return row is not None
        self._evict(number)
        return False

    def _evict(self, number: int) -> None:
        if (row := self._cache.pop(number, None)) is not None:
            self._slots.give([row.place])

    def _take(self) -> int:
        """Return a free slot on the device. Evict rows that the batch does not need if memory runs out."""
        while True:
            try:
                return self._slots.take()
            except DeviceMemoryError:
                idle = next((number for number in self._cache if number not in self._in_use), None)
                if idle is None:
                    raise
                self._evict(idle)

    def _make_room(self, more: int, keep: Collection[int]) -> None:
        """Evict the least useful rows until ``more`` rows fit into the cache."""
        surplus = len(self._cache) + len(self._staged) + more - self._most
        if surplus <= 0:
            return
        kept = {*keep, *self._ahead}
        for number in [number for number in self._cache if number not in kept][:surplus]:
            self._evict(number)
            surplus -= 1
        sent = [number for number in self._staged if number in self._sent and number not in keep][: max(0, surplus)]
        if sent:
            self._wait()
            self._drop(sent)
            self._only_in_store.update(sent)

    def _send_back(self, numbers: Iterable[int]) -> None:
        rows = self._content.rows
        for number in list(numbers):
            slot = rows.staged.get(number)
            if slot is None:  # its client was removed
                self._drop([number])
            elif number not in self._sent:
                self._in_flight = True
                written: Any = self._slots.memory(self._staged[number])
                self._copies.download(written, rows.slots.memory(slot), self._is_pinned(slot))
                self._sent.add(number)

    def _drop(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number in self._staged:
                place = self._staged.pop(number)
                if self._in_flight and number in self._sent:  # a copy may still read it
                    self._unsafe.append(place)
                else:
                    self._slots.give([place])
            self._sent.discard(number)
            self._only_in_store.discard(number)

    def _wait(self) -> None:
        if self._in_flight:
            try:
                self._copies.wait()
            except BaseException:
                self._sent.clear()  # the next attempt copies them again
                raise
            self._in_flight = False
        unsafe, self._unsafe = self._unsafe, []  # cleared first, so that an interrupt frees no slot twice
        self._slots.give(unsafe)

    def _drop_staged(self) -> None:
        self._settle()
        with suppress(DeviceError):  # the device may have failed
            self._wait()
        self._in_flight = False
        places = [*self._staged.values(), *self._unsafe]
        self._staged, self._unsafe = {}, []
        self._clear_sets()
        self._slots.give(places)

    def _clear_sets(self) -> None:
        self._sent.clear()
        self._only_in_store.clear()
        self._ahead.clear()
        self._in_use = frozenset()

    def _cache_staged(self) -> None:
        """Move the committed rows to the cache."""
        rows = self._content.rows
        for number in self._only_in_store:
            self._evict(number)
        for number, place in list(self._staged.items()):
            self._evict(number)
            row = CachedRow(place, rows.slot_of(number), int(rows.round[number]))
            del self._staged[number]  # removed first, so that an interrupt leaves no slot with two owners
            self._cache[number] = row
        self._clear_sets()
        self._make_room(0, keep=())
