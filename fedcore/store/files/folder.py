"""A store's folder: its files opened and written to as one; made, replaced and deleted as a whole."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from glob import escape
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from fedcore.atomic_file import followed
from fedcore.errors import CorruptionError, LockedError, StoreError
from fedcore.store.files import disk
from fedcore.store.files.entries import Entries, Head, Listed, Previous, StoredId, all_stored
from fedcore.store.files.index import KEEPS_PREVIOUS, Index
from fedcore.store.files.inventory import (
    INDEX,
    LOCK,
    READERS,
    ROWS,
    VECTORS,
    delete,
    draft_of,
    drafts_of,
    is_data,
    is_disposable,
    is_own_folder,
    require_own,
    require_same,
    strangers,
    vector_files,
)
from fedcore.store.files.locks import ReaderPin, WriterLock, oldest_pin, readers
from fedcore.store.files.slot_file import Header, SlotFile, is_made_by, version_of
from fedcore.store.registry import Registry
from fedcore.store.slots import RowFormat

T = TypeVar("T")
TRIES = 20
"""How often a folder is read whose place others take meanwhile."""


class Folder:
    """An open store's files.

    Args:
        path: the folder of a store.
        readonly: open it beside a writer.
        durable: whether what is published survives a loss of power.
        lock: the right to write, if it is held already; it stays the caller's.
        lossy: open it also where commits were lost, at the last that is there.
        undoable: keep what each transaction replaces until the next; an index of an older format is raised to this one.

    Attributes:
        head: the head that was read or published last.
        seen: the commit that the rows had seen at least when it was opened; commits were lost if the index has fewer.

    Raises:
        StoreError: there is no store, or a newer one, or one with links in place of files.
        LockedError: another process writes to it.
        CorruptionError: one of its files is damaged.
    """

    def __init__(
        self,
        path: Path,
        *,
        readonly: bool,
        durable: bool,
        lock: WriterLock | None = None,
        lossy: bool = False,
        undoable: bool = False,
    ) -> None:
        self.path, self.undoable = path, undoable
        self.readonly, self._durable = readonly, durable
        self._sync_failed = False
        self._pin: ReaderPin | None = None
        self._lock: WriterLock | None = None
        self._files: dict[int, SlotFile] = {}  # of vectors, by payload
        try:
            with disk.explained("opening", path):
                self._open(lock, lossy)
        except BaseException:
            self.close()
            raise

    def _open(self, lock: WriterLock | None, lossy: bool) -> None:
        path, access = self.path, self._claim(lock)
        self.index = Index(path / INDEX, durable=self._durable, access=access)
        if not self.readonly:
            self.index.renew()
        self.head = self.index.head()
        self.format = RowFormat(self.head.codec, self.head.n)
        # An index that was raised to a format that keeps what is replaced stays beside files of slots of an older one.
        self._slots_version = self.index.version if self.index.version < KEEPS_PREVIOUS else version_of(path / ROWS)
        header = Header.of_rows(self.head.store, self.format, self._slots_version)
        self.rows = SlotFile(path / ROWS, header, writable=not self.readonly)
        self.seen = self.rows.sequence
        self.head = self.index.head()  # again: a writer may have gone on since
        self.rows.looked_at = self._is_looked_at()
        if self.seen > self.head.sequence and not lossy:
            raise CorruptionError(
                f"{path}: {INDEX} is at commit {self.head.sequence}, but {ROWS} has seen {self.seen}: commits were "
                f"lost; use a copy of the store, or see what `fedcore store recover {path}` can go back to"
            )
        if self.undoable:
            self.index.raise_format()
        if not self.readonly and self.unpinned() == self.head.sequence:
            self._sweep()

    def _claim(self, lock: WriterLock | None) -> Literal["rw", "ro", "immutable"]:
        """Take the right to write, or note a reader, or hold writers off; how the index is opened then."""
        path = self.path
        if not (path / INDEX).exists() or not (path / ROWS).exists():
            raise StoreError(f"{path}: expected the folder of a store, with {INDEX} and {ROWS} in it{_hint(path)}")
        require_own(path, writable=not self.readonly)
        if not self.readonly:
            if lock is None:
                disk.require_local(path)
                self._lock = WriterLock(path)
            (path / READERS).mkdir(exist_ok=True)  # a copy by a tool that leaves out empty folders lacks it
            return "rw"
        if disk.is_writable(path) and disk.is_writable(path / READERS) and not disk.is_network(path):
            self._pin = ReaderPin(path)
            return "ro"
        # Nothing can be noted here, so no writer may come.
        self._lock = WriterLock(path, shared=True)
        _require_closed(path)
        return "immutable"

    def vectors(self, payload: int) -> SlotFile:
        """The slots for vectors of so many bytes; a writer makes the file when it is first asked for."""
        if payload not in self._files:
            path = self.path / VECTORS.format(payload)
            header = Header.of_vectors(self.head.store, payload, self._slots_version)
            if self.readonly or payload in self._payloads():
                looked_at = self._is_looked_at()
                self._files[payload] = SlotFile(path, header, writable=not self.readonly, looked_at=looked_at)
            else:
                with disk.explained("making a file of vectors", path):
                    self._files[payload] = self._new_file(path, header)
        return self._files[payload]

    def _new_file(self, path: Path, header: Header) -> SlotFile:
        """A file that no commit knows yet; one that an error or an older commit has left is as good, if not empty."""
        if path.exists() and path.stat().st_size == 0:  # of a process that was killed while it made it
            path.unlink()
        if path.exists():
            file = SlotFile(path, header, writable=True, looked_at=self._is_looked_at())
        else:
            file = SlotFile.create(path, header)
        try:
            file.occupy(np.zeros(0, np.int64), self.head.sequence)
            disk.sync_path(self.path)  # before a commit knows it, its name has to be durable
        except BaseException:
            file.close()
            raise
        return file

    def publish(
        self,
        head: Head,
        rows: Entries,
        clients: Sequence[tuple[int, StoredId]],
        gone: Sequence[int],
        replaced: Entries | None = None,
        documents: Sequence[tuple[int, str]] = (),
    ) -> None:
        """Make the slots durable, and then the index, in one transaction, name them.

        Args:
            head, rows, clients, gone, documents: as for ``Index.write``.
            replaced: the rows' entries as they were, which are kept with the present head; None to keep nothing of it.

        Raises:
            StoreError: it could not be done.
            LockedError: another process has committed, and nothing of this one's may count any more.
        """
        if self._durable:
            try:
                for file in self._slot_files():
                    file.sync()
            except StoreError:  # after which the system may take for written what is not
                self._sync_failed = True
                raise
        kept = None if replaced is None else (self.head, replaced)
        self.head = self.index.write(
            replace(head, sequence=self.head.sequence + 1), rows, clients, gone, kept, documents
        )
        if self._durable:  # else the power could take the index, and leave the mark
            self.rows.mark(self.head.sequence)

    @property
    def previous(self) -> Previous | None:
        """The commit before ``head``, where it is kept."""
        return self.index.previous

    @property
    def in_doubt(self) -> bool:
        """Return whether something failed after which only opening the folder again shows what is durable."""
        return self._sync_failed or self.index.in_doubt

    def require_lock(self) -> None:
        """Raise a LockedError if another process may have the right to write that this one was given."""
        if self._lock is not None:
            self._lock.require()

    def has(self, sequence: int) -> bool:
        """Return whether the files hold this commit, after an error left ``publish``; then ``head`` is its head."""
        if not self.index.has(sequence):
            return False
        self.head, _, _ = self.index.load()
        return True

    def load(self) -> tuple[Entries, Listed]:
        """The rows and the listed clients as they were published last; sets ``head``.

        A reader then looks at this commit, until it loads again.
        """
        self.head, rows, clients = self.index.load()
        if self._pin is not None:
            self._pin.set(self.head.sequence)
            for file in self._slot_files():
                file.look_again()
            for payload in self._payloads():
                self.vectors(payload)  # open, lest the file be deleted later
        return rows, clients

    def unpinned(self) -> int:
        """The commit up to which what was retired is needed by no reader."""
        return min(oldest_pin(self.path), self.head.sequence)

    def _is_looked_at(self) -> bool:
        """Return whether a reader of a writer's store looks at an older commit."""
        return not self.readonly and self.unpinned() < self.head.sequence

    @property
    def readers(self) -> list[tuple[int, int]]:
        """Other processes that read the folder, and how many commits each is behind."""
        mine = os.getpid()
        last = self.head.sequence
        return [(process, last - commit) for process, commit in readers(self.path) if process != mine]

    @property
    def bytes(self) -> int:
        """The bytes that the files take of the disk."""
        disk.require_folder(self.path)
        with disk.explained("looking at", self.path):
            return sum(512 * entry.stat().st_blocks for entry in self.path.iterdir() if entry.is_file())

    def pin_again(self) -> None:
        """Note this process, which was forked from a reader, as a reader of its own."""
        if self._pin is not None:
            disk.require_folder(self.path)
            inherited, self._pin = self._pin, ReaderPin(self.path)
            inherited.close()

    def trim(self) -> None:
        """Let the files end behind their last slot, unless a reader may still look at what is behind it."""
        if self.unpinned() == self.head.sequence:
            for file in self._slot_files():
                file.trim()

    def close(self) -> None:
        """Close every file, whatever comes of the others."""
        with disk.explained("closing", self.path), ExitStack() as ends:
            for part in (self._lock, self._pin, getattr(self, "index", None), *self._slot_files()):
                if part is not None:
                    ends.callback(part.close)
            self._files.clear()

    def _sweep(self) -> None:
        """Delete this store's files of vectors that no commit names: a loss of power may leave one."""
        named = {VECTORS.format(payload) for payload in self._payloads()}
        with disk.explained("deleting a file of vectors", self.path):
            for file in vector_files(self.path):
                if file.name not in named and is_made_by(file, self.head.store):
                    file.unlink()

    def _payloads(self) -> set[int]:
        """The payloads of the vectors that the index names."""
        heads = [self.head] if self.previous is None else [self.head, self.previous.head]
        return {vector.payload for head in heads for vector in head.vectors.values()}

    def _slot_files(self) -> Iterator[SlotFile]:
        if hasattr(self, "rows"):
            yield self.rows
        yield from self._files.values()


