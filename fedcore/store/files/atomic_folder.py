"""Making a store's folder beside its place, and then putting it there in one step."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from fedcore.atomic_file import followed
from fedcore.clients.registry import Registry
from fedcore.errors import CorruptionError, LockedError, StoreError
from fedcore.store.files import file_system
from fedcore.store.files import system_calls as disk
from fedcore.store.files.index import Index
from fedcore.store.files.index_head import Head
from fedcore.store.files.inventory import (
    INDEX,
    LOCK,
    READERS,
    ROWS,
    delete,
    draft_of,
    drafts_of,
    is_data,
    is_disposable,
    is_own_folder,
    require_own,
    require_same,
    strangers,
)
from fedcore.store.files.locks import WriterLock
from fedcore.store.files.slot_file import SlotFile
from fedcore.store.files.store_folder import Folder, rows_header
from fedcore.store.files.stored_ids import Listed, all_stored
from fedcore.store.row_format import RowFormat


class CarriedFile(NamedTuple):
    """A file as bytes: its size, and what it holds from where on; the rest are zeros."""

    size: int
    spans: list[tuple[int, npt.NDArray[np.uint8]]]


Carried = dict[str, CarriedFile]
"""A store's files by their names."""
CHUNK = 1 << 26
"""Bytes that are read and written at once: Linux takes no more than 2 GiB."""


@contextmanager
def replacing(path: Path, form: RowFormat, registry: Registry, *, existing: bool) -> Iterator[Folder]:
    """A new store in a folder beside ``path``, open for writing; it takes its place when the block is done.

    A crash, or an error, leaves what was at ``path``. A link is followed, and stays.

    Args:
        path: where it will be.
        form: of the rows.
        registry: the clients.
        existing: whether ``path`` may be a store already; nobody can open it for writing meanwhile.

    Raises:
        StoreError: ``path`` is taken by something else, or cannot be written to, or not commit by commit.
        LockedError: the store there is open for writing.
    """
    with disk.explained("making a store", path), _draft(path, existing) as (place, lock):
        _make_files(place, form, registry)
        folder = Folder(place, readonly=False, durable=True, lock=lock)
        try:
            yield folder
        finally:
            folder.close()


def carried(path: Path) -> Carried:
    """The files of the store at ``path``, which nobody writes to, by their names: for another machine."""
    with disk.explained("reading a store", path):
        require_own(path)
        return {name: _read(path / name) for name in sorted(os.listdir(path)) if is_data(name)}


def put(path: Path, files: Carried) -> None:
    """Make a store at ``path`` of what was carried here; a store that is there stays until this one is whole.

    Raises:
        StoreError: a file has a name that no file of a store has; or what ``replacing`` raises it for.
        LockedError: the store there is open for writing.
    """
    if strange := [name for name in files if not is_data(name)]:
        raise StoreError(f"{path}: expected the files of a store, got {strange[0]!r} among them")
    with disk.explained("making a store", path), _draft(path, existing=True) as (place, _):
        (place / READERS).mkdir()
        for name, (size, spans) in files.items():
            with (place / name).open("xb", buffering=0) as file:
                disk.resize(file.fileno(), size)
                for start, data in spans:
                    disk.write(file.fileno(), data.tobytes(), start)
                disk.sync(file.fileno())


def _read(path: Path) -> CarriedFile:
    with path.open("rb", buffering=0) as file:
        fd, spans = file.fileno(), []
        for begin, end in disk.data_spans(fd):
            for start in range(begin, end, CHUNK):
                spans.append((start, np.frombuffer(os.pread(fd, min(CHUNK, end - start), start), np.uint8)))
        return CarriedFile(os.fstat(fd).st_size, spans)


@contextmanager
def _draft(path: Path, existing: bool) -> Iterator[tuple[Path, WriterLock]]:
    """An empty folder beside ``path``, locked, which takes its place when the block is done, or goes with an error."""
    with ExitStack() as locks:
        path = followed(path)
        if not existing:  # it will be written to in its place, and is no copy
            file_system.require_local(path)
        old = _old(path, existing)
        if old is not None:
            locks.callback(old.close)
        sweep(path)
        _make_folders(path.parent)
        place, lock = _claimed(path)
        locks.callback(lock.close)  # last of all: until the new store is in its place nobody may take it for left over
        try:
            disk.sync_path(place / LOCK)  # before the rest: without its mark no sweep deletes a draft
            yield place, lock
            disk.sync_path(place)
            _put_in_place(place, lock, path, old)
            disk.sync_path(path.parent)
        except BaseException:
            with suppress(OSError):
                delete(place)
            raise


