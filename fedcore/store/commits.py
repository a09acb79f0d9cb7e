"""Commits of a store. Each is published to the folder; old slots are kept until no index refers to them."""

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
from fedcore.store.content import After, Content, Place, Table, places, plausible
from fedcore.store.files.entries import Entries, Previous, Transaction, restored, row_entries, stored, used_slots
from fedcore.store.files.folder import Folder
from fedcore.store.files.slot_file import DiskThread
from fedcore.store.registry import ClientId, Registry, canonical

_log = logging.getLogger("fedcore.store")

FEW_SLOTS = 100
"""The number of unused slots that readers may keep in use without a warning."""

Durability = Literal["round", "checkpoint", "none"]
"""When a commit survives a loss of power: at once, after a checkpoint, or once the system has written it to disk."""
MOST_UNSYNCED = 2048
"""The changed rows and clients after which a commit is a checkpoint. Each commit until then lists all of them."""
Medium = Literal["ram", "mmap", "cuda"]

_EVERYTHING = 2**63 - 1
_NOTHING = row_entries(())
_UNLISTED = object()


class Change(NamedTuple):
    """The input of a commit: its round, state, vectors (with the slots written for them), rows and documents."""

    round: int | None
    state: str | None
    table: Table
    taken: list[Place] = []  # noqa: RUF012  # never changed
    entries: Entries = _NOTHING
    documents: Sequence[tuple[int, str]] = ()


@dataclass(eq=False, repr=False)
class CommitPlan:
    """The changes that a commit makes in memory, computed before the commit so that little can fail after it.

    Attributes:
        entries: new or moved rows.
        trusted: whether these rows can be read without a check.
        written: the number of clients with a row after the commit.
        retired: slots that neither the rows nor the kept data use after the commit.
        forgets: the number of the transaction. ``retired`` can be reused once every reader has seen it.
        vectors: the vectors after the commit.
    """

    entries: Entries
    trusted: bool
    written: int
    retired: list[int]
    forgets: int
    vectors: After
    round: int | None
    state: str | None

    def apply(self, content: Content) -> None:
        """Change ``content``. If this fails (no memory, for example), call it again; it continues where it stopped."""
        content.rows.accept(self.entries, self.written, trusted=self.trusted)
        # Emptied first: an interrupt in between leaves slots unused until the store is opened again. In the other order
        # a slot would be freed twice, and two clients would share it.
        retired, self.retired = self.retired, []
        content.rows.slots.retire(retired, self.forgets)
        content.vectors.accept(self.vectors)
        content.round, content.state = self.round, self.state


