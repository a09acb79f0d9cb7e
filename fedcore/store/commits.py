"""Commits of a store: each is published to the folder, whose slots stay until no index names them."""

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, get_args
from weakref import finalize

import numpy as np

from fedcore.arrays import CPU, I64, device_named
from fedcore.errors import LockedError, RangeError, StoreError, UnknownNameError
from fedcore.profiling import span
from fedcore.store.content import Content, believable
from fedcore.store.files.entries import Entries, Previous, all_stored, restored, row_entries, used_slots
from fedcore.store.files.folder import Folder
from fedcore.store.files.slot_file import DiskThread
from fedcore.store.registry import ClientId, canonical
from fedcore.store.vectors import After, Place, Table, places

_log = logging.getLogger("fedcore.store")

FEW_SLOTS = 100
"""So many may wait for readers without a warning."""

_NO_NUMBER = ("ram:", "mmap:")

Durability = Literal["round", "checkpoint", "none"]
"""When a commit survives a loss of power: at once, from a checkpoint on, or once the system has written it."""
Medium = Literal["ram", "mmap", "cuda"]

_EVERYTHING = 2**63 - 1
_NOTHING = row_entries(())
_UNLISTED = object()


class Change(NamedTuple):
    """A commit to be: its round, state, vectors with the places that were taken for them, and rows."""

    round: int | None
    state: str | None
    table: Table
    taken: list[Place] = []  # noqa: RUF012  # nothing is added to it
    entries: Entries = _NOTHING


