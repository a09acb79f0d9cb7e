"""The folder of a store: its files are opened and written together, and replaced or deleted as a whole."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from glob import escape
from pathlib import Path
from shlex import quote
from typing import Literal, NamedTuple, TypeVar
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from fedcore.errors import CorruptionError, LockedError, StoreError
from fedcore.files import FOLDER, UNLISTED, OpenFolder, closed_on_error, is_own_folder, require_same, resolve_own_links
from fedcore.store.files import disk, inventory
from fedcore.store.files.entries import Entries, Head, Listed, Previous, Transaction, stored
from fedcore.store.files.index import KEEPS_PREVIOUS, Index
from fedcore.store.files.inventory import INDEX, LOCK, LOG, READERS, ROWS, VECTORS
from fedcore.store.files.locks import ReaderPin, WriterLock, lock_problem, oldest_pin, pins
from fedcore.store.files.slot_file import Header, SlotFile, is_made_by, version_of
from fedcore.store.registry import Registry
from fedcore.store.slots import RowFormat

T = TypeVar("T")
TRIES = 20
"""Attempts to read a folder that other processes replace meanwhile."""


class Folder:
    """The files of an open store.

    Args:
        durable: whether published commits survive a loss of power.
        lock: the right to write, if the caller already has it; the caller keeps it.
        lossy: whether to open the store even if commits were lost, at the last commit that is left.
        keep_previous: whether to keep the data that each transaction replaces until the next one. True upgrades an
            older index.

    Attributes:
        head: the head that was read or published last.
        seen: the last commit that the row file had recorded on opening. If the index has fewer, commits were lost.
    """

    def __init__(
        self,
        path: Path,
        *,
        readonly: bool,
        durable: bool,
        lock: WriterLock | None = None,
        lossy: bool = False,
        keep_previous: bool = False,
    ) -> None:
        self.path, self.keep_previous = path, keep_previous
        self.readonly, self._durable = readonly, durable
        self._sync_failed = False
        self._at = OpenFolder(path, -1)
        self._pin: ReaderPin | None = None
        self._lock: WriterLock | None = None
        self._files: dict[int, SlotFile] = {}  # of vectors, by payload
        with closed_on_error(self), disk.explained("opening", path):
            if not _is_store(path):
                raise StoreError(f"{path}: not a store: {INDEX} or {ROWS} is missing{_hint(path)}")
            self._at = OpenFolder.of(path)
            self._open(lock, lossy)

    def _open(self, lock: WriterLock | None, lossy: bool) -> None:
        path, access = self.path, self._claim(lock)
        self.index = Index(self._at, durable=self._durable, access=access)
        if not self.readonly:
            self.index.renew()
        self.head = self.index.head()
        self.format = RowFormat(self.head.codec, self.head.n)
        # An upgraded index that keeps the previous commit may be next to slot files of an older format.
        self._slots_version = self.index.version if self.index.version < KEEPS_PREVIOUS else version_of(self._at, ROWS)
        header = Header.of_rows(self.head.store, self.format, self._slots_version)
        self.rows = SlotFile(self._at, ROWS, header, writable=not self.readonly)
        self.seen = self.rows.sequence
        self.head = self.index.head()  # read again, since a writer may have committed meanwhile
        self.rows.is_read = self._is_read()
        if self.seen > self.head.sequence and not lossy:
            raise CorruptionError(
                f"{path}: commits were lost: {INDEX} ends at commit {self.head.sequence}, but {ROWS} at {self.seen}; "
                f"use a copy of the store, or see what `fedcore store recover {quote(str(path))}` can restore"
            )
        if self.keep_previous:
            self.index.raise_format()
        if not self.readonly and self.unpinned() == self.head.sequence:
            self._sweep()

    def _claim(self, lock: WriterLock | None) -> Literal["rw", "ro", "immutable"]:
        """Take the right to write, register a reader, or exclude writers. Return the access mode of the index."""
        path = self.path
        inventory.require_own(self._at, writable=not self.readonly)
        if not self.readonly:
            if lock is None:
                disk.require_local(path)
                self._lock = WriterLock(path, at=self._at)
            with suppress(FileExistsError):  # missing after a copy with a tool that skips empty folders
                os.mkdir(READERS, dir_fd=self._at.fd)
            return "rw"
        if disk.is_writable(path) and disk.is_writable(path / READERS) and not disk.is_network(path):
            self._pin = ReaderPin(self._at)
            return "ro"
        # A reader cannot be registered, so writers must be excluded.
        self._lock = WriterLock(path, at=self._at, shared=True)
        if (log := self._at.found(LOG)) and log.st_size > 0:
            raise StoreError(
                f"{path}: the store was not closed, so its last commits are in {LOG}, and the folder is "
                "read-only; copy the folder, or open the store once with write access"
            )
        return "immutable"

    def vectors(self, payload: int) -> SlotFile:
        """Return the slots for vectors of this size. A writer creates their file on first use."""
        if payload not in self._files:
            name = VECTORS.format(payload)
            header = Header.of_vectors(self.head.store, payload, self._slots_version)
            if self.readonly or payload in self._payloads():
                file = SlotFile(self._at, name, header, writable=not self.readonly, is_read=self._is_read())
                self._files[payload] = file
            else:
                with disk.explained("creating a file of vectors", self.path / name):
                    self._files[payload] = self._new_file(name, header)
        return self._files[payload]

    def _new_file(self, name: str, header: Header) -> SlotFile:
        """Return a file that no commit names yet. An error or an older commit may have left one."""
        found = self._at.found(name)
        if found and found.st_size == 0:  # a process was killed while it created the file
            os.unlink(name, dir_fd=self._at.fd)
        if found and found.st_size > 0:
            file = SlotFile(self._at, name, header, writable=True, is_read=self._is_read())
        else:
            file = SlotFile.create(self._at, name, header)
        with closed_on_error(file):
            file.occupy(np.zeros(0, np.int64), self.head.sequence)
            disk.sync_path(self.path.resolve())  # its name must be durable before a commit uses it
        return file

    def publish(self, transaction: Transaction) -> None:
        """Make the slots durable, and then write the index in one transaction that names them.

        An ``unsynced`` transaction waits for neither; until the next one, the index keeps the last checkpoint too.
        """
        synced = self._durable and not transaction.head.unsynced
        if synced:
            try:
                for file in self._slot_files():
                    file.sync()
            except StoreError:  # after this the system may treat lost pages as written
                self._sync_failed = True
                raise
        head = replace(transaction.head, sequence=self.head.sequence + 1)
        self.head = self.index.write(transaction._replace(head=head), self.head)
        if synced:  # otherwise a loss of power could keep this mark and lose the index
            self.rows.mark(self.head.sequence)

    @property
    def previous(self) -> Previous | None:
        """The commit before ``head``, if it is kept."""
        return self.index.previous

    @property
    def in_doubt(self) -> bool:
        """Whether a sync failed. The durable data are then unknown until the folder is opened again."""
        return self._sync_failed or self.index.in_doubt

    def problems(self) -> list[str | None]:
        """Return the faults of the lock file and of the index; None for none."""
        return [lock_problem(self._at), *(f"{self.index.path}: {line}" for line in self.index.check())]

    def require_lock(self) -> None:
        """Raise a LockedError if another process may have taken the right to write."""
        if self._lock is not None:
            self._lock.require()

    def has(self, sequence: int) -> bool:
        """Whether the files have this commit after ``publish`` failed. If so, set ``head``."""
        if not self.index.has(sequence):
            return False
        self.head, _, _ = self.index.load()
        return True

    def load(self) -> tuple[Entries, Listed]:
        """Return the rows and listed clients of the last commit, and set ``head``. A reader then uses this commit."""
        self.head, rows, clients = self.index.load()
        if self._pin is not None:
            self._pin.set(self.head.sequence)
            for file in self._slot_files():
                file.look_again()
            for payload in self._payloads():
                self.vectors(payload)  # open it now, since the file may be deleted later
        return rows, clients

    def unpinned(self) -> int:
        """Return the last commit whose retired slots no reader needs."""
        return min(oldest_pin(self._at), self.head.sequence)

    def _is_read(self) -> bool:
        """Whether a reader of this writer's store uses an older commit."""
        return not self.readonly and self.unpinned() < self.head.sequence

    @property
    def readers(self) -> list[tuple[int, int]]:
        """The other processes that read the folder, and the number of commits that each is behind."""
        last = self.head.sequence
        return [(process, last - commit) for process, commit in pins(self._at) if process not in (0, os.getpid())]

    @property
    def bytes(self) -> int:
        """The disk space of the files, in bytes."""
        disk.require_folder(self.path)
        with disk.explained("reading", self.path):
            return sum(512 * entry.stat().st_blocks for entry in self.path.iterdir() if entry.is_file())

    def pin_again(self) -> None:
        """Register this process, a fork of a reader, as a reader."""
        if self._pin is not None:
            disk.require_folder(self.path)
            inherited, self._pin = self._pin, ReaderPin(self._at)
            inherited.close()

    def erase(self) -> None:
        """Erase the content of free slots and the deleted entries of the index, durably."""
        for file in self._slot_files():
            file.erase()
        self.index.vacuum()

    def trim(self) -> None:
        """Shorten the files to their last slot, unless a reader may still use slots after it."""
        if self.unpinned() == self.head.sequence:
            for file in self._slot_files():
                file.trim()

    def close(self) -> None:
        """Close every file, even if closing one of them fails."""
        with disk.explained("closing", self.path), ExitStack() as ends:
            for part in (self._at, self._lock, self._pin, getattr(self, "index", None), *self._slot_files()):
                if part is not None:
                    ends.callback(part.close)
            self._files.clear()
            self._at = self._at._replace(fd=-1)  # another file may get the number next

    def _sweep(self) -> None:
        """Delete this store's files of vectors that no commit names. A loss of power may leave one."""
        named = {VECTORS.format(payload) for payload in self._payloads()}
        with disk.explained("deleting a file of vectors", self.path):
            for name in inventory.vector_files(self._at):
                if name not in named and is_made_by(self._at, name, self.head.store):
                    os.unlink(name, dir_fd=self._at.fd)

    def _payloads(self) -> set[int]:
        heads = [self.head] if self.previous is None else [self.head, self.previous.head]
        return {vector.payload for head in heads for vector in head.vectors.values()}

    def _slot_files(self) -> Iterator[SlotFile]:
        if hasattr(self, "rows"):
            yield self.rows
        yield from self._files.values()