class Session:
    """An open store in one process, and its commits.

    A commit changes the folder and the memory, or neither. If it fails before the folder's transaction, both are
    unchanged. If it fails later, the memory is updated before the error is raised.

    Attributes:
        broken: the reason why nothing can be written any more, or None.
        count: the number of commits.
    """

    def __init__(self, content: Content, durability: Durability, resident_rows: int | None) -> None:
        self.content, self.folder, self.durability = content, content.folder, durability
        self.broken: str | None = None
        self.count = 0
        self._keeps = self.folder is not None and self.folder.keep_previous
        self._dropped: dict[int, int] = {}  # rows that the next commit removes: number -> slot
        # Functions that undo added and removed clients since the last commit. They must not refer to this object: such
        # a cycle would keep the store and its lock in memory. A deep copy copies a partial, but not a closure.
        self._steps_back: list[Callable[[], object]] = []
        self._clients: dict[int, Any] = {}  # uncommitted changes of the client list, by number; _UNLISTED removes one
        self.background = None if self.folder is None else DiskThread(self.folder.rows)
        if self.folder is not None and resident_rows is not None:
            self.folder.rows.resident = resident_rows
        self._process = os.getpid()
        self._closed = False
        self._has_warned = False
        if self.folder is not None and not self.folder.readonly:
            self._reclaim()  # frees the slots that were free when the store was opened
            if durability == "checkpoint":
                self.folder.index.raise_format()
            if self.folder.head.unsynced:
                self._settle()
        # If the store is garbage-collected, only the thread ends and the files are closed:
        self._finalizer = None if self.folder is None else finalize(self, _end, self.background, self.folder)
        if self._finalizer is not None:
            # At exit, a daemon thread may be in a commit. If its file were closed, another file could get the same
            # descriptor, and the thread would write into it. The system closes everything, as after a kill.
            self._finalizer.atexit = False

    def require_open(self) -> None:
        """Raise a StoreError if the store is closed, or in a fork of the writer. Refresh a fork of a reader."""
        if self._closed:
            raise StoreError(f"{self._name}: the store is closed; open it again, or its server by Server.load")
        if self.folder is not None and self._process != os.getpid():
            self._wake_in_fork(self.folder)

    def require_files(self) -> None:
        """Raise a CorruptionError if an open file was truncated."""
        if self.folder is not None and not self._closed:
            for slots in self.content.all_slots:
                slots.require_whole()

    def require_whole(self) -> None:
        """Raise a StoreError if an interrupted commit may have left invalid content in memory."""
        self.require_open()
        if self.broken is not None:
            raise StoreError(f"{self._name}: {self.broken}; open the store again")

    def require_writer(self) -> None:
        """Raise a StoreError unless the store can be written to."""
        self.require_open()
        if self.folder is not None and self.folder.readonly:
            raise StoreError(f"{self._name}: opened with readonly=True; open the store without it to write")
        self.require_whole()

    def require_right(self) -> None:
        """Raise a StoreError unless this process is the only one that can write to the store."""
        self.require_writer()
        self.require_files()
        self._require_lock()

    def _require_lock(self) -> None:
        """Raise a LockedError and set ``broken`` if another process may write to the folder."""
        if self.folder is not None:
            try:
                self.folder.require_lock()
            except LockedError:
                self.broken = "another process may write to the store"
                raise

    @property
    def is_behind(self) -> bool:
        """Whether the folder lacks added or removed clients."""
        return self.folder is not None and bool(self._clients or self._dropped)

    @property
    def is_ahead(self) -> bool:
        """Whether clients were added or removed since the last commit."""
        return bool(self._steps_back)

    def add(self, clients: Sequence[ClientId]) -> list[int]:
        """Register clients and return their numbers. An error registers none of them."""
        registry, ids = self.content.registry, list(map(canonical, clients))
        if not ids:
            return []
        known = registry.index.numbers(ids) >= 0
        new = [client for client, is_known in zip(ids, known.tolist(), strict=True) if not is_known]
        with self._all_or_none():
            self._steps_back.append(partial(_remove, registry, new))
            numbers = [registry.add(ids[0])] if len(ids) == 1 else registry.add_all(ids).tolist()
            entries: dict[int, Any] = dict(zip(numbers, stored(ids), strict=True))
            if counted := self._counted:  # a client below the count returns; the folder need not list it
                entries.update((number, _UNLISTED) for number in numbers if number < counted)
            self._note(entries)
        return numbers

    def remove(self, client: ClientId) -> None:
        """Remove a client; the next commit removes its row."""
        registry = self.content.registry
        number = registry.number(client)
        with self._all_or_none():
            self._steps_back.append(partial(registry.put_back, number, client))
            registry.remove(client)
            self._drop(number)
            self._note({number: None if number < self._counted else _UNLISTED})

    def _drop(self, number: int) -> None:
        rows, slot = self.content.rows, self.content.rows.slot_of(number)
        if slot:
            self._steps_back += [partial(rows.put_back, number, slot), partial(dict.pop, self._dropped, number, None)]
            self._dropped[number] = slot
        rows.drop(number)

    def rollback(self) -> None:
        """Undo added and removed clients since the last commit, and discard staged rows."""
        self._back_to(0)
        self.content.rows.discard()

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Undo the changes of the block after an error. Each change adds its undo step first."""
        mark = len(self._steps_back)
        try:
            yield
        except BaseException:
            self._back_to(mark)
            raise

    def _back_to(self, mark: int) -> None:
        while len(self._steps_back) > mark:
            self._steps_back[-1]()  # each step may run twice
            self._steps_back.pop()

    def commit(
        self,
        round: int,
        vectors: Mapping[str, Any] | None,
        state: str | None,
        documents: Sequence[tuple[int, str]] = (),
    ) -> None:
        """Commit the staged rows with the vectors, the state and documents. None leaves vectors or state unchanged."""
        content = self.content
        entries = content.rows.proposed(round, sealed=self.folder is not None)
        table, taken = (content.vectors.table, []) if vectors is None else content.vectors.propose(vectors)
        synced = self.durability != "checkpoint" or self._is_checkpoint_due
        self._change(Change(round, state or content.state, table, taken, entries, documents), synced=synced)
        self._reclaim()

    @property
    def _is_checkpoint_due(self) -> bool:
        kept = None if self.folder is None or not self.folder.head.unsynced else self.folder.previous
        return kept is not None and len(kept.rows) + len(kept.listed) + len(kept.unlisted) > MOST_UNSYNCED

    def documents(self, first: int = 0) -> list[tuple[int, str]]:
        """Return the documents of all commits from the number ``first`` on, by number."""
        if self.folder is None:
            return [one for one in self.content.documents if one[0] >= first]
        return self.folder.index.documents(first)

    def publish(self) -> None:
        """Write the registered clients to the folder, and make all commits durable."""
        content = self.content
        if self.is_behind or (self.folder is not None and self.folder.head.unsynced):
            self._change(Change(content.round, content.state, content.vectors.table))
            self._reclaim()

    def _settle(self) -> None:
        """Make the commits of a dead process durable, or undo those since its last checkpoint if power was lost."""
        checkpoint = self.content.previous
        assert checkpoint is not None  # the index rejects a head without it
        if problems := self.content.problems_since(checkpoint):
            _log.warning(
                "%s: the system stopped before a checkpoint, and a commit is damaged; going back from round %s to the "
                "checkpoint after round %s (%s)",
                *(self._name, self.content.round, checkpoint.head.round, problems[0]),
            )
            self.undo()
        self.publish()

    def undo(self) -> bool:
        """Roll back, and return to the previous commit in a transaction. Return False if it is not kept."""
        self.rollback()
        folder = self.folder
        if folder is None or folder.previous is None:
            return False
        previous = folder.previous
        with self._all_or_none():
            with plausible(folder):
                self._go_back(previous)
            head, entries = previous.head, previous.rows[previous.rows["slot"] > 0]
            self._change(Change(head.round, head.state, head.vectors, [], entries), is_undo=True)
        self._reclaim()
        return True

    def _go_back(self, previous: Previous) -> None:
        """Restore the clients of the previous commit, and remove rows that were new in the last one."""
        registry, rows, listed = self.content.registry, self.content.rows, dict(previous.listed)
        if listed or previous.unlisted:
            ids = dict(zip(listed, restored(list(listed.values())), strict=True))
            ids |= {number: number if number < self._counted else None for number in previous.unlisted}
            now = registry.holders(ids)
            self._steps_back.append(partial(registry.reassign, now))
            registry.reassign(ids)
            self._note(listed | dict.fromkeys(previous.unlisted, _UNLISTED))
        numbers = previous.rows["number"]
        rows.grow(int(numbers.max(initial=-1)) + 1)
        for number in numbers[(previous.rows["slot"] == 0) & (rows.slot[numbers] > 0)].tolist():
            self._drop(number)

    def compact(self, *, erase: bool) -> None:
        """Move the highest rows and vectors to free slots, in a transaction, and free the space after them.

        Slots that readers may still use stay. The previous commit is dropped, so ``undo`` is no longer possible.

        With ``erase`` the files then have no bytes of unused slots and deleted entries; raise a StoreError if a reader
        or a view uses such a slot. Vectors stay in place, since the caller may have views of them.
        """
        content = self.content
        self.publish()
        if content.previous is not None:
            self._change(Change(content.round, content.state, content.vectors.table), keeps=False)
        self._reclaim()
        entries = _lowered_rows(content)
        try:
            table, taken = (content.vectors.table, []) if erase else content.vectors.lowered()
            self._change(Change(content.round, content.state, table, taken, entries), keeps=False)
        except BaseException:
            moved = set(entries["slot"].tolist()) - set(content.rows.slot[entries["number"]].tolist())
            content.rows.slots.give(moved)  # the transaction failed
            raise
        self._reclaim()
        if self.folder is None or self.folder.unpinned() == self.folder.head.sequence:
            for slots in content.all_slots:
                slots.shrink()
        if erase and self.folder is not None:
            left = content.vectors.retired + sum(slots.waiting for slots in content.all_slots)
            if left or self.folder.unpinned() < self.folder.head.sequence:
                raise StoreError(
                    f"{self._name}: {left} unused slots still have their bytes, since readers, or views of vectors, "
                    "use them; end the readers, and compact again with erase=True"
                )
            self.folder.erase()

    def _change(self, change: Change, *, synced: bool = True, keeps: bool = True, is_undo: bool = False) -> None:
        """Commit a change in memory and in the folder. Without ``synced``, a loss of power goes back to a checkpoint.

        The folder keeps the state before the change, for ``undo``, or that of the last checkpoint; a compaction with
        ``keeps=False``, and an undo, keep nothing.
        """
        content, folder = self.content, self.folder
        entries, plan = change.entries, None
        due = 0 if folder is None else folder.head.sequence + 1  # before any error, for ``_has``
        copy = folder is not None and folder.head.copy and not keeps
        keeps = keeps and not is_undo and (self._keeps or not synced) and folder is not None
        try:
            if removed := _without(self._dropped, entries):
                entries = np.concatenate([entries, row_entries(removed)])
            plan = self._plan(change, keeps=keeps, is_undo=is_undo)
            if folder is not None:
                parts: dict[str, Any] = {"vectors": change.table, "round": change.round, "state": change.state}
                head = replace(folder.head, **parts, copy=copy, unsynced=not synced)
                listed = sorted((number, client) for number, client in self._clients.items() if client is not _UNLISTED)
                removed = sorted(number for number, client in self._clients.items() if client is _UNLISTED)
                kept = self._before(entries["number"]) if keeps else None
                with span("publish"):
                    folder.publish(Transaction(head, entries, listed, removed, kept, change.documents))
            self._follow(plan, change)
        except BaseException as error:  # an interrupt may occur between any two lines
            if plan is None or (folder is not None and not self._has(due, error)):
                content.vectors.withdraw(change.taken)
                raise
            self.broken = "a commit was interrupted"
            self._follow(plan, change)
            self.broken = None
            if not isinstance(error, MemoryError):  # the commit is complete despite a MemoryError
                raise

    def _plan(self, change: Change, *, keeps: bool, is_undo: bool) -> CommitPlan:
        """Return the changes in memory.

        A slot is free once the index needs it neither for the last commit nor for the kept one.
        """
        entries, table = change.entries, change.table
        rows, vectors, previous = self.content.rows, self.content.vectors, self.content.previous
        forgets = 0 if self.folder is None else self.folder.head.sequence + 1
        old: list[int] = rows.slot[entries["number"]].tolist()
        replaced = [pair for pair in zip(entries["number"].tolist(), old, strict=True) if pair[1]]
        replaced += self._dropped.items()
        held = [] if previous is None or is_undo else used_slots(previous.rows).tolist()
        now, before = places(vectors.table), places({} if previous is None else previous.head.vectors)
        if not keeps:
            retired, kept = [*(slot for _, slot in replaced), *held], set()
        elif previous is not None and self.folder is not None and self.folder.head.unsynced:  # it stays the kept commit
            known = set(previous.rows["number"].tolist())
            retired, kept = [slot for number, slot in replaced if number in known], before
        else:
            retired, kept = held, now
        unused = (now | before) - places(table) - kept
        after = vectors.after(table, change.taken, [(forgets, place) for place in unused])
        written = rows.written + old.count(0)
        return CommitPlan(entries, not is_undo, written, retired, forgets, after, change.round, change.state)

    def _before(self, numbers: I64) -> Entries:
        """Return the folder's entries of these numbers."""
        before = self.content.rows.entries(numbers)
        if self._dropped:
            for place, number in enumerate(numbers.tolist()):
                before["slot"][place] = self._dropped.get(number, before["slot"][place])
        for name in ("round", "seal"):
            before[name][before["slot"] == 0] = 0
        return before

    def _has(self, due: int, error: BaseException) -> bool:
        """Whether the folder has the commit after an error. Set ``broken`` if this is unknown."""
        folder = self.folder
        assert folder is not None
        if isinstance(error, LockedError):
            self.broken = "another process has written to the store"
            return False
        self.broken = f"a commit failed, and whether it is durable is unknown ({error})"
        if folder.in_doubt:
            return False
        has = folder.has(due)
        self.broken = None
        return has

    def _follow(self, plan: CommitPlan, change: Change) -> None:
        """Update the memory after all steps that can fail. It may run twice."""
        plan.apply(self.content)
        if self.folder is None and change.documents:
            first = change.documents[0][0]
            self.content.documents = [*(one for one in self.content.documents if one[0] < first), *change.documents]
        self._clients.clear()
        self._dropped.clear()
        self._steps_back.clear()
        self.count += 1

    @property
    def _counted(self) -> int:
        """The client count of the folder; clients below it are not listed unless they were removed."""
        return 0 if self.folder is None else self.folder.head.clients

    def _note(self, changes: dict[int, Any]) -> None:
        """Record changes of the folder's list of clients."""
        if self.folder is not None:
            before = {number: self._clients[number] for number in changes.keys() & self._clients.keys()}
            self._steps_back.append(partial(_restore, self._clients, changes.keys(), before))
            self._clients.update(changes)

    def _reclaim(self) -> None:
        through = _EVERYTHING if self.folder is None else self.folder.unpinned()
        self.content.rows.slots.reclaim(through)
        self.content.vectors.reclaim(through)

    def refresh(self) -> None:
        """Show a reader the last commit."""
        self.require_open()
        if self.folder is not None and self.folder.readonly:
            self.content.refresh(self.folder)

    def after_commit(self) -> None:
        """Evict surplus rows, start to write back, and warn about slow readers."""
        with suppress(OSError, RuntimeError, MemoryError):  # the commit is already complete
            if self.folder is not None:
                self.folder.rows.evict()
            if self.background is not None and self.durability == "checkpoint":  # others sync each commit, or never
                self.background.write_back()
            self._warn_of_readers()

    def _warn_of_readers(self) -> None:
        """Warn once if readers keep more unused slots than the store uses."""
        rows, vectors = self.content.rows, self.content.vectors
        waiting = vectors.retired + sum(slots.waiting for slots in self.content.all_slots)
        used = rows.written + len(vectors.table)
        if self.folder is None or waiting <= max(used, FEW_SLOTS):
            self._has_warned = False
        elif not self._has_warned:
            self._has_warned = True
            processes = [f"process {process}, {behind} commits behind" for process, behind in self.folder.readers]
            _log.warning(
                "%s: %d unused slots are kept for readers, and %d slots are in use. The files grow with every round "
                "until the readers call refresh() or close() (%s)",
                self._name,
                waiting,
                used,
                "; ".join(processes) or "this process, or a view of a vector that is still in use",
            )

    def close(self) -> None:
        """Publish the last commit, then close and shorten the files. If publishing fails, raise and stay open."""
        folder, end = self.folder, self._finalizer
        if folder is None or end is None or self._closed:
            self._closed = True
            return
        if self.background is not None:
            self.background.close()
        writes = not folder.readonly and self.broken is None and self._process == os.getpid()
        is_ours = writes and self._publish_last()
        self._closed = True
        try:
            if is_ours:
                folder.trim()
        finally:
            end()

    def _publish_last(self) -> bool:
        """Publish the last commit; return whether this process may write to the folder."""
        try:
            self._require_lock()
        except StoreError:
            if self.is_behind:
                raise
            return False  # nothing is lost, and another process now writes the files
        self.publish()
        return True

    @property
    def _name(self) -> str:
        return "store" if self.folder is None else str(self.folder.path)

    def _wake_in_fork(self, folder: Folder) -> None:
        """Let a fork of a reader read the last commit. Reject a fork of a writer, whose parent owns the slots."""
        if not folder.readonly:
            raise StoreError(
                f"{self._name}: open for writing in the parent process {self._process}; open the store with "
                "readonly=True in this fork"
            )
        self._process = os.getpid()
        folder.pin_again()
        self.content.refresh(folder)