@dataclass
class CommitPlan:
    """One commit's changes in memory: worked out before the commit, so that hardly anything fails after it.

    Attributes:
        entries: the rows that are new or moved.
        trusted: whether they need no check when they are read.
        written: how many clients have a row then.
        free: slots that the folder's index never named, and that are free at once.
        retired: slots that are free once the index forgets them, with the transaction ``forgets``.
        vectors: the vectors then.
        round, state: of the commit.
    """

    entries: Entries
    trusted: bool
    written: int
    free: list[int]
    retired: list[int]
    forgets: int
    vectors: After
    round: int | None
    state: str | None

    def apply(self, content: Content) -> None:
        """Make it so. After an error (of an allocation, say) it is called again, and goes on where it stopped."""
        slots = content.rows.slots
        content.rows.accept(self.entries, self.written, trusted=self.trusted)
        # Taken from here before it is given there: an error in between leaves a slot unused until the store is opened
        # again. In the other order it would be given twice, and two clients would share it.
        while self.free:
            slot = self.free.pop()
            slots.give((slot,))
        retired, self.retired = self.retired, []
        slots.retire(retired, self.forgets)
        content.vectors.accept(self.vectors)
        content.round, content.state = self.round, self.state


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
        self._steps_back: list[Callable[[], object]] = []  # arrivals and departures since the last commit, backwards
        self._keeps = self._folder is not None and self._folder.undoable
        # What the folder does not know yet:
        self._behind = False
        # Numbers whose rows were committed since, and the entry that the folder knows of each:
        self._changed: dict[int, tuple[int, int, int, int]] = {}
        self._clients: dict[int, Any] = {}  # the stored ids that its list lacks, by number; _UNLISTED takes one off
        self._documents = dict(content.documents)
        self._published: set[Place] = places(content.vectors.table)
        if self._folder is not None and not self._folder.readonly:
            self._reclaim()  # the slots that were free when it was opened

    def require_right(self) -> None:
        """Raise a LockedError, and break, if another process may write to the folder."""
        if self._folder is not None:
            try:
                self._folder.require_lock()
            except LockedError:
                self.broken = "another process may write to it"
                raise

    @property
    def is_behind(self) -> bool:
        """Return whether the folder does not know everything."""
        return self._folder is not None and bool(self._behind or self._clients or self._dropped)

    @property
    def is_ahead(self) -> bool:
        """Return whether clients arrived or departed since the last commit."""
        return bool(self._steps_back)

    def arrive(self, clients: Sequence[ClientId]) -> list[int]:
        """Register clients that arrive, all or (after an error) none; return their numbers."""
        registry, ids = self._content.registry, list(map(canonical, clients))
        known = registry.index.numbers(ids) >= 0
        new = [client for client, is_known in zip(ids, known.tolist(), strict=True) if not is_known]
        with self._all_or_none():
            self._steps_back.append(lambda: [registry.remove(client) for client in new if client in registry])
            numbers = [registry.add(ids[0])] if len(ids) == 1 else registry.add_all(ids).tolist()
            entries: dict[int, Any] = dict(zip(numbers, all_stored(ids), strict=True))
            if counted := self._counted:  # a client whose number the folder's count registers comes back
                entries.update((number, _UNLISTED) for number in numbers if number < counted)
            self._note(entries)
        return numbers

    def leave(self, client: ClientId) -> None:
        """Forget a client that departs; its row goes with the next commit."""
        registry = self._content.registry
        number = registry.number(client)
        with self._all_or_none():
            self._steps_back.append(lambda: registry.put_back(number, client))
            registry.remove(client)
            self._drop(number)
            self._note({number: None if number < self._counted else _UNLISTED})

    def _drop(self, number: int) -> None:
        """Forget a row, which goes with the next commit."""
        rows = self._content.rows
        slot = rows.slot_of(number)
        self._steps_back.append(lambda: rows.put_back(number, self._dropped.pop(number, slot)))
        if slot:
            self._dropped[number] = slot
        rows.drop(number)

    def rollback(self) -> None:
        """Forget arrivals and departures since the last commit, and every staged row."""
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
        content, kept, count = self._content, dict(self._documents), self.count
        entries = content.rows.proposed(round, sealed=self._folder is not None)
        table, taken = (content.vectors.table, []) if vectors is None else content.vectors.propose(vectors)
        if document is not None:
            self._documents = {number: text for number, text in kept.items() if number < round} | {round: document}
        try:
            change = Change(round, state or content.state, table, taken, entries)
            self._change(change, published=self._every_commit)
        except BaseException:
            if self.count == count:
                self._documents = kept
            raise
        self._reclaim()

    def documents(self) -> list[tuple[int, str]]:
        """The documents of the commits, by round, ascending."""
        published = {} if self._folder is None else dict(self._folder.index.documents())
        first = min(self._documents, default=_EVERYTHING)
        return sorted(
            ({number: text for number, text in published.items() if number < first} | self._documents).items()
        )

    def publish(self) -> None:
        """Bring the folder up to the last commit, and to the clients that there are."""
        content = self._content
        if self.is_behind:
            self._change(Change(content.round, content.state, content.vectors.table), published=True)
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
            head, entries = previous.head, previous.rows[previous.rows["slot"] > 0]
            self._change(Change(head.round, head.state, head.vectors, [], entries), published=True, is_undo=True)
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
            self._note(listed | dict.fromkeys(previous.unlisted, _UNLISTED))
        numbers = previous.rows["number"]
        rows.grow(int(numbers.max(initial=-1)) + 1)
        for number in numbers[(previous.rows["slot"] == 0) & (rows.slot[numbers] > 0)].tolist():
            self._drop(number)

    def compact(self) -> None:
        """Move the highest rows and vectors down to free slots, and give back what is free behind them.

        It is a transaction as a commit is. Of what readers still look at, nothing is given back; the commit before the
        last is, and so there is none to go back to.
        """
        content = self._content
        self.publish()
        if content.previous is not None:
            self._change(Change(content.round, content.state, content.vectors.table), published=True, keeps=False)
        self._reclaim()
        entries = _lowered_rows(content)
        try:
            table, taken = content.vectors.lowered()
            change = Change(content.round, content.state, table, taken, entries)
            self._change(change, published=self._folder is not None, keeps=False)
        except BaseException:
            moved = set(entries["slot"].tolist()) - set(content.rows.slot[entries["number"]].tolist())
            content.rows.slots.give(moved)  # of a transaction that did not come to be
            raise
        self._reclaim()
        if self._folder is None or self._folder.unpinned() == self._folder.head.sequence:
            content.rows.slots.shrink()
            content.vectors.shrink()

    def _change(self, change: Change, *, published: bool, keeps: bool = True, is_undo: bool = False) -> None:
        """Make a change count, in the folder if it is published there, and in memory."""
        content, folder, is_compaction = self._content, self._folder, not keeps
        keeps = keeps and self._keeps and not is_undo
        due_entries = before = change.entries
        due = 0 if folder is None else folder.head.sequence + 1
        plan: CommitPlan | None = None
        try:
            if folder is not None:
                due_entries = self._unpublished(change.entries, published)
                before = self._before(due_entries["number"]) if keeps or not published else due_entries
            released = content.previous if published and not is_undo else None
            plan = self._plan(change, keeps=keeps, released=released, is_undo=is_undo)
            if published and folder is not None:
                copy = folder.head.copy and is_compaction
                head = replace(folder.head, vectors=change.table, round=change.round, state=change.state, copy=copy)
                listed = sorted((number, client) for number, client in self._clients.items() if client is not _UNLISTED)
                gone = sorted(number for number, client in self._clients.items() if client is _UNLISTED)
                documents = sorted(self._documents.items())
                with span("publish"):
                    folder.publish(head, due_entries, listed, gone, before if keeps else None, documents)
            self._follow(plan, before, published)
        except BaseException as error:  # perhaps from outside, between any two lines
            if plan is None or (published and not self._has(due, error)):
                content.vectors.withdraw(change.taken)
                raise
            self.broken = "a commit was interrupted"
            self._follow(plan, before, published)
            self.broken = None
            if not isinstance(error, MemoryError):  # which hindered nothing
                raise

    def _plan(self, change: Change, *, keeps: bool, released: Previous | None, is_undo: bool) -> CommitPlan:
        """A change in memory.

        A slot that the folder's index names is free only when a later index does not name it, be it for a row or vector
        of the last commit or, where that can be undone, for one of the commit before.
        """
        entries, table = change.entries, change.table
        rows, vectors, folder = self._content.rows, self._content.vectors, self._folder
        # The transaction with which the folder forgets what is replaced here, be it this one or the next:
        forgets = 0 if folder is None else folder.head.sequence + 1
        old: list[int] = rows.slot[entries["number"]].tolist()
        written = rows.written + old.count(0)
        retired: list[int] = []
        if folder is None:
            free = [*filter(None, old), *self._dropped.values()]
        else:
            replaced = [pair for pair in zip(entries["number"].tolist(), old, strict=True) if pair[1]]
            replaced += self._dropped.items()
            free = [slot for number, slot in replaced if number in self._changed]
            retired = [] if keeps else [slot for number, slot in replaced if number not in self._changed]
        kept: set[Place] = set()
        if released is not None and folder is not None:
            retired += used_slots(released.rows).tolist()
            kept = places(released.head.vectors) - places(folder.head.vectors) - places(table)

        def end(place: Place) -> int | None:
            if place not in self._published:
                return 0
            return None if keeps else forgets

        after = vectors.after(table, change.taken, end, [(forgets, place) for place in kept])
        return CommitPlan(entries, not is_undo, written, free, retired, forgets, after, change.round, change.state)

    def _unpublished(self, entries: Entries, published: bool) -> Entries:
        """The entries, empty ones for rows that go, and if it is published all else that the folder does not know."""
        if gone := _without(self._dropped, entries):
            entries = np.concatenate([entries, row_entries(gone)])
        if published and (behind := _without(self._changed, entries)):
            entries = np.concatenate([entries, self._content.rows.entries(np.array(behind))])
        return entries

    def _before(self, numbers: I64) -> Entries:
        """The entries of these numbers as the folder knows them."""
        before = self._content.rows.entries(numbers)
        if self._dropped or self._changed:
            for place, number in enumerate(numbers.tolist()):
                before["slot"][place] = self._dropped.get(number, before["slot"][place])
                if number in self._changed:
                    before[place] = self._changed[number]
        for name in ("round", "seal"):
            before[name][before["slot"] == 0] = 0
        return before

    def _has(self, due: int, error: BaseException) -> bool:
        """Return whether the folder has the commit after an error; if only a new opening shows it, break."""
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

    def _follow(self, plan: CommitPlan, before: Entries, published: bool) -> None:
        """Change what is in memory, after what can fail. Twice is as once."""
        plan.apply(self._content)
        if published:
            self._published = places(plan.vectors.table)
            self._changed.clear()
            self._clients.clear()
            self._documents.clear()
        elif self._folder is not None:
            self._changed.update((entry[0], entry) for entry in before.tolist())
        self._dropped.clear()
        self._steps_back.clear()
        self._behind = not published and self._folder is not None
        self.count += 1

    @property
    def _counted(self) -> int:
        """The count of clients that the folder does not list, each its own number, unless they have left."""
        return 0 if self._folder is None else self._folder.head.clients

    def _note(self, changes: dict[int, Any]) -> None:
        """Note how the folder's list of clients has to change."""
        if self._folder is not None:
            before = {number: self._clients[number] for number in changes.keys() & self._clients.keys()}
            self._steps_back.append(partial(self._restore, changes.keys(), before))
            self._clients.update(changes)

    def _restore(self, changed: Iterable[int], before: dict[int, Any]) -> None:
        for number in changed:
            self._clients.pop(number, None)
        self._clients.update(before)

    def _reclaim(self) -> None:
        through = _EVERYTHING if self._folder is None else self._folder.unpinned()
        self._content.rows.slots.reclaim(through)
        self._content.vectors.reclaim(through)