def _hint(path: Path) -> str:
    """Return the end of an error text: a hint about the content of the path."""
    if not path.exists():
        for previous in sorted(path.parent.glob(f"{escape(path.name)}.previous-*"), reverse=True):
            return f"; {previous} is an older copy of an interrupted save"
        return "; the folder does not exist"
    if path.is_dir():
        return f"; the folder has {sorted(entry.name for entry in path.iterdir())[:8]}"
    return "; the path is a file"


def undisturbed(path: Path, read: Callable[[], T]) -> T:
    """Return ``read()``; call it again if a different folder has replaced the one at ``path`` meanwhile.

    A new or saved store replaces a folder in one step. A process that opens its files meanwhile gets some of each store
    and would report false damage.
    """
    is_link = os.path.islink(path)
    for _ in range(TRIES - 1):
        with ExitStack() as opened:
            before = None
            with suppress(OSError):  # kept open, so that no other folder gets its inode number
                before = os.open(path, os.O_RDONLY | os.O_NONBLOCK | UNLISTED)  # a pipe does not block
                opened.callback(os.close, before)
            try:
                return read()
            except StoreError:
                if _is_at(before, path) or os.path.islink(path) != is_link:
                    raise
    return read()


def _is_at(fd: int | None, path: Path) -> bool:
    """Whether the path leads to the open folder, or to nothing if no folder is open."""
    try:
        present = os.stat(path)
    except OSError:
        return fd is None
    return fd is not None and os.path.samestat(os.fstat(fd), present)


