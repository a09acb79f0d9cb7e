"""The rows of a store in host memory or files, as a device sees them: brought there, kept while hot, sent back."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcore import devices
from fedcore.arguments import whole
from fedcore.clients.registry import ClientId
from fedcore.errors import DeviceError, DeviceMemoryError
from fedcore.interrupts import uninterrupted
from fedcore.native import core
from fedcore.store.client_store import ClientStore
from fedcore.store.device_slots import DeviceSlots
from fedcore.store.pinning import Pinning
from fedcore.store.prefetching import Prefetching
from fedcore.store.row_format import Row, RowFormat

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
    """A face of a store whose rows lie on a device: the store itself holds every row too, in host memory or files.

    A row that is asked for is copied to the device unless it is *hot*: there from a prefetch or a round before. Rows
    that are staged lie on the device, and each has its staged slot in the store. They are copied back behind the
    kernels that wrote them, beside the kernels that come next, and ``commit`` waits for that before it commits: what
    it says of a store, and what a crash leaves, is the same as without a device.

    Of the hot rows those stay that were used last. The next rounds' cohorts have more use for a row that was just
    written than for its predecessor, which goes first.

    Args:
        store: in host memory or files; it is used by this face alone from now on.
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
        self.durability = store.durability
        self._content, self._folder, self._session = store._content, store._folder, store._session
        self._commits, self._residency = store._commits, store._residency
        here = store._content.form
        self._form = RowFormat(here.codec, here.n, device)
        spared = min(HOT_BYTES, core.cuda_devices()[devices.ordinal(device)][2] // SPARED)
        self._early = max(1, spared // here.payload)  # rows that come before a round
        self._most = self._early if hot_rows is None else whole("hot_rows", hot_rows, 0)
        self._ordinal = devices.ordinal(device)
        self._slots = DeviceSlots(here.payload, device)
        self._copies = core.CopyStream(self._ordinal, min(BUFFER_BYTES, here.payload))
        self._hot: OrderedDict[int, Hot] = OrderedDict()  # by number, those to go first in front
        self._new: dict[int, int] = {}  # staged, by number: the slot on the device
        self._sent: set[int] = set()  # staged, and on their way back, or there
        self._alone: set[int] = set()  # staged, in the store's slots alone
        self._pinning = Pinning(store._content.rows.slots, self._ordinal) if self._folder is None else None
        self._in_flight = False  # whether a row may be on its way back
        self._doomed: list[int] = []  # slots on the device that a copy may still read
        self._coming: set[int] = set()  # prefetched, and not used yet
        self._asked: frozenset[int] = frozenset()  # by the fold at hand
        self._prefetching: Prefetching[Hot] | None = None

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
            self._prefetching = Prefetching(cold, self._bring)

    def rows_of(self, clients: Sequence[ClientId]) -> list[Row | None]:
        """``row`` of many clients, in their order; errors are those of row, and DeviceMemoryError."""
        self._settle()
        self._asked = frozenset(self._numbers(clients).tolist())
        self._make_room(0, keep=self._asked)
        try:
            rows = super().rows_of(clients)
        except BaseException:
            self._asked = frozenset()
            raise
        self._copies.join()
        return rows

    def row(self, client: object) -> Row | None:
        """The client's row on the device, float32[n] or Codes of ``DeviceArray``s, or None if it was never written.

        Raises:
            UnknownClientError: no such client is registered.
            CorruptionError: the row is not what was written.
            DeviceMemoryError: the device has no memory for it.
        """
        self._settle()
        row = super().row(client)
        self._copies.join()
        return row

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
        memory: Any = self._slots.memory(self._hot[number].place)
        memory.writeable = False
        return self._form.row(memory)

    def _stage(self, numbers: Sequence[int], round: int | None) -> list[Row]:
        self._settle()
        # Those of an earlier fold have been let in by now, and nobody writes to them again.
        self._send_back([number for number in self._new if number not in numbers])
        super()._stage(numbers, round)
        self._drop([number for number in numbers if number in self._sent])
        fresh = [number for number in numbers if number not in self._new]
        self._make_room(len(fresh), keep=frozenset(numbers))
        for number in fresh:
            self._new[number] = self._take()
        self._coming -= set(numbers)
        for number in numbers:
            if number in self._hot:  # its predecessor will be of no use
                self._hot.move_to_end(number, last=False)
        return [self._form.row(self._slots.memory(self._new[number])) for number in numbers]

    def _bring(self, number: int, hot: Hot) -> None:
        """Copy a row of the store to the device, in whatever order with the kernels; it is joined by who needs it."""
        if self._residency is not None:
            self._content.check(number)
            self._residency.use(hot.slot)
        to: Any = self._slots.memory(hot.place)
        self._copies.upload(self._content.rows.slots.memory(hot.slot), to, self._is_pinned(hot.slot))

    def _is_pinned(self, slot: int) -> bool:
        return self._pinning is not None and self._pinning.holds(slot)

    def _unpin(self) -> None:
        """Wait for copies that the device makes by itself, and let the store's memory be as it was."""
        self._copies.wait()
        if self._pinning is not None:
            self._pinning.end()

    def _settle(self) -> None:
        """Wait for the thread that prefetches; what it has brought is hot."""
        if self._prefetching is None:
            return
        brought, missed = self._prefetching.end()
        self._prefetching = None  # not before: whoever is interrupted waits for it the next time
        self._slots.give(hot.place for _, hot in missed)
        for number, hot in brought:
            self._cool(number)
            self._hot[number] = hot
        self._copies.join()

    def _is_hot(self, number: int, slot: int) -> bool:
        """Tell whether the row in the store's slot is on the device; a copy of another row is let go."""
        hot = self._hot.get(number)
        if hot is None or (hot.slot, hot.round) == (slot, int(self._content.rows.round[number])):
            return hot is not None
        self._cool(number)
        return False

    def _cool(self, number: int) -> None:
        if (hot := self._hot.pop(number, None)) is not None:
            self._slots.give([hot.place])

    def _take(self) -> int:
        """A slot on the device; where there is no memory for one more, hot rows go for it that nobody has asked for.

        Raises:
            DeviceMemoryError: there are none.
        """
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
        for number in numbers:
            if number not in self._sent:
                self._in_flight = True
                written: Any = self._slots.memory(self._new[number])
                slot = rows.staged[number]
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
                self._sent.clear()  # they are sent again, if anybody tries
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
