"""Statistics of a store, and recovery after a loss of commits."""

import json
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedcore.errors import CorruptionError
from fedcore.store.content import Content
from fedcore.store.files.entries import Transaction, row_entries, used_slots
from fedcore.store.files.folder import Folder, undisturbed
from fedcore.store.slots import VERSION


@dataclass(frozen=True)
class PreviousCommit:
    """The commit to which ``ClientStore.undo`` returns.

    Attributes:
        commit: the number of the commit.
        round: the round of the commit; None if it had no round.
        state: the state, as decoded from JSON.
        rows: the number of rows that are kept for ``undo``.
    """

    commit: int
    round: int | None
    state: Any
    rows: int


@dataclass(frozen=True)
class StoreInfo:
    """The result of ``ClientStore.info``.

    Attributes:
        format: the version of the file format.
        codec, n: the format of a row, and its number of elements.
        clients, rows: the number of registered clients, and of those with a row.
        free: the number of slots that new rows will reuse.
        commit: the number of the folder's last transaction; 0 for a store in memory.
        vectors: dtype and shape by name.
        bytes: the memory or disk space of rows and vectors, with free slots.
        readers: other processes that read the folder, and the number of commits that each is behind. The writer does
            not reuse their slots.
        previous: the previous commit, if the folder keeps it.
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
    """Return the state of the last commit to the store in a folder, without reading rows; see ``ClientStore.state``."""
    folder = undisturbed(path, lambda: Folder(path, readonly=True, durable=False))
    folder.close()
    return None if folder.head.state is None else json.loads(folder.head.state)


def info(content: Content) -> StoreInfo:
    """Return the statistics of a store's content."""
    folder, rows, vectors = content.folder, content.rows, content.vectors
    free = rows.slots.free
    if folder is not None and folder.readonly:  # a reader knows only the slots that the index names
        kept = [] if content.previous is None else used_slots(content.previous.rows).tolist()
        free = max([int(rows.slot.max(initial=0)), *kept]) - rows.written - len(kept)
    return StoreInfo(
        path=None if folder is None else folder.path,
        format=VERSION if folder is None else folder.index.version,
        codec=content.form.codec,
        n=content.form.n,
        row_bytes=rows.slots.stride,
        clients=len(content.registry),
        rows=rows.written,
        free=free,
        round=content.round,
        vectors={name: (entry.dtype, entry.shape) for name, entry in vectors.table.items()},
        bytes=sum(slots.high * slots.stride for slots in content.all_slots) if folder is None else folder.bytes,
        commit=0 if folder is None else folder.head.sequence,
        readers=() if folder is None else tuple(folder.readers),
        previous=previous_commit(content),
    )


def previous_commit(content: Content) -> PreviousCommit | None:
    """Return the previous commit, if it is kept."""
    previous = content.previous
    if previous is None:
        return None
    head, rows = previous.head, len(used_slots(previous.rows))
    return PreviousCommit(head.sequence, head.round, json.loads(head.state or "null"), rows)


@dataclass(frozen=True)
class Remains:
    """The state of a store after a loss of commits.

    Attributes:
        commit, round: the number and the round of the last commit that is left.
        lost: the numbers of the lost commits, which the row file recorded and the index did not; empty if none was
            lost.
        problems: one line for each row or vector that lost commits have overwritten or damaged.
    """

    commit: int
    round: int | None
    lost: range
    problems: list[str]


def look(path: Path) -> Remains:
    """Return the state of the store in a folder after a loss of commits. Reads all of it and changes nothing."""
    with closing(Folder(path, readonly=True, durable=False, lossy=True)) as folder:
        problems = Content.read(folder).problems(with_previous=False)
        commit = folder.head.sequence
        return Remains(commit, folder.head.round, range(commit + 1, folder.seen + 1), problems)


def give_up(path: Path) -> Remains:
    """Discard lost commits, so that the store continues from the last commit that is left.

    The change is one transaction: after an interrupt the store is either unchanged or recovered. If the commit that is
    left is damaged, raise a CorruptionError and change nothing.
    """
    found = look(path)  # read-only: opening the folder for writing would delete unneeded files
    if not found.lost:
        return found
    if found.problems:
        more = " and more" if len(found.problems) > 1 else ""
        raise CorruptionError(
            f"{path}: commit {found.commit} is damaged: {found.problems[0]}{more}; use a copy of the store"
        )
    with closing(Folder(path, readonly=False, durable=True, lossy=True)) as folder:
        Content.read(folder)
        # Above every number so far, so that the row file has not recorded more commits than the index.
        folder.head = replace(folder.head, sequence=max(folder.seen, folder.head.sequence), unsynced=False)
        folder.publish(Transaction(folder.head, row_entries(())))
    return found