class CarriedFile(NamedTuple):
    """The content of a file: its size, and (start, data) of each part that is not zero."""

    size: int
    spans: list[tuple[int, npt.NDArray[np.uint8]]]


Carried = dict[str, CarriedFile]
"""The files of a store by name."""
CHUNK = 1 << 26
"""Bytes of one read or write. Linux allows at most 2 GiB."""


@contextmanager
def replacing(path: Path, form: RowFormat, registry: Registry, *, existing: bool) -> Iterator[Folder]:
    """Yield a new store in a draft folder, open for writing. At the end of the block it replaces ``path``.

    A crash or an error leaves the old content of ``path``. If ``path`` is a link, its target is replaced. With
    ``existing``, ``path`` may be a store; no process can open it for writing during the block.
    """
    with disk.explained("creating a store", path), _draft(path, existing) as (place, lock):
        count, numbers, ids = registry.columns()
        head = Head(uuid4().hex, form.codec, form.n, count)
        SlotFile.create(place, ROWS, Header.of_rows(head.store, form)).close()
        Index.create(place.path / INDEX, head, Listed(numbers, stored(ids)))
        with closing(Folder(place.path, readonly=False, durable=True, lock=lock)) as folder:
            yield folder


def carried(path: Path) -> Carried:
    """Return the files of the store at ``path``, to send them to another machine. The store must have no writer."""
    with disk.explained("reading a store", path), closing(OpenFolder.of(path)) as folder:
        inventory.require_own(folder)
        return {name: _read_file(folder, name) for name in sorted(os.listdir(folder.fd)) if inventory.is_data(name)}


