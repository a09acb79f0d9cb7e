"""The rows of a store in host memory or files, as a device sees them: brought there, kept while hot, sent back."""

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcore.arguments import whole
from fedcore.arrays import I64, device_ordinal
from fedcore.errors import DeviceError, DeviceMemoryError
from fedcore.interrupts import uninterrupted
from fedcore.native import core
from fedcore.store.client_store import ClientStore
from fedcore.store.reader import CommittedRows
from fedcore.store.registry import ClientId
from fedcore.store.slots import DeviceSlots, Row, RowFormat

LEAST = 1 << 20
"""Bytes of a slot from which on the device reads and writes the store's memory itself, pinned; shorter ones are soon
copied through a buffer."""

HOT_BYTES = 4 << 30
"""Bytes of rows that stay on a device between rounds, and come to it before one: what a GPU of 24 GB can spare."""

SPARED = 6
"""The part of a device's memory that these take at most: a sixth."""

BUFFER_BYTES = 64 << 20
"""Bytes of each of the two pinned buffers, where a row is not shorter."""


class Hot(NamedTuple):
    """A row on the device, and which of the store's it is a copy of."""

    place: int
    """Its slot on the device."""
    slot: int
    """The store's slot."""
    round: int
    """The row's."""


class DeviceRows(ClientStore):
    """A store with a cache of its rows on a device: the store itself holds every row too, in host memory or files.

    A row that is asked for is copied to the device unless it is *hot*: there from a prefetch or a round before. Rows
    that are staged lie on the device, and each has its staged slot in the store. They are copied back behind the
    kernels that wrote them, beside the kernels that come next, and ``commit`` waits for that before it commits. So a
    crash leaves the same as without a device.

    Of the hot rows those stay that were used last. The next rounds' cohorts have more use for a row that was just
    written than for its predecessor, which goes first.

    Args:
        store: in host memory or files; from now on it is used by this object only.
        device: the device.
        hot_rows: about how many rows stay on the device between rounds; None for as many as 4 GiB hold, or a sixth of
            the device's memory if that is less. What a round uses comes on top.

    Rows of 1 MiB and more in host memory are pinned, a chunk of 64 MiB at a time, where the system allows it.

    Raises:
        RangeError: ``hot_rows`` is no integer >= 0.
        DeviceError, DeviceMemoryError: the device cannot be used.

    Cost: the bytes of the hot rows and of a fold's on the device, in chunks of 16 MiB; two pinned buffers.
    """

    def __init__(self, store: ClientStore, device: str, hot_rows: int | None = None) -> None:
        CommittedRows.__init__(self, store._session)
        form = self._content.form
        self._form = RowFormat(form.codec, form.n, device)
        self._ordinal = device_ordinal(device)
        spared = min(HOT_BYTES, core.cuda_devices()[self._ordinal][2] // SPARED)
        self._early = max(1, spared // form.payload)  # rows that come before a round
        self._most = self._early if hot_rows is None else whole("hot_rows", hot_rows, 0)
        self._slots = DeviceSlots(form.payload, device)
        self._copies = core.CopyStream(self._ordinal, min(BUFFER_BYTES, form.payload))
        self._hot: OrderedDict[int, Hot] = OrderedDict()  # by number, those to go first in front
        self._new: dict[int, int] = {}  # staged, by number: the slot on the device
        self._sent: set[int] = set()  # staged, and on their way back, or there
        self._alone: set[int] = set()  # staged, in the store's slots alone
        self._pins = self._folder is None and form.payload >= LEAST
        self._pinned: dict[int, core.PinnedArray] = {}  # chunks of the store's memory
        self._in_flight = False  # whether a row may be on its way back
        self._doomed: list[int] = []  # slots on the device that a copy may still read
        self._coming: set[int] = set()  # prefetched, and not used yet
        self._asked: frozenset[int] = frozenset()  # by the fold at hand
        self._prefetching: threading.Thread | None = None
        self._cold: list[tuple[int, Hot]] = []  # rows that the thread brings
        self._brought: set[int] = set()  # and the slots of those that came

    @property
    def hot(self) -> int:
        """The number of rows that are on the device."""
        return len(self._hot)

    def prefetch(self, clients: Iterable[ClientId]) -> None:
        """Begin to bring the rows of the next cohort to the device while its clients train.

        As many come as 4 GiB hold, or a sixth of the device's memory; the others when their fold needs them.

        Raises:
            UnknownClientError: no such client is registered.

        Cost: a thread reads them and copies them, through two pinned buffers.
        """
        listed = list(clients)
        super().prefetch(listed)
        self._settle()
        numbers = self._numbers(listed)
        cold: list[tuple[int, Hot]] = []
        rows = self._content.rows
        asked = list(zip(numbers.tolist(), rows.slots_of(numbers), strict=True))
        asked = [(number, slot) for number, slot in asked if slot][: max(self._most, self._early)]
        for number, slot in asked:
            if self._is_hot(number, slot):
                self._hot.move_to_end(number)
        self._coming = {number for number, _ in asked}
        for number, slot in asked:
            if number not in self._hot:
                self._make_room(len(cold) + 1, keep=())
                rows.slots.memory(slot)  # opened here, and not by the thread
                with suppress(DeviceMemoryError):  # they come when they are needed, then
                    cold.append((number, Hot(self._slots.take(), slot, int(rows.round[number]))))
        if cold:
            self._cold, self._brought = cold, set()
            self._prefetching = threading.Thread(target=self._bring_all, name="fedcore-prefetch", daemon=True)
            self._prefetching.start()

    def room_for_checksums(self, rows: int) -> npt.NDArray[np.uint64] | None:
        """None: the checksums of rows that a device makes are taken when they are back."""
        return None

    def unstage(self, client: object) -> None:
        """Forget the client's staged row, if there is one."""
        self._settle()
        self._drop([self._number(client)])
        super().unstage(client)

    def discard(self) -> None:
        """Forget every staged row."""
        self._settle()
        self._forget_new()
        super().discard()

    def rollback(self) -> None:
        """Forget all that came since the last commit: staged rows, clients that arrived, and departures."""
        self._settle()
        self._forget_new()
        super().rollback()

    def commit(
        self,
        round: int,
        vectors: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
        *,
        document: str | None = None,
    ) -> None:
        """``ClientStore.commit``, once the staged rows are back from the device.

        Raises:
            DeviceError: they did not come back; nothing has changed.
        """
        self._settle()
        self._send_back(self._new)
        self._wait()
        commits = self.commits
        try:
            super().commit(round, vectors, state, document=document)
        finally:
            if self.commits != commits:
                with uninterrupted():
                    self._keep_hot()

    def undo(self) -> bool:
        """See ``ClientStore.undo``; a row that was taken back leaves the device."""
        self._settle()
        self._forget_new()
        was_undone = super().undo()
        for number in list(self._hot):
            self._is_hot(number, self._content.rows.slot_of(number))
        return was_undone

    def compact(self) -> None:
        """See ``ClientStore.compact``; what is hot is asked for anew."""
        self._settle()
        self._unpin()
        super().compact()
        for number in list(self._hot):
            self._cool(number)

    def close(self) -> None:
        """Let the device's memory go, and close the store."""
        self._settle()
        self._forget_new()
        with suppress(DeviceError):  # which has lost them, then
            self._unpin()
        self._hot.clear()
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
        self._asked = frozenset(numbers.tolist())
        self._make_room(0, keep=self._asked)
        try:
            return self._read(numbers)
        except BaseException:
            self._asked = frozenset()
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
        if not self._is_hot(number, slot):
            hot = Hot(self._take(), slot, int(self._content.rows.round[number]))
            try:
                self._bring(number, hot)
            except BaseException:
                self._slots.give([hot.place])
                raise
            self._hot[number] = hot
        self._hot.move_to_end(number)
        return self._form.rows(self._slots, [self._hot[number].place], writable=False)[0]

    def _stage(self, numbers: I64, round: int | None) -> list[Row]:
        self._settle()
        listed = numbers.tolist()
        # Those of an earlier fold have been let in by now, and are not written to again.
        self._send_back([number for number in self._new if number not in listed])
        super()._stage(numbers, round)
        self._drop([number for number in listed if number in self._sent])
        fresh = [number for number in listed if number not in self._new]
        self._make_room(len(fresh), keep=frozenset(listed))
        for number in fresh:
            self._new[number] = self._take()
        self._coming -= set(listed)
        for number in listed:
            if number in self._hot:  # its predecessor will be of no use
                self._hot.move_to_end(number, last=False)
        return self._form.rows(self._slots, [self._new[number] for number in listed], writable=True)

    def _bring_all(self) -> None:
        for number, hot in self._cold:
            with suppress(Exception):  # which comes again when the row is read
                self._bring(number, hot)
                self._brought.add(hot.place)

    def _bring(self, number: int, hot: Hot) -> None:
        """Copy a row of the store to the device, in any order with the kernels; ``join`` orders it before them."""
        self._content.check(number)
        slots = self._content.rows.slots
        slots.use([hot.slot])
        to: Any = self._slots.memory(hot.place)
        self._copies.upload(slots.memory(hot.slot), to, self._is_pinned(hot.slot))

    def _is_pinned(self, slot: int) -> bool:
        """Return whether a slot's memory is pinned from now on: not where the system does not allow so much.

        Cost: a chunk, of 64 MiB or one slot, cannot be swapped, and takes memory whether it is written to or not.
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
        """Wait for copies that the device makes by itself, and let the store's memory be as it was."""
        self._copies.wait()
        self._pinned.clear()

    def _settle(self) -> None:
        """Wait for the thread that prefetches; the rows that it has brought are hot."""
        if self._prefetching is None:
            return
        self._prefetching.join()
        self._prefetching = None  # not before: after an interrupt the next call waits
        self._slots.give(hot.place for _, hot in self._cold if hot.place not in self._brought)
        for number, hot in self._cold:
            if hot.place in self._brought:
                self._cool(number)
                self._hot[number] = hot
        self._copies.join()

    def _is_hot(self, number: int, slot: int) -> bool:
        """Return whether the row in the store's slot is on the device; a copy of another row is let go."""
        hot = self._hot.get(number)
        if hot is None or (hot.slot, hot.round) == (slot, int(self._content.rows.round[number])):
            return hot is not None
        self._cool(number)
        return False

    def _cool(self, number: int) -> None:
        if (hot := self._hot.pop(number, None)) is not None:
            self._slots.give([hot.place])

    def _take(self) -> int:
        """A slot on the device; without memory for one more, hot rows go that no fold needs."""
        while True:
            try:
                return self._slots.take()
            except DeviceMemoryError:
                idle = next((number for number in self._hot if number not in self._asked), None)
                if idle is None:
                    raise
                self._cool(idle)

    def _make_room(self, more: int, keep: Collection[int]) -> None:
        """Let rows go until so many more are within the bound, first those that are least likely to be used again."""
        surplus = len(self._hot) + len(self._new) + more - self._most
        if surplus <= 0:
            return
        kept = {*keep, *self._coming}
        for number in [number for number in self._hot if number not in kept][:surplus]:
            self._cool(number)
            surplus -= 1
        sent = [number for number in self._new if number in self._sent and number not in keep][: max(0, surplus)]
        if sent:
            self._wait()
            self._drop(sent)
            self._alone.update(sent)

    def _send_back(self, numbers: Iterable[int]) -> None:
        """Begin to copy rows that were staged to their slots in the store."""
        rows = self._content.rows
        for number in list(numbers):
            slot = rows.staged.get(number)
            if slot is None:  # its client has departed
                self._drop([number])
            elif number not in self._sent:
                self._in_flight = True
                written: Any = self._slots.memory(self._new[number])
                self._copies.download(written, rows.slots.memory(slot), self._is_pinned(slot))
                self._sent.add(number)

    def _drop(self, numbers: Iterable[int]) -> None:
        """Let the device's copies of staged rows go."""
        for number in numbers:
            if number in self._new:
                place = self._new.pop(number)
                if self._in_flight and number in self._sent:  # a copy may still read it
                    self._doomed.append(place)
                else:
                    self._slots.give([place])
            self._sent.discard(number)
            self._alone.discard(number)

    def _wait(self) -> None:
        """Wait until every row that is on its way back has come."""
        if self._in_flight:
            try:
                self._copies.wait()
            except BaseException:
                self._sent.clear()  # they are sent again at the next try
                raise
            self._in_flight = False
        doomed, self._doomed = self._doomed, []  # first: a place that is given twice would be of two rows
        self._slots.give(doomed)

    def _forget_new(self) -> None:
        with suppress(DeviceError):  # which has lost them, then
            self._wait()
        self._in_flight = False
        places = [*self._new.values(), *self._doomed]
        self._new, self._doomed = {}, []
        self._sent.clear()
        self._alone.clear()
        self._coming.clear()
        self._asked = frozenset()
        self._slots.give(places)

    def _keep_hot(self) -> None:
        """The staged rows are the clients' rows now, and hot."""
        rows = self._content.rows
        for number in self._alone:
            self._cool(number)
        for number, place in list(self._new.items()):
            self._cool(number)
            hot = Hot(place, rows.slot_of(number), int(rows.round[number]))
            del self._new[number]  # first: a place that both knew would be of two rows
            self._hot[number] = hot
        self._sent.clear()
        self._alone.clear()
        self._coming.clear()
        self._asked = frozenset()
        self._make_room(0, keep=())