def _without(numbers: Collection[int], entries: Entries) -> list[int]:
    """The numbers that have none of the entries."""
    listed = set(entries["number"].tolist()) if numbers else ()
    return [number for number in numbers if number not in listed]


def _lowered_rows(content: Content) -> Entries:
    """Copy the highest rows to the lowest free slots, as far as that brings them down; a damaged row stays."""
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
    entries = rows.entries(np.array(moved, np.int64))
    entries["slot"] = slots
    return entries


def require_names(medium: str, durability: str) -> str:
    """The device of a medium: "cpu" for the host's memory and for files."""
    if not isinstance(medium, str) or medium.partition(":")[0] not in get_args(Medium) or medium.startswith(_NO_NUMBER):
        raise UnknownNameError.of("medium", medium, get_args(Medium))
    if durability not in get_args(Durability):
        raise UnknownNameError.of("durability", durability, get_args(Durability))
    return device_named(medium) if medium.startswith("cuda") else CPU


def require_files(undoable: bool, medium: str, *, readonly: bool) -> None:
    """Raise a RangeError where an undoable store cannot be: it is its folder that keeps what was replaced."""
    if undoable and (medium != "mmap" or readonly):
        got = "readonly=True" if readonly else f'medium="{medium}"'
        raise RangeError(f'undoable: expected False, or medium="mmap" open for writing, got True with {got}')