def put(path: Path, files: Carried) -> None:
    """Create a store at ``path`` from files of ``carried``. An existing store stays until the new one is complete."""
    if strange := [name for name in files if not inventory.is_data(name)]:
        raise StoreError(f"{path}: {strange[0]!r} is not a file of a store")
    with disk.explained("creating a store", path), _draft(path, existing=True) as (place, _):
        for name, (size, spans) in files.items():
            with open(name, "xb", buffering=0, opener=place.open) as file:
                disk.resize(file.fileno(), size)
                for start, data in spans:
                    disk.write(file.fileno(), data.tobytes(), start)
                disk.sync(file.fileno())


def _read_file(folder: OpenFolder, name: str) -> CarriedFile:
    with open(name, "rb", buffering=0, opener=folder.open) as file:
        fd, spans = file.fileno(), []
        for begin, end in disk.data_spans(fd):
            for start in range(begin, end, CHUNK):
                spans.append((start, np.frombuffer(os.pread(fd, min(CHUNK, end - start), start), np.uint8)))
        return CarriedFile(os.fstat(fd).st_size, spans)


@contextmanager
def _draft(path: Path, existing: bool) -> Iterator[tuple[OpenFolder, WriterLock]]:
    """Yield a locked folder without files that replaces ``path`` at the end of the block; an error deletes it."""
    with ExitStack() as locks:
        path = resolve_own_links(path)
        if not existing:  # the store will be committed to
            disk.require_local(path)
        old = _old(path, existing)
        if old is not None:
            locks.callback(old.close)
        sweep(path)
        _make_folders(path.parent)
        place, lock = _new_draft(path)
        locks.callback(lock.close)  # released at the end: no sweep may delete the draft before it is in its place
        try:
            disk.sync_path(place / LOCK)  # synced first: a sweep deletes a draft only if its lock file is marked
            with closing(OpenFolder.of(place, FOLDER)) as at:
                os.mkdir(READERS, dir_fd=at.fd)
                yield at, lock
            disk.sync_path(place)
            _put_in_place(place, lock, path, old)
            disk.sync_path(path.parent)
        except BaseException:
            with suppress(OSError):
                inventory.delete(place)
            raise


def remove(path: Path, found: os.stat_result | None = None) -> None:
    """Delete the store at ``path`` and leftovers of its drafts, and nothing else.

    A folder without a store stays, unless its lock file marks it as the rest of one. So do links, folders of other
    users, and any folder other than ``found``, if given.
    """
    with disk.explained("deleting a store", path):
        sweep(path)
        if os.path.lexists(path) and is_own_folder(path):
            _delete_unlocked(path, found or os.lstat(path))


def _delete_unlocked(path: Path, found: os.stat_result) -> None:
    """Delete a store's own entries, unless a process writes to the store or the folder is not a store."""
    if not (_is_store(path) or (path.is_dir() and inventory.is_disposable(path))):
        return
    require_same(path, found, os.lstat(path))
    with closing(WriterLock(path, disposable=True)):
        inventory.delete(path, found)