def remove(path: Path, found: os.stat_result | None = None) -> None:
    """Delete the store at ``path``, with what drafts of it were left, and nothing that is not its own.

    A folder without a store stays, unless its lock file says that it is the rest of one. So does a link, and a folder
    of another user.

    Args:
        found: the folder that was looked at; another one in its place stays.

    Raises:
        StoreError: it cannot be deleted, or another folder is in its place.
        LockedError: it is open for writing.
    """
    with disk.explained("deleting a store", path):
        sweep(path)
        if os.path.lexists(path) and is_own_folder(path):
            _delete_unlocked(path, found or os.lstat(path))


def _delete_unlocked(path: Path, found: os.stat_result) -> None:
    """Delete a store's own entries, unless a process writes to it or it is no store."""
    if not (_is_store(path) or (path.is_dir() and is_disposable(path))):
        return
    require_same(path, found, os.lstat(path))
    lock = WriterLock(path, disposable=True)
    try:
        delete(path, found)
    finally:
        lock.close()


def _claimed(path: Path) -> tuple[Path, WriterLock]:
    """A new folder beside ``path``, locked."""
    while True:
        place = draft_of(path)
        place.mkdir()
        file_system.write_in_place(place)
        try:
            return place, WriterLock(place, disposable=True)
        except StoreError as error:
            # Who sweeps may have come between, and have taken it for left over.
            if not isinstance(error, LockedError) and place.exists():
                with suppress(OSError):
                    delete(place)
                raise


def _make_folders(folder: Path) -> None:
    """Make a folder and those above it, durably."""
    missing = [above for above in (folder, *folder.parents) if not above.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        disk.sync_path(made.parent)


def _make_files(place: Path, form: RowFormat, registry: Registry) -> None:
    (place / READERS).mkdir()
    count, numbers, ids = registry.columns()
    head = Head(uuid4().hex, form.codec, form.n, count)
    SlotFile.create(place / ROWS, rows_header(head.store, form)).close()
    Index.create(place / INDEX, head, Listed(numbers, all_stored(ids)))


def _old(path: Path, existing: bool) -> WriterLock | None:
    """The lock of the store that is there and may be replaced; None if nothing is there."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return None
    if not existing:
        raise StoreError(f"{path}: expected a new or empty folder, got one in use; ClientStore.open opens a store")
    if not _is_store(path):
        raise StoreError(f"{path}: expected a copy, an empty folder or nothing, got something else: it stays")
    others = strangers(path)
    if others:
        raise StoreError(
            f"{path}: expected a store and nothing else, got {', '.join(others[:8])} in it: move it elsewhere, since "
            "what is there is deleted once the new store is"
        )
    lock = WriterLock(path)
    try:
        require_copy(path)
    except BaseException:
        lock.close()
        raise
    return lock


def require_copy(path: Path, *, of_shard: bool = False) -> None:
    """Reject a store that a save may not replace: one that is no copy, or to which something was committed since.

    Args:
        of_shard: whether it is due to be a shard's of a cluster.

    Raises:
        StoreError: it is one, or it cannot be told.
    """
    require_own(path, writable=True)
    try:
        index = Index(path / INDEX, durable=False, access="ro")
        try:
            head = index.head()
        finally:
            index.close()
    except CorruptionError as error:
        raise StoreError(
            f"{path}: expected a copy that can be read, got {error}: delete it, then save again"
        ) from error
    state = json.loads(head.state or "null")
    is_shard = isinstance(state, dict) and "place" in state
    # Older versions have not marked their copies, which have one commit.
    if is_shard != of_shard or (not head.copy and head.sequence > 1):
        raise StoreError(
            f"{path}: expected a new or empty folder, or an older copy, got a store that went on: save to another "
            "folder, or delete that one if it is no longer needed"
        )


def _is_store(path: Path) -> bool:
    return (path / INDEX).exists() and (path / ROWS).exists()


def sweep(path: Path) -> None:
    """Delete the drafts of processes that have died over them."""
    for left in drafts_of(path):
        with suppress(StoreError, OSError):  # its process lives, or it is not this user's to delete
            found = os.lstat(left)
            if os.listdir(left):
                _delete_unlocked(left, found)
            else:
                left.rmdir()


def _put_in_place(place: Path, lock: WriterLock, path: Path, old: WriterLock | None) -> None:
    """Rename ``place`` to ``path``; the old store is deleted when the new one is there.

    Args:
        lock: of the new store.
        old: of the store that is there, if there is one.
    """
    if old is None:
        disk.rename(place, path)
        lock.mark(disposable=False)
        return
    old.mark(disposable=True)  # a process that is killed behind the exchange leaves it under the draft's name
    try:
        going = place
        if not disk.exchange(place, path):
            going = path.with_name(f"{path.name}.previous-{uuid4().hex[:12]}")
            disk.rename(path, going)
            disk.rename(place, path)
    except BaseException:
        with suppress(OSError):
            old.mark(disposable=False)
        raise
    lock.mark(disposable=False)
    disk.sync_path(path.parent)
    delete(going)
