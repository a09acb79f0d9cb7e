"""How a store's commits become the folder's: what it does not know yet, and the slots that it may still need."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from fedcore.store.compaction import lowered_rows
from fedcore.store.content import Content
from fedcore.store.index import RowEntries
from fedcore.store.stored_ids import StoredId
from fedcore.store.vectors import Place, Table, places

_AT_ONCE, _EVERYTHING = 0, 2**63 - 1
_NONE = np.zeros(0, np.int64)


class Journal:
    """Commits to a content, and publishes the commits to its folder if it has one.

    Args:
        content: what is committed to.
        every_commit: whether each commit is published, or only at ``publish``.

    Attributes:
        broken: why nothing can be written any more, or None.
    """

    def __init__(self, content: Content, *, every_commit: bool) -> None:
        self._content, self._folder = content, content.folder
        self._every_commit = every_commit and self._folder is not None
        self.broken: str | None = None
        self._dropped: dict[int, int] = {}  # rows that go with the next commit: number -> slot
        # What the folder does not know yet:
        self._behind = False
        self._changed: set[int] = set()  # numbers whose rows were committed since
        self._listed: dict[int, StoredId] = {}
        self._unlisted: set[int] = set()
        self._published: set[Place] = places(content.vectors.table)
        if self._folder is not None and not self._folder.readonly:
            self._reclaim()  # the slots that were free when it was opened

    def arrive(self, number: int, client: StoredId) -> None:
        """A client has got this number."""
        if self._folder is not None and number < self._folder.head.clients:  # a counted one is back
            self._listed.pop(number, None)
            self._unlisted.add(number)
        else:
            self._listed[number] = client
            self._unlisted.discard(number)

    def leave(self, number: int) -> None:
        """The client of this number has left; the row goes with the next commit."""
        slot = self._content.rows.drop(number)
        if slot:
            self._dropped[number] = slot
        if self._folder is not None and number < self._folder.head.clients:
            self._listed[number] = None  # a count registered it
            self._unlisted.discard(number)
        else:
            self._listed.pop(number, None)
            self._unlisted.add(number)

    def commit(self, round: int, vectors: Mapping[str, Any] | None, state: str | None) -> None:
        """Make what is staged count, together with the vectors and the state (None: as they were)."""
        content, rows = self._content, self._content.rows
        seals = None if self._folder is None else [rows.slots.seal(slot) for slot in rows.staged.values()]
        entries = rows.proposed(round, seals)
        table, taken = (content.vectors.table, []) if vectors is None else content.vectors.propose(vectors)
        state = state or content.state
        with self._changing():
            if self._every_commit:
                try:
                    self._transact(_with_gone(entries, self._dropped), table, round, state)
                except BaseException:
                    content.vectors.withdraw(taken)
                    raise
            self._behind = not self._every_commit
            self._accept(entries, table, taken, round, state, published=self._every_commit)
        self._reclaim()

    def publish(self) -> None:
        """Bring the folder up to the last commit, and to the clients that there are."""
        if self._folder is not None and (self._behind or self._listed or self._unlisted or self._dropped):
            content = self._content
            with self._changing():
                none = content.rows.entries(_NONE)  # but what was dropped
                self._accept(none, content.vectors.table, [], content.round, content.state, published=False)
                numbers = np.array(sorted(self._changed), np.int64)
                self._transact(content.rows.entries(numbers), content.vectors.table, content.round, content.state)
                self._behind = False
            self._reclaim()

    def compact(self) -> None:
        """Move the highest rows and vectors down to free slots, and give back what is free behind them.

        It is a transaction as a commit is. Of what readers still look at, nothing is given back.
        """
        content = self._content
        self.publish()
        self._reclaim()
        entries = lowered_rows(content)
        table, taken = content.vectors.lowered()
        with self._changing():
            if self._folder is not None:
                try:
                    self._transact(entries, table, content.round, content.state)
                except BaseException:
                    content.rows.slots.give(entries.slots.tolist())
                    content.vectors.withdraw(taken)
                    raise
            self._accept(entries, table, taken, content.round, content.state, published=self._folder is not None)
        self._reclaim()
        if self._folder is None or self._folder.unpinned() == self._folder.head.sequence:
            content.rows.slots.shrink()
            content.vectors.shrink()

    def _transact(self, entries: RowEntries, table: Table, round: int | None, state: str | None) -> None:
        assert self._folder is not None
        head = replace(self._folder.head, vectors=table, round=round, state=state)
        self._folder.publish(head, entries, sorted(self._listed.items()), sorted(self._unlisted))
        self._changed.clear()
        self._listed.clear()
        self._unlisted.clear()
        self._published = places(table)

    def _accept(
        self,
        entries: RowEntries,
        table: Table,
        taken: list[Place],
        round: int | None,
        state: str | None,
        *,
        published: bool,
    ) -> None:
        """Change what is in memory; a slot that the folder's index names is free only when a later one does not."""
        self.broken = "a commit was interrupted"  # if this does not get to its end
        # The transaction with which the folder forgets what is replaced here:
        forgets = 0 if self._folder is None else self._folder.head.sequence + (not published)
        slots = self._content.rows.slots
        old = self._content.rows.accept(entries)
        replaced = [pair for pair in zip(entries.numbers.tolist(), old.tolist(), strict=True) if pair[1]]
        replaced += self._dropped.items()
        if self._folder is None:
            slots.give(slot for _, slot in replaced)
        else:
            slots.give(slot for number, slot in replaced if number in self._changed)
            slots.retire([slot for number, slot in replaced if number not in self._changed], forgets)
        if not published:
            self._changed.update(entries.numbers.tolist(), self._dropped)
        self._dropped.clear()
        self._content.vectors.accept(
            table, taken, lambda place: forgets if published or place in self._published else _AT_ONCE
        )
        self._content.round, self._content.state = round, state
        self.broken = None

    def _reclaim(self) -> None:
        through = _EVERYTHING if self._folder is None else self._folder.unpinned()
        self._content.rows.slots.reclaim(through)
        self._content.vectors.reclaim(through)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Whatever stops between the transaction and the end of the block leaves memory and folder apart.

        What stops before the transaction has changed nothing: it may be tried again.
        """
        try:
            yield
        except BaseException as error:
            if self._folder is not None and self._folder.in_doubt:
                said = str(error) or type(error).__name__
                self.broken = f"a commit failed, and only the files tell if it is durable ({said})"
            raise
        if self._folder is not None:
            self._folder.settled()


def _with_gone(entries: RowEntries, dropped: Iterable[int]) -> RowEntries:
    """The entries, and empty ones for the numbers that lost their row and got no other."""
    staying = set(entries.numbers.tolist())
    gone = np.array([number for number in dropped if number not in staying], np.int64)
    zeros = np.zeros(len(gone), np.int64)
    return RowEntries(
        np.concatenate([entries.numbers, gone]),
        np.concatenate([entries.slots, zeros]),
        np.concatenate([entries.rounds, zeros]),
        np.concatenate([entries.seals, zeros.view(np.uint64)]),
    )
