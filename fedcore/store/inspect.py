"""A store's form and content in numbers, and the recovery from a loss of commits."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedcore.errors import CorruptionError
from fedcore.store.content import Content
from fedcore.store.files.entries import row_entries, used_slots
from fedcore.store.files.folder import Folder, undisturbed
from fedcore.store.slots import VERSION


@dataclass(frozen=True)
class PreviousCommit:
    """The commit before the last, to which ``ClientStore.undo`` goes back.

    Attributes:
        commit: its number.
        round: its round, or None where there was none yet.
        state: its state, as JSON gives it back.
        rows: how many rows are kept for it.
    """

    commit: int
    round: int | None
    state: Any
    rows: int


@dataclass(frozen=True)
class StoreInfo:
    """The result of ``ClientStore.info``.

    Attributes:
        path: the folder; None for a store in memory.
        format: the version of the files' format.
        codec, n: how a row is stored, and its elements.
        row_bytes: what a row takes.
        clients: how many are registered.
        rows: how many have a row.
        free: slots below the highest that the next rows will use again.
        round: the last committed round, or None.
        commit: the number of the folder's last commit, which is that of its transactions; 0 for a store in memory.
        vectors: dtype and shape by name.
        bytes: of memory or disk that rows and vectors take, free ones included.
        readers: other processes that read the folder, and how many commits each is behind: what they look at, and
            what was written since, is not used again.
        previous: the commit before the last, where the folder keeps it: the last can be taken back.
    """

    path: Path | None
    format: int
    codec: str
    n: int
    row_bytes: int
    clients: int
    rows: int
    free: int
    round: int | None
    vectors: dict[str, tuple[str, tuple[int, ...]]]
    bytes: int
    commit: int = 0
    readers: tuple[tuple[int, int], ...] = ()
    previous: PreviousCommit | None = None


def state_of(path: Path) -> Any:
    """The state of the last commit to the store in a folder, as ``ClientStore.state``; its rows are not read.

    Raises:
        StoreError, CorruptionError: there is no store, or its head was damaged.
    """
    folder = undisturbed(path, lambda: Folder(path, readonly=True, durable=False))
    folder.close()
    return None if folder.head.state is None else json.loads(folder.head.state)


def _free_seen(content: Content) -> int:
    """The free slots as far as a reader sees."""
    kept: list[int] = [] if content.previous is None else used_slots(content.previous.rows).tolist()
    return max([int(content.rows.slot.max(initial=0)), *kept]) - content.rows.written - len(kept)


def info(content: Content) -> StoreInfo:
    """Look at a content."""
    folder, rows = content.folder, content.rows
    vectors, readonly = content.vectors, folder is not None and folder.readonly
    return StoreInfo(
        path=None if folder is None else folder.path,
        format=VERSION if folder is None else folder.index.version,
        codec=content.form.codec,
        n=content.form.n,
        row_bytes=rows.slots.stride,
        clients=len(content.registry),
        rows=rows.written,
        free=_free_seen(content) if readonly else rows.slots.free,
        round=content.round,
        vectors={name: (entry.dtype, entry.shape) for name, entry in vectors.table.items()},
        bytes=rows.slots.high * rows.slots.stride + vectors.bytes if folder is None else folder.bytes,
        commit=0 if folder is None else folder.head.sequence,
        readers=() if folder is None else tuple(folder.readers),
        previous=previous_commit(content),
    )


def previous_commit(content: Content) -> PreviousCommit | None:
    """The commit before the last, where it is kept."""
    previous = content.previous
    if previous is None:
        return None
    head = previous.head
    state = None if head.state is None else json.loads(head.state)
    return PreviousCommit(head.sequence, head.round, state, len(used_slots(previous.rows)))


@dataclass(frozen=True)
class Remains:
    """The remains of a store.

    Attributes:
        commit, round: of the last commit that is there.
        lost: the commits after it, which the rows have seen and the index has not; empty if none was lost.
        problems: what lost commits have written over since: a line for each damaged row or vector.
    """

    commit: int
    round: int | None
    lost: range
    problems: list[str]


def look(path: Path) -> Remains:
    """The remains of the store in a folder, all of which is read; nothing is changed.

    Raises:
        StoreError, CorruptionError: as ``ClientStore.open``, except a loss of commits.
    """
    folder = Folder(path, readonly=True, durable=False, lossy=True)
    try:
        return _remains(Content.read(folder), folder)
    finally:
        folder.close()


def give_up(path: Path) -> Remains:
    """Let a store that lost commits go on from the last that is there, as if the others had never been.

    It is a transaction: interrupted, the store is as before, or recovered.

    Raises:
        StoreError: as ``ClientStore.open``.
        LockedError: another process writes to it.
        CorruptionError: the commit that is there is not whole; nothing is changed.
    """
    found = look(path)  # without the right to write, with which what is not needed would be deleted
    if not found.lost:
        return found
    if found.problems:
        raise CorruptionError(
            f"{path}: expected commit {found.commit} to be whole, got {found.problems[0]}"
            f"{' and more' if len(found.problems) > 1 else ''}; use a copy of the store"
        )
    folder = Folder(path, readonly=False, durable=True, lossy=True)
    try:
        Content.read(folder)
        # Past every number that was given: the rows have not seen more than the index has then.
        folder.head = replace(folder.head, sequence=max(folder.seen, folder.head.sequence))
        folder.publish(folder.head, row_entries(()), (), ())
    finally:
        folder.close()
    return found


def _remains(content: Content, folder: Folder) -> Remains:
    commit = folder.head.sequence
    return Remains(commit, folder.head.round, range(commit + 1, folder.seen + 1), content.problems())
