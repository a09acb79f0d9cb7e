"""Named vectors of the server, each in a slot of the file for its size."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from fedcore.errors import CorruptionError, DtypeError, StoreError
from fedcore.store.files.entries import StoredVector
from fedcore.store.slots import Slots

Vector = npt.NDArray[Any]
Place = tuple[int, int]
"""A payload, which decides the file, and a slot there."""
Table = dict[str, StoredVector]


class Vectors:
    """A table of vectors that changes as a whole: what changed goes to free slots, and the old ones are free later.

    A slot is not used again while a view of it is held.

    Args:
        slots: the slots for a payload.
        sealed: whether checksums are kept.

    Attributes:
        table: where each vector lies.
    """

    def __init__(self, slots: Callable[[int], Slots], *, sealed: bool) -> None:
        self.table: Table = {}
        self._slots = slots
        self._sealed = sealed
        self._trusted: set[Place] = set()
        self._views: WeakValueDictionary[Place, Vector] = WeakValueDictionary()  # what others' views are views of
        self._retired: list[tuple[int, Place]] = []
        self._payloads: set[int] = set()  # of which there were ever any

    def load(self, table: Table, kept: Table, retired: int | None) -> None:
        """Take over an index's table.

        Args:
            table: the table.
            kept: that of the commit before, whose places are used too.
            retired: None where nothing will be written; else the other slots are retired with this number.
        """
        self.table = table
        if retired is not None:
            for payload, slots in _by_payload(places(table) | places(kept)).items():
                self._slots(payload).occupy(np.array(slots, np.int64), retired)
                self._payloads.add(payload)
        self._trusted &= places(table)

    def get(self, name: str) -> Vector | None:
        """A read-only view, or None if there is none of that name."""
        entry = self.table.get(name)
        if entry is None:
            return None
        self._slots(entry.payload).require_whole()
        self._check(name, entry)
        place, memory = _place(entry), self._slots(entry.payload).memory(entry.slot)
        view = self._views.get(place)
        if view is None:
            view = np.frombuffer(memory.data, np.uint8)
            view.flags.writeable = False
            self._views[place] = view
        return view[: _size(entry)].view(entry.dtype).reshape(entry.shape)

    def propose(self, vectors: Mapping[str, Any]) -> tuple[Table, list[Place]]:
        """Write vectors to slots that are free, except views of those that are there already.

        Args:
            vectors: the whole table to be, arrays of numbers by name.

        Returns:
            the table, and the places that were taken for it.
        """
        known = {self._views[_place(entry)].ctypes.data: entry for entry in self.table.values() if self._is_out(entry)}
        table: Table = {}
        taken: list[Place] = []
        try:
            for name, value in vectors.items():
                vector = np.asarray(value)
                if vector.dtype.kind not in "biufc":
                    raise DtypeError(f"vectors[{name!r}]: expected an array of numbers, got {vector.dtype}")
                entry = known.get(vector.ctypes.data) if vector.flags.c_contiguous else None
                if entry is None or (vector.dtype.str, vector.shape) != (entry.dtype, entry.shape):
                    entry = self._write(vector, taken)
                table[name] = entry
        except BaseException:
            self.withdraw(taken)
            raise
        return table, taken

    def withdraw(self, taken: list[Place]) -> None:
        """Give back what ``propose`` took."""
        for payload, slots in _by_payload(taken).items():
            self._slots(payload).give(slots)

    def after(
        self,
        table: Table,
        taken: list[Place],
        retire: Callable[[Place], int | None],
        released: Sequence[tuple[int, Place]] = (),
    ) -> "After":
        """The vectors as ``accept`` makes them; nothing changes yet.

        Args:
            table, taken: from ``propose``.
            retire: the number with which a place that is no longer used is retired, or None if it is kept.
            released: numbers and places that were kept so far.
        """
        if table is self.table and not released:
            return After(table, self._trusted, self._retired)
        gone = places(self.table) - places(table)
        numbered = [(retire(place), place) for place in gone]
        retired = [*self._retired, *((number, place) for number, place in numbered if number is not None), *released]
        return After(table, (self._trusted | set(taken)) - gone, retired)

    def accept(self, after: "After") -> None:
        """Make the proposed table the table."""
        self.table, self._trusted, self._retired = after

    def reclaim(self, sequence: int) -> None:
        """Let places be used again that were retired with this number or before, and that have no view."""
        for payload in self._payloads:
            self._slots(payload).reclaim(sequence)  # what was free when the store was opened, of which there is no view
        free = [place for number, place in self._retired if number <= sequence and place not in self._views]
        if free:
            gone = set(free)
            # First, so that an error in between leaves a place unused, instead of giving it twice.
            self._retired = [item for item in self._retired if item[1] not in gone]
            self.withdraw(free)

    def lowered(self) -> tuple[Table, list[Place]]:
        """Copy the highest vectors to the lowest free slots; a damaged one stays.

        Returns:
            what ``propose`` returns.
        """
        moved: dict[Place, int] = {}
        try:
            for place, entry in sorted({_place(entry): entry for entry in self.table.values()}.items(), reverse=True):
                slots = self._slots(entry.payload)
                if slots.has_free_below(entry.slot) and (not self._sealed or not slots.damage(entry.slot, entry.seal)):
                    moved[place] = slots.copy(entry.slot)
        except BaseException:
            self.withdraw([(payload, slot) for (payload, _), slot in moved.items()])
            raise
        table = {name: replace(entry, slot=moved.get(_place(entry), entry.slot)) for name, entry in self.table.items()}
        return table, [(payload, slot) for (payload, _), slot in moved.items()]

    def require_whole(self) -> None:
        """``Slots.require_whole`` of the slots of each size."""
        for payload in self._payloads:
            self._slots(payload).require_whole()

    def shrink(self) -> None:
        """Give back the memory, or disk, behind the last vector of each size."""
        for payload in self._payloads:
            self._slots(payload).shrink()

    @property
    def bytes(self) -> int:
        """The bytes that all slots take."""
        return sum(slots.high * slots.stride for slots in map(self._slots, self._payloads))

    @property
    def waiting(self) -> int:
        """The number of slots that readers, or holders of a view, may still look at."""
        return len(self._retired) + sum(self._slots(payload).waiting for payload in self._payloads)

    def problems(self) -> list[str]:
        """The faults in the vectors, all of which are read."""
        self._trusted.clear()
        return _faults(self._check, self.table)

    def kept_problems(self, table: Table) -> list[str]:
        """The faults in the vectors of the commit before, all of which are read."""
        return _faults(lambda name, entry: self._require_whole(f"{name!r} before the last commit", entry), table)

    def _is_out(self, entry: StoredVector) -> bool:
        return _place(entry) in self._views

    def _check(self, name: str, entry: StoredVector) -> None:
        if not self._sealed or _place(entry) in self._trusted:
            return
        self._require_whole(repr(name), entry)
        self._trusted.add(_place(entry))

    def _require_whole(self, name: str, entry: StoredVector) -> None:
        slots = self._slots(entry.payload)
        damage = slots.damage(entry.slot, entry.seal)
        if damage is not None:
            raise CorruptionError(f"{slots.where}: the vector {name} is damaged: {damage}; use a copy of the store")

    def _write(self, vector: Vector, taken: list[Place]) -> StoredVector:
        payload = max(1, vector.nbytes)
        slots = self._slots(payload)
        slot = slots.take()
        taken.append((payload, slot))
        self._payloads.add(payload)
        entry = StoredVector(payload, slot, vector.dtype.str, vector.shape, 0)
        slots.memory(slot)[: vector.nbytes].view(vector.dtype).reshape(vector.shape)[...] = vector
        return replace(entry, seal=slots.seal(slot)) if self._sealed else entry


class After(NamedTuple):
    """The vectors once a proposed table counts: the table, the places that are trusted, and those retired."""

    table: Table
    trusted: set[Place]
    retired: list[tuple[int, Place]]


def _faults(check: Callable[[str, StoredVector], None], table: Table) -> list[str]:
    """The errors of a check of each vector in a table."""
    found = []
    for name, entry in table.items():
        try:
            check(name, entry)
        except StoreError as error:  # of the file, or of the vector
            found.append(str(error))
    return found


def _place(entry: StoredVector) -> Place:
    return entry.payload, entry.slot


def places(table: Table) -> set[Place]:
    """The places that a table uses."""
    return {_place(entry) for entry in table.values()}


def _by_payload(places: Iterable[Place]) -> dict[int, list[int]]:
    slots = defaultdict(list)
    for payload, slot in places:
        slots[payload].append(slot)
    return slots


def _size(entry: StoredVector) -> int:
    return np.dtype(entry.dtype).itemsize * math.prod(entry.shape)
