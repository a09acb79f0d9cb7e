"""Making a store's folder beside its place, and then putting it there in one step."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from fedcore.errors import LockedError, StoreError
from fedcore.store import disk
from fedcore.store.folder import INDEX, ROWS, Folder, rows_header
from fedcore.store.head import Head
from fedcore.store.index import Index
from fedcore.store.registry import Registry
from fedcore.store.row_format import RowFormat
from fedcore.store.sharing import LOCK, READERS, WriterLock
from fedcore.store.slot_file import SlotFile
from fedcore.store.stored_ids import stored


@contextmanager
def draft(path: Path, form: RowFormat, registry: Registry, *, replacing: bool) -> Iterator[Folder]:
    """A new store in a folder beside ``path``, open for writing; it takes its place when the block is done.

    A crash, or an error, leaves what was at ``path``.

    Args:
        path: where it will be.
        form: of the rows.
        registry: the clients.
        replacing: whether ``path`` may be a store already.

    Raises:
        StoreError: ``path`` is taken by something else, or cannot be written to.
        LockedError: the store there is open for writing.
    """
    _require_free(path, replacing)
    _sweep(path)
    place = path.with_name(f"{path.name}.draft-{uuid4().hex[:12]}")
    with disk.explained("making a store", path):
        place.mkdir(parents=True)
        try:
            lock = WriterLock(place)
            try:
                _make_files(place, form, registry)
            except BaseException:
                lock.close()
                raise
            folder = Folder(place, readonly=False, durable=True, lock=lock)
            try:
                yield folder
            finally:
                folder.close()
            disk.sync_path(place)
            _put_in_place(place, path)
            disk.sync_path(path.parent)
        except BaseException:
            _delete(place)
            raise


def _make_files(place: Path, form: RowFormat, registry: Registry) -> None:
    (place / READERS).mkdir()
    clients, listed = registry.explicit()
    head = Head(uuid4().hex, form.codec, form.n, clients)
    SlotFile.create(place / ROWS, rows_header(head.store, form)).close()
    Index.create(place / INDEX, head, [(number, stored(client)) for number, client in listed])


def _require_free(path: Path, replacing: bool) -> None:
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not replacing:
        raise StoreError(f"{path}: expected a new or empty folder, got one in use; ClientStore.open opens a store")
    if not (path / INDEX).exists() or not (path / ROWS).exists():
        raise StoreError(f"{path}: expected a store, an empty folder or nothing, got something else: it stays")
    WriterLock(path).close()


def _sweep(path: Path) -> None:
    """Delete the drafts of processes that have died over them."""
    for left in path.parent.glob(f"{path.name}.draft-*"):
        try:
            if (left / LOCK).exists():
                WriterLock(left).close()
        except LockedError:
            continue
        _delete(left)


def _delete(folder: Path) -> None:
    """Delete a store, its lock last: whoever comes upon a part of it can tell that nobody is at it any more."""
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != LOCK:
            entry.unlink(missing_ok=True)
    (folder / LOCK).unlink(missing_ok=True)
    with suppress(OSError):  # another process is making something in it: a draft that is not locked yet is empty
        folder.rmdir()


def _put_in_place(place: Path, path: Path) -> None:
    """Rename ``place`` to ``path``; what was there is deleted when the new store is there."""
    if not path.exists() or not any(path.iterdir()):
        disk.rename(place, path)
    elif disk.exchange(place, path):
        disk.sync_path(path.parent)
        _delete(place)
    else:
        previous = path.with_name(f"{path.name}.previous-{uuid4().hex[:12]}")
        disk.rename(path, previous)
        disk.rename(place, path)
        disk.sync_path(path.parent)
        _delete(previous)