def _new_draft(path: Path) -> tuple[Path, WriterLock]:
    while True:
        place = inventory.draft_of(path)
        place.mkdir()
        disk.write_in_place(place)
        try:
            return place, WriterLock(place, disposable=True)
        except StoreError as error:
            # Another process may have deleted the folder meanwhile as a leftover.
            if not isinstance(error, LockedError) and place.exists():
                with suppress(OSError):
                    inventory.delete(place)
                raise


def _make_folders(folder: Path) -> None:
    missing = [above for above in (folder, *folder.parents) if not above.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for created in missing:
        disk.sync_path(created.parent)


def _old(path: Path, existing: bool) -> WriterLock | None:
    """Return the lock of an existing store that may be replaced; None if the path is free."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return None
    if not existing and not (_is_store(path) and _is_unused(path)):
        raise StoreError(
            f"{path}: is a file, or not empty; give a new or empty folder, or open a store with ClientStore.open"
        )
    if not _is_store(path):
        raise StoreError(f"{path}: neither an older copy nor an empty folder; save to a different folder")
    others = inventory.strangers(path) + [inventory.UPDATES] * (path / inventory.UPDATES).exists()
    if others:
        raise StoreError(
            f"{path}: contains files that are not the store's: {', '.join(others[:8])}; move them elsewhere, since the "
            "old store will be deleted"
        )
    lock = WriterLock(path)
    with closed_on_error(lock):
        if existing or not _is_unused(path):
            require_copy(path)
    return lock


def require_copy(path: Path, *, of_shard: bool = False) -> None:
    """Reject a store, or a shard's store, that a save may not replace since it is not a copy or was committed to."""
    try:
        with _index_of(path, writable=True) as index:
            head = index.head()
    except CorruptionError as error:
        raise StoreError(f"{path}: the copy cannot be read: {error}; delete it, then save again") from error
    state = json.loads(head.state or "null")
    is_shard = isinstance(state, dict) and "place" in state
    # Older versions of fedcore did not mark their copies, which have one commit.
    if is_shard != of_shard or (not head.copy and head.sequence > 1):
        raise StoreError(
            f"{path}: not an older copy but a store with commits; save to a different folder, or delete this one"
        )


def _is_unused(path: Path) -> bool:
    """Whether a store has no commit, because the process that created it was killed or has not gone on."""
    with suppress(CorruptionError), _index_of(path) as index:
        return index.head().sequence == 0
    return False


@contextmanager
def _index_of(path: Path, *, writable: bool = False) -> Iterator[Index]:
    """Open the index of a store, whose folder is checked; see ``inventory.require_own``."""
    with disk.explained("opening", path), closing(OpenFolder.of(path)) as folder:
        inventory.require_own(folder, writable=writable)
        with closing(Index(folder, durable=False, access="ro")) as index:
            yield index


def _is_store(path: Path) -> bool:
    return (path / INDEX).exists() and (path / ROWS).exists()


def sweep(path: Path) -> None:
    """Delete the drafts that dead processes have left."""
    for left in inventory.drafts_of(path):
        with suppress(StoreError, OSError):  # its process is running, or this user may not delete it
            found = os.lstat(left)
            if os.listdir(left):
                _delete_unlocked(left, found)
            else:
                left.rmdir()


def _put_in_place(place: Path, lock: WriterLock, path: Path, old: WriterLock | None) -> None:
    """Rename ``place`` to ``path``, and delete the old store."""
    if old is None:
        try:
            disk.rename(place, path)
        except OSError as error:
            if not _is_store(path):
                raise
            raise LockedError(f"{path}: another process has created a store there meanwhile; open it") from error
        lock.mark(disposable=False)
        return
    old.mark(disposable=True)  # a process that is killed after the exchange leaves the old store under the draft's name
    try:
        replaced = place
        if not disk.exchange(place, path):
            replaced = path.with_name(f"{path.name}.previous-{uuid4().hex[:12]}")
            disk.rename(path, replaced)
            disk.rename(place, path)
    except BaseException:
        with suppress(OSError):
            old.mark(disposable=False)
        raise
    lock.mark(disposable=False)
    disk.sync_path(path.parent)
    inventory.delete(replaced)