def _end(background: DiskThread | None, folder: Folder) -> None:
    if background is not None:
        background.close()
    folder.close()


def _remove(registry: Registry, clients: Iterable[ClientId]) -> list[int]:
    return [registry.remove(client) for client in clients if client in registry]


def _restore(clients: dict[int, Any], changed: Iterable[int], before: dict[int, Any]) -> None:
    for number in changed:
        clients.pop(number, None)
    clients.update(before)


def _without(numbers: Collection[int], entries: Entries) -> list[int]:
    listed = set(entries["number"].tolist()) if numbers else ()
    return [number for number in numbers if number not in listed]


def _lowered_rows(content: Content) -> Entries:
    """Copy the highest rows to lower free slots, except damaged rows; return the new entries."""
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


def device_of(medium: str, durability: str) -> str:
    """Return the device of a medium, "cpu" for host memory and files. Raise an UnknownNameError for unknown names."""
    kind = medium.partition(":")[0] if isinstance(medium, str) else None
    if kind not in get_args(Medium) or (kind != "cuda" and kind != medium):
        raise UnknownNameError.of("medium", medium, get_args(Medium))
    if durability not in get_args(Durability):
        raise UnknownNameError.of("durability", durability, get_args(Durability))
    return device_named(medium) if kind == "cuda" else CPU


def require_folder(keep_previous: bool, medium: str, *, readonly: bool) -> None:
    """Raise a RangeError if ``keep_previous`` is set for a store without a writable folder."""
    if keep_previous and (medium != "mmap" or readonly):
        got = "readonly=True" if readonly else f'medium="{medium}"'
        raise RangeError(f'keep_previous=True: needs medium="mmap" open for writing, not {got}')