class Session:
    """An open store in one process, from opening to closing.

    Args:
        content: what is open.
        durability: when the folder is durable.
        resident_rows: how many rows of a file stay in memory.
    """

    def __init__(self, content: Content, durability: Durability, resident_rows: int | None) -> None:
        self.content, self.folder, self.durability = content, content.folder, durability
        self.commits = Commits(content, every_commit=durability != "checkpoint")
        self._write_back = durability == "checkpoint"  # else commits wait for their writing, or never write back
        self.background = None if self.folder is None else DiskThread(self.folder.rows)
        if self.folder is not None and resident_rows is not None:
            self.folder.rows.resident = resident_rows
        self._process = os.getpid()
        self._closed = False
        self._has_warned = False
        # So that the thread ends and files are closed, but nothing else is done, when a store is dropped:
        self._finalizer = None if self.folder is None else finalize(self, _end, self.background, self.folder)
        if self._finalizer is not None:
            # A daemon thread may be in a commit when the program ends: what is closed under its hands may be a file of
            # another number then, into which it writes. The system closes everything, as after a kill.
            self._finalizer.atexit = False

    def require_open(self) -> None:
        """Raise a StoreError if the store was closed; see to what a fork of its process needs."""
        if self._closed:
            raise StoreError(f"{self._name}: expected an open store, got one that was closed")
        if self.folder is not None and self._process != os.getpid():
            self._wake_in_fork(self.folder)

    def require_files(self) -> None:
        """Raise a CorruptionError if a file was cut short."""
        self.content.rows.slots.require_whole()
        self.content.vectors.require_whole()

    def require_writer(self) -> None:
        """Raise a StoreError unless the store can be written to."""
        self.require_open()
        if self.folder is not None and self.folder.readonly:
            raise StoreError(f"{self._name}: expected a store open for writing, got one opened with readonly=True")
        self.require_whole()

    def require_right(self) -> None:
        """Raise a StoreError unless the store can be written to, and only here: before slots are written."""
        self.require_writer()
        self.require_files()
        self.commits.require_right()

    def require_whole(self) -> None:
        """Raise a StoreError if what is in memory may be no commit."""
        self.require_open()
        if self.commits.broken is not None:
            raise StoreError(f"{self._name}: {self.commits.broken}: open it again")

    def refresh(self) -> None:
        """Let a reader see what was committed last."""
        self.require_open()
        if self.folder is not None and self.folder.readonly:
            self.content.refresh(self.folder)

    def after_commit(self) -> None:
        """Evict surplus rows and start writing back, after a commit."""
        with suppress(OSError, RuntimeError, MemoryError):  # the commit counts, and these only make others quicker
            if self.folder is not None:
                self.folder.rows.evict()
            if self.background is not None and self._write_back:
                self.background.write_back()
            self._look_at_readers()

    def _look_at_readers(self) -> None:
        """Say once that readers, a forgotten notebook perhaps, keep more of the disk from use than is in use."""
        rows, vectors = self.content.rows, self.content.vectors
        waiting, used = rows.slots.waiting + vectors.waiting, rows.written + len(vectors.table)
        if self.folder is None or waiting <= max(used, FEW_SLOTS):
            self._has_warned = False
        elif not self._has_warned:
            self._has_warned = True
            processes = [f"process {process}, {behind} commits behind" for process, behind in self.folder.readers]
            _log.warning(
                "%s: %d slots that are used no more wait for readers, and %d are in use: the files grow with every "
                "round until readers refresh() or close() (%s)",
                self._name,
                waiting,
                used,
                "; ".join(processes) or "in this process, or views of vectors that are held",
            )

    def close(self) -> None:
        """Publish what was committed, or stay open; then close the files, and shorten them."""
        folder, end = self.folder, self._finalizer
        if folder is None or end is None or self._closed:
            self._closed = True
            return
        if self.background is not None:
            self.background.close()
        writes = not folder.readonly and self.commits.broken is None and self._process == os.getpid()
        is_ours = writes and self._publish()
        self._closed = True
        try:
            if is_ours:
                folder.trim()
        finally:
            end()

    def _publish(self) -> bool:
        """Leave the folder as it was committed last; whether it is this process's."""
        try:
            self.commits.require_right()
        except StoreError:
            if self.commits.is_behind:
                raise
            return False  # nothing is lost, and the files are another process's
        self.commits.publish()
        return True

    @property
    def _name(self) -> str:
        return "store" if self.folder is None else str(self.folder.path)

    def _wake_in_fork(self, folder: Folder) -> None:
        """A reader that was forked looks at the last commit; a writer's slots belong to the process that was forked."""
        if not folder.readonly:
            raise StoreError(
                f"{self._name}: expected the process that opened the store for writing ({self._process}), got a fork "
                "of it: open it there with readonly=True"
            )
        self._process = os.getpid()
        folder.pin_again()
        self.content.refresh(folder)


def _end(background: DiskThread | None, folder: Folder) -> None:
    if background is not None:
        background.close()
    folder.close()
