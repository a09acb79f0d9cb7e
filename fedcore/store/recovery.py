"""The way out of a loss of commits: what is left, and going on from there."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedcore.errors import CorruptionError
from fedcore.store.content import Content
from fedcore.store.files.store_folder import Folder


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
        LockedError: somebody writes to it.
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
        rows = Content.read(folder).rows
        # Past every number that was given: the rows have not seen more than the index has then.
        folder.head = replace(folder.head, sequence=max(folder.seen, folder.head.sequence))
        folder.publish(folder.head, rows.entries(np.zeros(0, np.int64)), (), ())
    finally:
        folder.close()
    return found


def _remains(content: Content, folder: Folder) -> Remains:
    commit = folder.head.sequence
    return Remains(commit, folder.head.round, range(commit + 1, folder.seen + 1), content.problems())
