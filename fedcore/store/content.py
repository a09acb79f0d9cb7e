"""The content of a store: rows, vectors, clients, and the last round and state."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from fedcore.arrays import CPU, I64, copy_into, own_classes
from fedcore.errors import CorruptionError, DtypeError, StoreError
from fedcore.store.files.entries import (
    Entries,
    Listed,
    Previous,
    StoredVector,
    Transaction,
    restored,
    row_entries,
    used_slots,
)
from fedcore.store.files.folder import Folder, replacing
from fedcore.store.registry import Registry
from fedcore.store.slots import DeviceSlots, RowFormat, Slots, Sums

_MOST_CUT = 1 << 44
"""Bytes that may be missing from a file of rows. Within this limit each missing row is reported when it is read."""

ROW_TABLE = 25
"""The bytes of memory of each number of a client in ``Rows``."""

Vector = npt.NDArray[Any]
Place = tuple[int, int]
"""The payload size of a vector, which determines its file, and its slot there."""
Table = dict[str, StoredVector]


class Rows:
    """Rows by client number, in arrays that grow with the highest number of a row.

    Attributes:
        slot: int64, the slot of a client's row, or 0.
        round: int64, the round of the row.
        seal: uint64, the checksum of the slot.
        trusted: bool, whether the slot was checked or written since the store was opened.
        staged: the slots that become rows with the next commit, by number.
        dated: the rounds of staged rows that differ from the commit's, by number.
        sums: the known checksums of staged rows' blocks: uint64[blocks], by number.
        written: the number of clients with a row.

    Cost: 25 bytes for each number up to the highest one used.
    """

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.slot, self.round, self.seal, self.trusted = _zeros(0)
        self.staged: dict[int, int] = {}
        self.dated: dict[int, int] = {}
        self.sums: dict[int, Sums] = {}
        self.written = 0

    def slot_of(self, number: int) -> int:
        """Return the slot of the client's row, or 0."""
        return int(self.slot[number]) if number < len(self.slot) else 0

    def slots_of(self, numbers: I64) -> list[int]:
        """Return the slots of several clients' rows, in the order of the numbers."""
        try:
            slots: list[int] = self.slot[numbers].tolist()
        except IndexError:  # some numbers are beyond the arrays
            slots = list(map(self.slot_of, numbers.tolist()))
        return slots

    def make_room(self, number: int, capacity: int) -> None:
        """Make room for a number and, if memory allows, for all numbers below ``capacity``."""
        if number < len(self.slot):
            return
        try:
            self.grow(capacity)
        except MemoryError:
            try:
                self.grow(number + 1)
            except MemoryError:
                raise StoreError(
                    f"clients: not enough memory for client number {number}: the table needs "
                    f"{ROW_TABLE * (number + 1):,} bytes, {ROW_TABLE} for each number up to it; register clients by "
                    "their ids when they arrive"
                ) from None

    def grow(self, capacity: int) -> None:
        """Make room for the numbers below ``capacity``."""
        if capacity > len(self.slot):
            more = max(capacity, len(self.slot) * 5 // 4)
            if 8 * more >= 2**63:
                raise MemoryError(f"{more} numbers")
            before, after = (self.slot, self.round, self.seal, self.trusted), _zeros(more)
            for old, new in zip(before, after, strict=True):
                new[: len(old)] = old
            self.slot, self.round, self.seal, self.trusted = after

    def load(self, rows: Entries) -> None:
        """Replace all rows by the entries of an index. Unchanged slots stay trusted."""
        slot, seal, trusted, known = self.slot, self.seal, self.trusted, len(self.slot)
        self.slot, self.round, self.seal, self.trusted = _zeros(0)
        self.grow(max(known, int(rows["number"].max(initial=-1)) + 1))
        self._set(rows)
        self.trusted[:known] = trusted & (self.slot[:known] == slot) & (self.seal[:known] == seal)
        self.written = len(rows)

    def stage(self, numbers: Sequence[int], round: int | None = None) -> list[int]:
        """Return slots of undefined content that become these clients' rows with the next commit.

        The arrays must have room for the numbers. An error may leave some rows staged. Known checksums of these rows
        are discarded.
        """
        staged, dated, sums = self.staged, self.dated, self.sums
        for number in numbers:
            if dated or sums:
                dated.pop(number, None)
                sums.pop(number, None)
            if round is not None:
                dated[number] = round
            if number not in staged:
                staged[number] = self.slots.take()
        return [staged[number] for number in numbers]

    def proposed(self, round: int, *, sealed: bool) -> Entries:
        """Return the staged rows as entries of this round, or of their own. Write their checksums if ``sealed``."""
        staged = self.staged
        rounds = [self.dated.get(number, round) for number in staged] if self.dated else round
        seals = [self.slots.seal(slot, self.sums.get(number)) for number, slot in staged.items()] if sealed else 0
        return row_entries(list(staged), list(staged.values()), rounds, seals)

    def unstage(self, number: int) -> None:
        """Discard the client's staged row, if it exists."""
        self.slots.give(filter(None, self._pop_staged([number])))

    def discard(self) -> None:
        """Discard every staged row. A second call after an interrupt frees no slot twice."""
        staged, self.staged, self.dated, self.sums = self.staged, {}, {}, {}
        if staged:
            self.slots.give(staged.values())

    def accept(self, entries: Entries, written: int, *, trusted: bool = True) -> None:
        """Make these entries the clients' rows. A second call has no further effect."""
        self._set(entries)
        self.trusted[entries["number"]] = trusted
        self.written = written
        self._pop_staged(entries["number"].tolist())

    def drop(self, number: int) -> None:
        """Remove the client's row, if it has one."""
        self.unstage(number)
        if self.slot_of(number):
            self.slot[number] = 0
            self.written -= 1

    def put_back(self, number: int, slot: int) -> None:
        """Undo a ``drop`` of the row in this slot. A second call has no further effect."""
        if slot and not self.slot[number]:
            self.slot[number] = slot
            self.written += 1

    def entries(self, numbers: I64) -> Entries:
        """Return the entries of these clients; clients without a row have slot 0."""
        return row_entries(numbers, self.slot[numbers], self.round[numbers], self.seal[numbers])

    def _set(self, entries: Entries) -> None:
        numbers = entries["number"]
        self.slot[numbers], self.round[numbers], self.seal[numbers] = entries["slot"], entries["round"], entries["seal"]

    def _pop_staged(self, numbers: Iterable[int]) -> list[int | None]:
        """Remove the clients' staged rows, and return their slots."""
        if self.dated or self.sums:
            for number in numbers:
                self.dated.pop(number, None)
                self.sums.pop(number, None)
        return [self.staged.pop(number, None) for number in numbers]


def _zeros(count: int) -> tuple[I64, I64, npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
    """Return arrays of zeros. Pages that are never written to use no memory."""
    return np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.uint64), np.zeros(count, np.bool_)


class After(NamedTuple):
    """The vectors after a change: the table, the trusted slots and the retired slots."""

    table: Table
    trusted: set[Place]
    retired: list[tuple[int, Place]]


class Vectors:
    """A table of named vectors that is replaced as a whole. New vectors get free slots; old slots are freed later.

    A slot is not reused while a view of it exists. ``sealed`` tables have checksums.
    """

    def __init__(self, slots: Callable[[int], Slots], *, sealed: bool) -> None:
        self.table: Table = {}
        self._slots = slots
        self._sealed = sealed
        self._trusted: set[Place] = set()
        self._views: WeakValueDictionary[Place, Vector] = WeakValueDictionary()  # the bases of callers' views
        self._retired: list[tuple[int, Place]] = []
        self._payloads: set[int] = set()  # of all vectors so far

    def load(self, table: Table, kept: Table, retired: int | None) -> None:
        """Replace the table by that of an index.

        The slots of the previous commit's table ``kept`` stay in use. All others are retired with the transaction
        number ``retired``, which is None for readers.
        """
        self.table = table
        if retired is not None:
            for payload, slots in _by_payload(places(table) | places(kept)).items():
                self._slots(payload).occupy(np.array(slots, np.int64), retired)
                self._payloads.add(payload)
        self._trusted &= places(table)

    def get(self, name: str) -> Vector | None:
        """Return a read-only view of the vector, or None if it does not exist."""
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
        size = np.dtype(entry.dtype).itemsize * math.prod(entry.shape)
        return view[:size].view(entry.dtype).reshape(entry.shape)

    def propose(self, vectors: Mapping[str, Any]) -> tuple[Table, list[Place]]:
        """Write vectors to free slots, except views of present ones. Return the new table and the taken slots."""
        present = [(self._views.get(_place(entry)), entry) for entry in self.table.values()]
        known = {view.ctypes.data: entry for view, entry in present if view is not None}
        table: Table = {}
        taken: list[Place] = []
        try:
            for name, value in vectors.items():
                value = own_classes(f"vectors[{name!r}]", value)
                try:
                    vector = np.asarray(value)
                except (BufferError, RuntimeError, TypeError, ValueError) as error:  # NumPy cannot read the tensor
                    raise DtypeError(f"vectors[{name!r}]: {error}") from None
                if vector.dtype.kind not in "biufc":
                    raise DtypeError(f"vectors[{name!r}]: must be an array of numbers, not {vector.dtype}")
                entry = known.get(vector.ctypes.data) if vector.flags.c_contiguous else None
                if entry is None or (vector.dtype.str, vector.shape) != (entry.dtype, entry.shape):
                    entry = self._write(vector, taken)
                table[name] = entry
        except BaseException:
            self.withdraw(taken)
            raise
        return table, taken

    def withdraw(self, taken: Iterable[Place]) -> None:
        """Free the slots that ``propose`` took."""
        for payload, slots in _by_payload(taken).items():
            self._slots(payload).give(slots)

    def after(self, table: Table, taken: Iterable[Place] = (), retired: Sequence[tuple[int, Place]] = ()) -> After:
        """Return the vectors after a change, for ``accept``.

        ``retired`` lists slots that are then unused, with the number of the change's transaction.
        """
        if table is self.table and not retired:
            return After(table, self._trusted, self._retired)
        unused = places(self.table) - places(table)
        return After(table, (self._trusted | set(taken)) - unused, [*self._retired, *retired])

    def accept(self, after: After) -> None:
        """Apply the result of ``after``."""
        self.table, self._trusted, self._retired = after

    def reclaim(self, sequence: int) -> None:
        """Free the slots that were retired up to this transaction number and have no view."""
        for payload in self._payloads:
            self._slots(payload).reclaim(sequence)  # slots that were free when the store was opened have no view
        free = {place for number, place in self._retired if number <= sequence and place not in self._views}
        if free:
            # Removed from the list first: an interrupt then leaves a slot unused instead of freeing it twice.
            self._retired = [item for item in self._retired if item[1] not in free]
            self.withdraw(free)

    def lowered(self) -> tuple[Table, list[Place]]:
        """Copy the highest vectors to the lowest free slots, except damaged ones. Return like ``propose``."""
        moved: dict[Place, int] = {}
        try:
            for place, entry in sorted({_place(entry): entry for entry in self.table.values()}.items(), reverse=True):
                slots = self._slots(entry.payload)
                if slots.has_free_below(entry.slot) and (not self._sealed or not slots.damage(entry.slot, entry.seal)):
                    moved[place] = slots.copy(entry.slot)
        except BaseException:
            self.withdraw((payload, slot) for (payload, _), slot in moved.items())
            raise
        table = {name: replace(entry, slot=moved.get(_place(entry), entry.slot)) for name, entry in self.table.items()}
        return table, [(payload, slot) for (payload, _), slot in moved.items()]

    @property
    def all_slots(self) -> list[Slots]:
        """The slots of each size."""
        return list(map(self._slots, self._payloads))

    @property
    def retired(self) -> int:
        """The number of unused slots that readers, or views, may still use."""
        return len(self._retired)

    def problems(self, previous: Table) -> list[str]:
        """Return the faults in all vectors and in those of the previous commit. Reads all of them."""
        self._trusted.clear()
        checks = [(self._check, name, entry) for name, entry in self.table.items()]
        checks += [(self._require_whole, f"{n!r} of the previous commit", entry) for n, entry in previous.items()]
        found = []
        for check, name, entry in checks:
            try:
                check(name, entry)
            except StoreError as error:  # the file or the vector is damaged
                found.append(str(error))
        return found

    def _check(self, name: str, entry: StoredVector) -> None:
        if self._sealed and _place(entry) not in self._trusted:
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
        copy_into(slots.memory(slot)[: vector.nbytes].view(vector.dtype).reshape(vector.shape), vector)
        return replace(entry, seal=slots.seal(slot)) if self._sealed else entry


def _place(entry: StoredVector) -> Place:
    return entry.payload, entry.slot


def places(table: Table) -> set[Place]:
    """Return the slots that a table uses."""
    return {_place(entry) for entry in table.values()}


def _by_payload(places: Iterable[Place]) -> dict[int, list[int]]:
    slots = defaultdict(list)
    for payload, slot in places:
        slots[payload].append(slot)
    return slots


class _InMemory(dict[int, Slots]):
    """Slots by payload size, created on first use."""

    def of(self, payload: int) -> Slots:
        """Return the slots. A deep copy of this method has its own; one of ``__getitem__`` would share them."""
        return self.get(payload) or self.setdefault(payload, Slots(payload))


class Content:
    """The committed content of a store, and its staged rows: in a folder, or in the memory of ``form.device``."""

    def __init__(self, form: RowFormat, registry: Registry, folder: Folder | None) -> None:
        self.form, self.registry, self.folder = form, registry, folder
        self.round: int | None = None
        self.state: str | None = None
        self.documents: list[tuple[int, str]] = []  # of a store in memory
        in_memory = Slots(form.payload) if form.device == CPU else DeviceSlots(form.payload, form.device)
        self.rows = Rows(in_memory if folder is None else folder.rows)
        self.vectors = Vectors(_InMemory().of if folder is None else folder.vectors, sealed=folder is not None)

    @classmethod
    def read(cls, folder: Folder) -> "Content":
        """Return the content of a folder."""
        content = cls(folder.format, Registry(), folder)
        content.refresh(folder)
        return content

    def refresh(self, folder: Folder) -> None:
        """Read the folder again, and discard staged rows."""
        with plausible(folder):
            rows, listed = folder.load()
            self.registry = _registry(folder, listed)
            self._load(folder, rows)

    @property
    def previous(self) -> Previous | None:
        """The previous commit, if it is kept."""
        return None if self.folder is None else self.folder.previous

    @property
    def all_slots(self) -> list[Slots]:
        """The slots of rows, and of vectors of each size."""
        return [self.rows.slots, *self.vectors.all_slots]

    def check(self, number: int) -> None:
        """Check a row against its checksum, unless it is trusted."""
        if self.folder is None or self.rows.trusted[number]:
            return
        problem = self.problem(number)
        if problem is not None:
            raise CorruptionError(f"{problem}; remove the client, or use a copy of the store")
        self.rows.trusted[number] = True

    def problem(self, number: int) -> str | None:
        """Return the fault in a row, or None. Reads the row."""
        if self.folder is None:
            return None
        slot, seal = self.rows.slot_of(number), int(self.rows.seal[number])
        return self._problem(f"the row of client {self.registry.id_of(number)!r}", slot, seal)

    def _problem(self, name: str, slot: int, seal: int) -> str | None:
        slots = self.rows.slots
        damage = slots.damage(slot, seal)
        return None if damage is None else f"{slots.where}: {name} (slot {slot}) is damaged: {damage}"

    def problems(self, *, with_previous: bool) -> list[str]:
        """Return the faults in the content and, if asked, in the previous commit. Reads all of it."""
        if self.folder is None:
            return []
        previous = self.previous if with_previous else None
        found: list[str | None] = [*self.folder.problems()]
        for number in np.flatnonzero(self.rows.slot).tolist():
            found.append(self.problem(number))
            self.rows.trusted[number] = found[-1] is None
            self.rows.slots.let_go([int(self.rows.slot[number])])
        kept = () if previous is None else previous.rows[previous.rows["slot"] > 0].tolist()
        for number, slot, _, seal in kept:
            found.append(self._problem(f"the row of number {number} of the previous commit", slot, seal))
            self.rows.slots.let_go([slot])
        vectors = self.vectors.problems({} if previous is None else previous.head.vectors)
        return [*filter(None, found), *vectors]

    def problems_since(self, previous: Previous) -> list[str]:
        """Return the faults in the vectors, and in the rows that were changed since an earlier commit."""
        rows = self.rows
        numbers = [number for number in previous.rows["number"].tolist() if rows.slot_of(number)]
        return [*filter(None, map(self.problem, numbers)), *self.vectors.problems({})]

    def copy_to(self, other: "Content", vectors: Mapping[str, Any] | None = None) -> Entries:
        """Copy the rows and ``vectors`` (default: the present ones) to an empty content. Return its row entries."""
        numbers = np.flatnonzero(self.rows.slot)
        source, target = self.rows.slots, other.rows.slots
        seals = np.zeros(len(numbers), np.uint64)
        other.rows.grow(int(numbers.max(initial=-1)) + 1)
        for place, number in enumerate(numbers.tolist()):
            self.check(number)
            slot, copy = int(self.rows.slot[number]), other.rows.stage([number])[0]
            copy_into(target.memory(copy), source.memory(slot))
            if other.folder is not None:
                seals[place] = target.seal(copy)
                if self.folder is not None and seals[place] != self.rows.seal[number]:
                    self.rows.trusted[number] = False  # the row has changed since it was checked
                    self.check(number)
            source.let_go([slot])
            target.let_go([copy])
        if vectors is None:
            vectors = {name: self.vectors.get(name) for name in self.vectors.table}
        other.round, other.state = self.round, self.state
        entries = row_entries(numbers, list(other.rows.staged.values()), self.rows.round[numbers], seals)
        return other.adopt(entries, vectors)

    def adopt(self, entries: Entries, vectors: Mapping[str, Any]) -> Entries:
        """Make staged rows and vectors the content of this empty store; return the rows' entries."""
        self.rows.accept(entries, len(entries))
        self.vectors.accept(self.vectors.after(*self.vectors.propose(vectors)))
        return entries

    def save(
        self,
        path: Path,
        vectors: Mapping[str, Any] | None,
        state: str | None,
        documents: Sequence[tuple[int, str]],
        parts: Callable[[Path], object],
    ) -> None:
        """Write a copy to a folder, without free slots. Vectors and state are replaced unless they are None."""
        if self.folder is not None and path.resolve() == self.folder.path.resolve():
            raise StoreError(f"{path}: is the store's own folder; save to a different folder")
        with replacing(path, self.form, self.registry, existing=True) as folder:
            copy = Content(folder.format, self.registry, folder)
            entries = self.copy_to(copy, vectors)
            state = self.state if state is None else state
            head = replace(folder.head, round=self.round, state=state, vectors=copy.vectors.table, copy=True)
            folder.publish(Transaction(head, entries, documents=documents))
            parts(folder.path)

    def _load(self, folder: Folder, rows: Entries) -> None:
        head, previous = folder.head, folder.previous
        used = rows["slot"] if previous is None else np.concatenate([rows["slot"], used_slots(previous.rows)])
        if (last := int(rows["number"].max(initial=-1))) >= self.registry.capacity:
            raise ValueError(f"rows: number {last} belongs to no client")
        if (used == 0).any() or len(np.unique(used)) < len(used):
            raise ValueError("rows: a slot is missing or used twice")
        if (missing := int(used.max(initial=0)) * folder.rows.stride - folder.rows.bytes) > _MOST_CUT:
            raise ValueError(f"rows: a row is {missing:,} bytes past the end of {folder.rows.where}")
        self.rows.load(rows)
        before = {} if previous is None else previous.head.vectors
        self.vectors.load(head.vectors, before, None if folder.readonly else head.sequence)
        if not folder.readonly:
            self.rows.slots.occupy(used, head.sequence)
        self.round, self.state = head.round, head.state


@contextmanager
def plausible(folder: Folder) -> Iterator[None]:
    """Raise a CorruptionError for an index that has valid digests but impossible content."""
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise CorruptionError(f"{folder.index.path}: damaged: {error}; use a copy of the store") from error
    except MemoryError as error:
        raise CorruptionError(
            f"{folder.index.path}: damaged, or needs more memory than this system has: {error}"
        ) from error


def _registry(folder: Folder, listed: Listed) -> Registry:
    return Registry.of_columns(folder.head.clients, listed.numbers, restored(listed.ids))
