"""A store's form and content, in numbers."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcore.store.content import Content
from fedcore.store.files.store_folder import Folder, undisturbed
from fedcore.store.geometry import VERSION


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
    kept = np.zeros(0, np.int64) if content.previous is None else content.previous.rows.used
    highest = max(int(content.rows.slot.max(initial=0)), int(kept.max(initial=0)))
    return highest - content.rows.written - len(kept)


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
    return PreviousCommit(head.sequence, head.round, state, len(previous.rows.used))
