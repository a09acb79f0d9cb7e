"""Commits of a store: each is published to the folder, whose slots stay alive until the last index lets go of them."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fedcore.clients.registry import ClientId, canonical
from fedcore.errors import LockedError, StoreError
from fedcore.store.acceptance import Acceptance
from fedcore.store.content import Content, believable
from fedcore.store.files.previous import Previous
from fedcore.store.files.row_entries import RowEntries
from fedcore.store.files.stored_ids import StoredId, all_stored, restored
from fedcore.store.named_vectors import Place, Table, places
from fedcore.typing import I64

_EVERYTHING = 2**63 - 1
_NONE = np.zeros(0, np.int64)


class Commits:
    """Commits to a content, and publishes the commits to its folder if it has one.

    A commit changes the folder and the memory, or neither. What fails before the folder's transaction leaves both as
    they were; once the folder has it, memory follows whatever comes, and an error that came in between goes on then.

    Args:
        content: what is committed to.
        every_commit: whether each commit is published, or only at ``publish``.

    Attributes:
        broken: why nothing can be written any more, or None.
        count: how many commits count.
    """

    def __init__(self, content: Content, *, every_commit: bool) -> None:
        self._content, self._folder = content, content.folder
        self._every_commit = every_commit and self._folder is not None
        self.broken: str | None = None
        self.count = 0
        self._dropped: dict[int, int] = {}  # rows that go with the next commit: number -> slot
        self._steps_back: list[Callable[[], object]] = []  # who came and went since the last commit, backwards
        self._keeps = self._folder is not None and self._folder.undoable
        # What the folder does not know yet:
        self._behind = False
        # Numbers whose rows were committed since, and the slot, round and seal that the folder knows of each:
        self._changed: dict[int, tuple[int, int, int]] = {}
        self._listed: dict[int, StoredId] = {}
        self._unlisted: set[int] = set()
        self._documents = dict(content.documents)
        self._published: set[Place] = places(content.vectors.table)
        if self._folder is not None and not self._folder.readonly:
            self._reclaim()  # the slots that were free when it was opened

    def require_right(self) -> None:
        """Raise a LockedError, and break, if somebody else may write to the folder."""
        if self._folder is not None:
            try:
                self._folder.require_lock()
            except LockedError:
                self.broken = "another process may write to it"
                raise

    @property
    def is_behind(self) -> bool:
        """Tell whether the folder does not know everything."""
        return self._folder is not None and bool(self._behind or self._listed or self._unlisted or self._dropped)

    @property
    def is_ahead(self) -> bool:
        """Tell whether anybody came or went since the last commit."""
        return bool(self._steps_back)

    def arrive(self, clients: Sequence[ClientId]) -> list[int]:
        """Register clients that arrive, all or (after an error) none; return their numbers."""
        registry, ids = self._content.registry, list(map(canonical, clients))
        known = registry.index.numbers(ids) >= 0
        new = [client for client, is_known in zip(ids, known.tolist(), strict=True) if not is_known]
        with self._all_or_none():
            self._steps_back.append(lambda: [registry.remove(client) for client in new if client in registry])
            numbers = [registry.add(ids[0])] if len(ids) == 1 else registry.add_all(ids).tolist()
            # A counted client comes back, if the folder's count registers its number.
            counted = self._counted
            back = {number for number in numbers if number < counted}
            entries = dict(zip(numbers, all_stored(ids), strict=True))
            self._note({number: entries[number] for number in entries.keys() - back} if back else entries, back)
        return numbers

    def leave(self, client: ClientId) -> None:
        """Forget a client that departs; its row goes with the next commit."""
        registry = self._content.registry
        number = registry.number(client)
        with self._all_or_none():
            self._steps_back.append(lambda: registry.put_back(number, client))
            registry.remove(client)
            self._drop(number)
            if number < self._counted:
                self._note({number: None}, set())
            else:
                self._note({}, {number})

    def _drop(self, number: int) -> None:
        """Forget a row, which goes with the next commit."""
        rows = self._content.rows
        slot = rows.slot_of(number)
        self._steps_back.append(lambda: rows.put_back(number, self._dropped.pop(number, slot)))
        if slot:
            self._dropped[number] = slot
        rows.drop(number)

    def rollback(self) -> None:
        """Forget who came and went since the last commit, and every staged row."""
        self._back_to(0)
        self._content.rows.discard()

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Changes, each with its undo before it, that an error takes back."""
        mark = len(self._steps_back)
        try:
            yield
        except BaseException:
            self._back_to(mark)
            raise

    def _back_to(self, mark: int) -> None:
        while len(self._steps_back) > mark:
            self._steps_back[-1]()  # twice is as once
            self._steps_back.pop()

    def commit(
        self, round: int, vectors: Mapping[str, Any] | None, state: str | None, document: str | None = None
    ) -> None:
        """Make what is staged count, together with the vectors, the state (None: as they were) and a document."""
        content, rows = self._content, self._content.rows
        seals = None if self._folder is None else rows.seals()
        entries = rows.proposed(round, seals)
        table, taken = (content.vectors.table, []) if vectors is None else content.vectors.propose(vectors)
        kept, count = dict(self._documents), self.count
        if document is not None:
            self._documents = {number: text for number, text in kept.items() if number < round} | {round: document}
        try:
            self._change(entries, table, taken, round, state or content.state, published=self._every_commit)
        except BaseException:
            if self.count == count:
                self._documents = kept
            raise
        self._reclaim()

    def documents(self) -> list[tuple[int, str]]:
        """The documents of the commits, by round, ascending."""
        told = {} if self._folder is None else dict(self._folder.index.documents())
        first = min(self._documents, default=_EVERYTHING)
        return sorted(({number: text for number, text in told.items() if number < first} | self._documents).items())

    def publish(self) -> None:
        """Bring the folder up to the last commit, and to the clients that there are."""
        content = self._content
        if self.is_behind:
            nothing = content.rows.entries(_NONE)
            self._change(nothing, content.vectors.table, [], content.round, content.state, published=True)
            self._reclaim()

    def undo(self) -> bool:
        """Go back to the commit before the last, in a transaction of its own; False where none is kept.

        What came since the last commit is forgotten.
        """
        self.rollback()
        folder = self._folder
        if self.is_behind:
            raise StoreError(
                "undo: expected every commit to be in the folder, got some since the last checkpoint: checkpoint() "
                "makes them the transaction that undo() takes back; or close the store, and open it again"
            )
        if folder is None or folder.previous is None:
            return False
        previous = folder.previous
        with self._all_or_none():
            with believable(folder):
                self._go_back(previous)
            head, entries = previous.head, previous.rows.only(previous.rows.slots > 0)
            self._change(entries, head.vectors, [], head.round, head.state, published=True, is_undo=True)
        self._reclaim()
        return True

    def _go_back(self, previous: Previous) -> None:
        """Bring back the clients of the commit before, and let the rows go that came since."""
        registry, rows, listed = self._content.registry, self._content.rows, dict(previous.listed)
        if listed or previous.unlisted:
            ids = {number: restored(client) for number, client in listed.items()}
            ids |= {number: number if number < self._counted else None for number in previous.unlisted}
            now = registry.holders(ids)
            self._steps_back.append(lambda: registry.reassign(now))
            registry.reassign(ids)
            self._note(listed, set(previous.unlisted))
        numbers = previous.rows.numbers
        rows.grow(int(numbers.max(initial=-1)) + 1)
        for number in numbers[(previous.rows.slots == 0) & (rows.slot[numbers] > 0)].tolist():
            self._drop(number)

    def compact(self) -> None:
        """Move the highest rows and vectors down to free slots, and give back what is free behind them.

        It is a transaction as a commit is. Of what readers still look at, nothing is given back; the commit before the
        last is, and so there is none to go back to.
        """
        content = self._content
        self.publish()
        if content.previous is not None:
            nothing = content.rows.entries(_NONE)
            table = content.vectors.table
            self._change(nothing, table, [], content.round, content.state, published=True, keeps=False)
        self._reclaim()
        entries = _lowered_rows(content)
        try:
            table, taken = content.vectors.lowered()
            published = self._folder is not None
            self._change(entries, table, taken, content.round, content.state, published=published, keeps=False)
        except BaseException:
            moved = set(entries.slots.tolist()) - set(content.rows.slot[entries.numbers].tolist())
            content.rows.slots.give(moved)  # of a transaction that did not come to be
            raise
        self._reclaim()
        if self._folder is None or self._folder.unpinned() == self._folder.head.sequence:
            content.rows.slots.shrink()
            content.vectors.shrink()

    def _change(
        self,
        entries: RowEntries,
        table: Table,
        taken: list[Place],
        round: int | None,
        state: str | None,
        *,
        published: bool,
        keeps: bool = True,
        is_undo: bool = False,
    ) -> None:
        """Make a commit count, in the folder if it is published there, and in memory.

        Args:
            keeps: whether an undoable store keeps what it replaces.
            is_undo: whether it goes back to the commit before.
        """
        content, dropped, is_compaction = self._content, self._dropped, not keeps
        keeps = keeps and self._keeps and not is_undo
        told = before = entries
        due = 0 if self._folder is None else self._folder.head.sequence + 1
        acceptance: Acceptance | None = None
        try:
            if self._folder is not None:
                told = self._told(entries, published)
                before = self._before(told) if keeps or not published else told
            acceptance = Acceptance(
                content,
                entries,
                dropped,
                table,
                taken,
                unpublished=self._changed,
                published=self._published,
                keeps=keeps,
                released=content.previous if published and not is_undo else None,
                is_undo=is_undo,
                round=round,
                state=state,
            )
            if published:
                self._transact(told, table, round, state, before if keeps else None, stays_copy=is_compaction)
            self._follow(acceptance, before, table, published)
        except BaseException as error:  # perhaps from outside, between any two lines
            if acceptance is None or (published and not self._has(due, error)):
                content.vectors.withdraw(taken)
                raise
            self.broken = "a commit was interrupted"
            self._follow(acceptance, before, table, published)
            self.broken = None
            if not isinstance(error, MemoryError):  # which hindered nothing
                raise

    def _told(self, entries: RowEntries, published: bool) -> RowEntries:
        """The entries, empty ones for rows that go, and if it is published all else that the folder does not know."""
        gone = _without(self._dropped, entries)
        zeros = np.zeros(len(gone), np.int64)
        told = entries.and_(RowEntries(gone, zeros, zeros, zeros.view(np.uint64)))
        return told.and_(self._content.rows.entries(_without(self._changed, told))) if published else told

    def _before(self, told: RowEntries) -> RowEntries:
        """The entries of the same numbers as the folder knows them."""
        rows, numbers = self._content.rows, told.numbers
        before = RowEntries(numbers, rows.slot[numbers], rows.round[numbers], rows.seal[numbers]).table()
        if self._dropped or self._changed:
            for place, number in enumerate(numbers.tolist()):
                before[place, 1] = self._dropped.get(number, before[place, 1])
                before[place, 1:] = self._changed.get(number, before[place, 1:])
        before[before[:, 1] == 0, 1:] = 0
        return RowEntries.of(before)

    def _transact(
        self,
        entries: RowEntries,
        table: Table,
        round: int | None,
        state: str | None,
        before: RowEntries | None,
        *,
        stays_copy: bool,
    ) -> None:
        folder = self._folder
        assert folder is not None
        copy = folder.head.copy and stays_copy
        head = replace(folder.head, vectors=table, round=round, state=state, copy=copy)
        documents = sorted(self._documents.items())
        folder.publish(head, entries, sorted(self._listed.items()), sorted(self._unlisted), before, documents)

    def _has(self, due: int, error: BaseException) -> bool:
        """Tell whether the folder has the commit that an error has left; where only a new opening tells, it breaks."""
        folder = self._folder
        assert folder is not None
        if isinstance(error, LockedError):
            self.broken = "another process has written to it"
            return False
        self.broken = f"a commit failed, and only the files tell if it is durable ({error})"
        if folder.in_doubt:
            return False
        has = folder.has(due)
        self.broken = None
        return has

    def _follow(self, acceptance: Acceptance, before: RowEntries, table: Table, published: bool) -> None:
        """Change what is in memory, after what can fail. Twice is as once.

        Args:
            before: the entries that change, as they were; where it is published, nobody looks at them.
        """
        acceptance.apply()
        if published:
            self._published = places(table)
            self._changed.clear()
            self._listed.clear()
            self._unlisted.clear()
            self._documents.clear()
        elif self._folder is not None:
            self._changed.update((number, (slot, round, seal)) for number, slot, round, seal in before.table().tolist())
        self._dropped.clear()
        self._steps_back.clear()
        self._behind = not published and self._folder is not None
        self.count += 1

    @property
    def _counted(self) -> int:
        """The count of clients that the folder does not list, each its own number, unless they have left."""
        return 0 if self._folder is None else self._folder.head.clients

    def _note(self, listed: dict[int, StoredId], unlisted: set[int]) -> None:
        """Note how the folder's list of clients has to change: entries by number, and numbers that lose theirs."""
        if self._folder is None:
            return
        changed = listed.keys() | unlisted
        before = {number: self._listed[number] for number in changed if number in self._listed}
        self._steps_back.append(partial(self._restore, changed, before, changed & self._unlisted))
        self._unlisted.difference_update(listed)
        self._listed.update(listed)
        for number in unlisted:
            self._listed.pop(number, None)
        self._unlisted |= unlisted

    def _restore(self, changed: set[int], listed: dict[int, StoredId], unlisted: set[int]) -> None:
        for number in changed:
            self._listed.pop(number, None)
        self._listed.update(listed)
        self._unlisted -= changed
        self._unlisted |= unlisted

    def _reclaim(self) -> None:
        through = _EVERYTHING if self._folder is None else self._folder.unpinned()
        self._content.rows.slots.reclaim(through)
        self._content.vectors.reclaim(through)


def _without(numbers: Collection[int], entries: RowEntries) -> I64:
    """The numbers that have none of the entries."""
    if not numbers:
        return _NONE
    listed = set(entries.numbers.tolist())
    return np.array([number for number in numbers if number not in listed], np.int64)


def _lowered_rows(content: Content) -> RowEntries:
    """Copy the highest rows to the lowest free slots, as far as that brings them down; a damaged row stays.

    Returns:
        the entries of the rows that move.
    """
    rows = content.rows
    numbers = np.flatnonzero(rows.slot)
    moved, slots = [], []
    try:
        for number in numbers[np.argsort(-rows.slot[numbers])].tolist():
            old = int(rows.slot[number])
            if not rows.slots.has_free_below(old):
                break
            if content.problem(number) is None:
                slots.append(rows.slots.copy(old))
                moved.append(number)
                rows.slots.let_go([old, slots[-1]])
    except BaseException:
        rows.slots.give(slots)
        raise
    moving = np.array(moved, np.int64)
    return RowEntries(moving, np.array(slots, np.int64), rows.round[moving], rows.seal[moving])