def _require_closed(path: Path) -> None:
    log = path / f"{INDEX}-wal"
    if log.exists() and log.stat().st_size > 0:
        raise StoreError(
            f"{path}: expected a folder that can be written to, since the store was not closed and its last commits "
            f"are in {log.name}; copy it, or open it once with the right to write"
        )


def _hint(path: Path) -> str:
    """The end of an error's text: what else could have been meant."""
    if not path.exists():
        previous = sorted(path.parent.glob(f"{escape(path.name)}.previous-*"))
        return f"; a copy that was being replaced is in {previous[-1]}" if previous else ", got nothing there"
    return f", got {sorted(entry.name for entry in path.iterdir())[:8]}" if path.is_dir() else ", got a file"


def undisturbed(path: Path, read: Callable[[], T]) -> T:
    """Read a folder, once more where another folder has come to its place meanwhile; returns what ``read`` does.

    A store that is made, or a copy that is saved, takes its place in one step. A process that opens files by their
    names meanwhile finds some of the one and some of the other, and would report damage where there is none.

    Raises:
        StoreError: what ``read`` raised of a folder that stayed, or of ever other ones.
    """
    for _ in range(TRIES - 1):
        with ExitStack() as opened:
            before = None
            with suppress(OSError):  # open, so that no other folder has its number
                before = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # of a pipe, too, at once
                opened.callback(os.close, before)
            try:
                return read()
            except StoreError:
                if _is_at(before, path):
                    raise
    return read()


