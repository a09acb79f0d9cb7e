"""A store's folder: its files, opened and written to as one."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from glob import escape
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from fedcore.errors import CorruptionError, StoreError
from fedcore.store.files import file_system
from fedcore.store.files import system_calls as disk
from fedcore.store.files.index import KEEPS_PREVIOUS, Index
from fedcore.store.files.index_head import Head
from fedcore.store.files.inventory import INDEX, READERS, ROWS, VECTORS, require_own, vector_files
from fedcore.store.files.locks import ReaderPin, WriterLock, oldest_pin, readers
from fedcore.store.files.row_entries import RowEntries
from fedcore.store.files.slot_file import SlotFile
from fedcore.store.files.slot_file_header import Header, is_made_by, version_of
from fedcore.store.files.stored_ids import Listed, StoredId
from fedcore.store.geometry import VERSION, Geometry
from fedcore.store.row_format import RowFormat

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
        previous: the commit before it, where it is kept.
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
        header = rows_header(self.head.store, self.format, self._slots_version)
        self.rows = SlotFile(path / ROWS, header, writable=not self.readonly)
        self.seen = self.rows.sequence
        self.head = self.index.head()  # again: a writer may have gone on since
        self.previous = self.index.previous
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
                file_system.require_local(path)
                self._lock = WriterLock(path)
            (path / READERS).mkdir(exist_ok=True)  # a copy by a tool that leaves out empty folders lacks it
            return "rw"
        if disk.is_writable(path) and disk.is_writable(path / READERS) and not file_system.is_network(path):
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
            header = vectors_header(self.head.store, payload, self._slots_version)
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
        rows: RowEntries,
        clients: Sequence[tuple[int, StoredId]],
        gone: Sequence[int],
        replaced: RowEntries | None = None,
        documents: Sequence[tuple[int, str]] = (),
    ) -> None:
        """Make the slots durable, and then the index, in one transaction, say what they are.

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
        self.previous = self.index.previous
        if self._durable:  # else the power could take the index, and leave the mark
            self.rows.mark(self.head.sequence)

    @property
    def in_doubt(self) -> bool:
        """Tell whether something failed after which only opening the folder again tells what is durable."""
        return self._sync_failed or self.index.in_doubt

    def require_lock(self) -> None:
        """Raise a LockedError if somebody else may have the right to write that this process was given."""
        if self._lock is not None:
            self._lock.require()

    def has(self, sequence: int) -> bool:
        """Tell whether the files hold this commit, after an error left ``publish``; then ``head`` is its head."""
        if not self.index.has(sequence):
            return False
        self.head, _, _ = self.index.load()
        self.previous = self.index.previous
        return True

    def load(self) -> tuple[RowEntries, Listed]:
        """The rows and the listed clients as they were published last; sets ``head``.

        A reader then looks at this commit, until it loads again.
        """
        self.head, rows, clients = self.index.load()
        self.previous = self.index.previous
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
        """Tell whether a reader of a writer's store looks at an older commit."""
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
        """Let the files end behind their last slot, unless somebody may still look at what is behind it."""
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


def rows_header(store: str, form: RowFormat, version: int = VERSION) -> Header:
    """The header of the file of rows."""
    stride = Geometry.of(form.payload, version).stride
    return Header(bytes.fromhex(store), "rows", form.codec, form.n, form.payload, stride, version)


def vectors_header(store: str, payload: int, version: int) -> Header:
    """The header of the file of vectors of so many bytes."""
    return Header(bytes.fromhex(store), "vectors", "", 0, payload, Geometry.of(payload, version).stride, version)


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

    A store that is made, or a copy that is saved, takes its place in one step. Who opens files by their names meanwhile
    finds some of the one and some of the other, and would tell of damage where there is none.

    Raises:
        StoreError: what ``read`` raised of a folder that stayed, or of ever other ones.
    """
    for _ in range(TRIES - 1):
        with ExitStack() as opened:
            before = None
            with suppress(OSError):  # open, so that no other folder has its number
                before = os.open(path, os.O_RDONLY)
                opened.callback(os.close, before)
            try:
                return read()
            except StoreError:
                if _is_at(before, path):
                    raise
    return read()


def _is_at(fd: int | None, path: Path) -> bool:
    """Tell whether a path has the folder that is open, or has none where none is."""
    try:
        there = os.stat(path)
    except OSError:
        return fd is None
    return fd is not None and os.path.samestat(os.fstat(fd), there)
