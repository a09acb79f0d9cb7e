"""The content of a store: rows, vectors, clients, and the round and state that go with them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedcore.arrays import CPU, copy_into
from fedcore.errors import CorruptionError, StoreError
from fedcore.store.files.entries import Entries, Listed, Previous, all_restored, row_entries, used_slots
from fedcore.store.files.folder import Folder, replacing
from fedcore.store.registry import Registry
from fedcore.store.rows import Rows
from fedcore.store.slots import DeviceSlots, RowFormat, Slots
from fedcore.store.vectors import Vectors

_MOST_CUT = 1 << 44
"""Bytes that a file of rows can lack: of what was cut off a smaller one, each row is named when it is read."""


class Content:
    """A store's content as it was committed last, and what is staged.

    Args:
        form: of the rows.
        registry: the clients.
        folder: of the files; None for memory, the host's or a device's by ``form``.

    Attributes:
        round: the last committed round.
        state: the caller's state, as JSON.
    """

    def __init__(self, form: RowFormat, registry: Registry, folder: Folder | None) -> None:
        self.form, self.registry, self.folder = form, registry, folder
        self.round: int | None = None
        self.state: str | None = None
        self.documents: list[tuple[int, str]] = []  # of a content in memory, as it was read
        self.rows = Rows(_slots_in_memory(form) if folder is None else folder.rows)
        self.vectors = Vectors(_InMemory().__getitem__ if folder is None else folder.vectors, sealed=folder is not None)

    @classmethod
    def read(cls, folder: Folder) -> "Content":
        """The content of a folder."""
        with believable(folder):
            rows, listed = folder.load()
            content = cls(folder.format, _registry(folder, listed), folder)
            content._take_over(folder, rows)
        return content

    def refresh(self, folder: Folder) -> None:
        """Read the folder again; what was staged is forgotten."""
        with believable(folder):
            rows, listed = folder.load()
            self.registry = _registry(folder, listed)
            self._take_over(folder, rows)

    @property
    def previous(self) -> Previous | None:
        """The commit before the last, where it is kept."""
        return None if self.folder is None else self.folder.previous

    def check(self, number: int) -> None:
        """Check a row against its checksum, once."""
        if self.folder is None or self.rows.trusted[number]:
            return
        problem = self.problem(number)
        if problem is not None:
            raise CorruptionError(f"{problem}; forget the client, or use a copy of the store")
        self.rows.trusted[number] = True

    def problem(self, number: int) -> str | None:
        """The fault in a row, which is read, or None."""
        slots, slot = self.rows.slots, self.rows.slot_of(number)
        damage = None if self.folder is None else slots.damage(slot, int(self.rows.seal[number]))
        if damage is None:
            return None
        return f"{slots.where}: the row of client {self.registry.id_of(number)!r} (slot {slot}) is damaged: {damage}"

    def problems(self) -> list[str]:
        """The faults in the content, all of which is read."""
        if self.folder is None:
            return []
        found = [f"{self.folder.index.path}: {line}" for line in self.folder.index.check()]
        for number in np.flatnonzero(self.rows.slot).tolist():
            problem = self.problem(number)
            self.rows.trusted[number] = problem is None
            found += [] if problem is None else [problem]
            self.rows.slots.let_go([int(self.rows.slot[number])])
        return found + self.vectors.problems()

    def kept_problems(self) -> list[str]:
        """The faults in what is kept of the commit before, all of which is read."""
        previous = self.previous
        if previous is None:
            return []
        slots, found = self.rows.slots, []
        for number, slot, _, seal in previous.rows[previous.rows["slot"] > 0].tolist():
            damage = slots.damage(slot, seal)
            if damage is not None:
                whose = f"the row of number {number} before the last commit"
                found.append(f"{slots.where}: {whose} (slot {slot}) is damaged: {damage}")
            slots.let_go([slot])
        return found + self.vectors.kept_problems(previous.head.vectors)

    def copy_to(self, other: "Content", vectors: Mapping[str, Any] | None = None) -> Entries:
        """Copy everything to an empty content with the same numbers.

        Args:
            vectors: what it gets in place of this content's.

        Returns:
            the entries of its rows, which lie in the order of their numbers.
        """
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
                    self.rows.trusted[number] = False  # it was changed after it was checked
                    self.check(number)
            source.let_go([slot])
            target.let_go([copy])
        if vectors is None:
            vectors = {name: self.vectors.get(name) for name in self.vectors.table}
        other.round, other.state = self.round, self.state
        entries = row_entries(numbers, list(other.rows.staged.values()), self.rows.round[numbers], seals)
        return other.adopt(entries, vectors)

    def adopt(self, entries: Entries, vectors: Mapping[str, Any]) -> Entries:
        """Make staged rows and vectors all that this content, which was empty, has; returns the rows' entries."""
        self.rows.accept(entries, len(entries))
        self.vectors.accept(self.vectors.after(*self.vectors.propose(vectors), lambda _: 0))
        return entries

    def save(
        self,
        path: Path,
        vectors: Mapping[str, Any] | None,
        state: str | None,
        documents: Sequence[tuple[int, str]] = (),
    ) -> None:
        """Write a named copy to a folder, without the slots that are free.

        Args:
            path: the folder: new, empty, or an older copy.
            vectors, state: in place of the content's own, where they are not None.
            documents: the caller's, by number.
        """
        if self.folder is not None and path.resolve() == self.folder.path.resolve():
            raise StoreError(
                f"{path}: expected another folder than the store's own, which every commit writes, got that one"
            )
        with replacing(path, self.form, self.registry, existing=True) as folder:
            copy = Content(folder.format, self.registry, folder)
            entries = self.copy_to(copy, vectors)
            state = self.state if state is None else state
            head = replace(folder.head, round=self.round, state=state, vectors=copy.vectors.table, copy=True)
            folder.publish(head, entries, (), (), None, documents)

    def _take_over(self, folder: Folder, rows: Entries) -> None:
        head, previous = folder.head, folder.previous
        used = rows["slot"] if previous is None else np.concatenate([rows["slot"], used_slots(previous.rows)])
        if (last := int(rows["number"].max(initial=-1))) >= self.registry.capacity:
            raise ValueError(f"expected rows of clients, got one of number {last}")
        if (used == 0).any() or len(np.unique(used)) < len(used):
            raise ValueError("expected a slot for each row, got one for two, or for none")
        if (missing := int(used.max(initial=0)) * folder.rows.stride - folder.rows.bytes) > _MOST_CUT:
            raise ValueError(f"expected rows in {folder.rows.where}, got one {missing:,} bytes past its end")
        self.rows.load(rows)
        before = {} if previous is None else previous.head.vectors
        self.vectors.load(head.vectors, before, None if folder.readonly else head.sequence)
        if not folder.readonly:
            self.rows.slots.occupy(used, head.sequence)
        self.round, self.state = head.round, head.state


class _InMemory(dict[int, Slots]):
    """Slots by their payload, made when they are asked for; they know no content, which goes when it is let go."""

    def __missing__(self, payload: int) -> Slots:
        self[payload] = Slots(payload)
        return self[payload]


def _slots_in_memory(form: RowFormat) -> Slots:
    return Slots(form.payload) if form.device == CPU else DeviceSlots(form.payload, form.device)


@contextmanager
def believable(folder: Folder) -> Iterator[None]:
    """Refuse an index whose digests are right, and which no store has written all the same."""
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise CorruptionError(f"{folder.index.path}: damaged: {error}; use a copy of the store") from error
    except MemoryError as error:
        raise CorruptionError(
            f"{folder.index.path}: expected a store that memory can hold, got {str(error) or 'more'}: it is too large "
            "for this system, or damaged"
        ) from error


def _registry(folder: Folder, listed: Listed) -> Registry:
    return Registry.of_columns(folder.head.clients, listed.numbers, all_restored(listed.ids))