def _is_at(fd: int | None, path: Path) -> bool:
    """Return whether a path has the folder that is open, or has none where none is."""
    try:
        there = os.stat(path)
    except OSError:
        return fd is None
    return fd is not None and os.path.samestat(os.fstat(fd), there)


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
        existing: whether ``path`` may be a store already; no process can open it for writing meanwhile.

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
    """The files of the store at ``path``, which has no writer, by their names: for another machine."""
    with disk.explained("reading a store", path):
        require_own(path)
        return {name: _read_file(path / name) for name in sorted(os.listdir(path)) if is_data(name)}


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


def _read_file(path: Path) -> CarriedFile:
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
            disk.require_local(path)
        old = _old(path, existing)
        if old is not None:
            locks.callback(old.close)
        sweep(path)
        _make_folders(path.parent)
        place, lock = _claimed(path)
        locks.callback(lock.close)  # last of all: until the new store is in its place it must not look left over
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

    A folder without a store stays, unless its lock file marks it as the rest of one. So does a link, and a folder
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
        disk.write_in_place(place)
        try:
            return place, WriterLock(place, disposable=True)
        except StoreError as error:
            # Another process may have swept it away meanwhile, as left over.
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
    SlotFile.create(place / ROWS, Header.of_rows(head.store, form)).close()
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
        StoreError: it is one, or cannot be read.
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
    """Rename ``place`` to ``path``; the old store is deleted when the new one is there."""
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
