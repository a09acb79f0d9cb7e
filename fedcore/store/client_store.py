"""Client rows and server vectors, in memory or in files, changed by atomic commits."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from fedcore import runtime as randomness
from fedcore.arrays import CPU, I64
from fedcore.errors import CheckpointError, RangeError, ShapeError, StoreError
from fedcore.files import closed_on_error
from fedcore.kernels import Codes
from fedcore.kernels.rows import BLOCK
from fedcore.profiling import span
from fedcore.store.commits import Durability, Medium, Session, device_of, require_folder
from fedcore.store.content import Content
from fedcore.store.files.entries import Transaction, row_entries
from fedcore.store.files.folder import Folder, replacing, undisturbed
from fedcore.store.reader import CommittedRows
from fedcore.store.registry import ClientId, Registry
from fedcore.store.slots import Codec, Row, RowFormat
from fedcore.validation import absolute, check_integer


class ClientStore(CommittedRows, randomness.Closing):
    """A store of one row of n numbers per client and of named server vectors, changed by atomic commits.

    ``stage`` returns free slots that readers do not see. ``commit`` makes the staged rows, the vectors and a state
    current in one step; ``discard`` drops staged rows. After a crash the folder holds the last durable commit. A row
    that was never written uses neither memory nor disk space, and reads as zero.

    Args:
        clients: the number N of clients (ids 0..N - 1), or their ids: each an int in 0..2**64 - 1 or a str.
        n: elements of a row.
        medium: "ram"; "mmap" for rows in a file, which may exceed memory; or "cuda" (or "cuda:1") for rows in device
            memory, which only ``save`` writes to files.
        codec: the format of a row: "f32", "bf16", or "int8" with one scale per 64 elements. The caller rounds the
            numbers when it writes a row; ``Server`` rounds stochastically.
        path: the folder of an mmap store, which must be empty or not exist yet. ``ClientStore.open`` opens an existing
            store.
        durability: the durability of commits to an mmap store. "round": each commit survives a loss of power.
            "checkpoint": each commit survives a crash of the process; after a loss of power, the store is at its last
            ``checkpoint`` or a later commit. "none": each commit survives a crash of the process; after a loss of
            power, damaged rows are detected. The store makes a checkpoint of its own whenever 2,048 rows and clients
            have changed since the last one.
        resident_rows: the approximate number of rows of an mmap store that stay in memory between rounds. Default: as
            many as fit into 1 GiB.
        keep_previous: whether an mmap store keeps the data that its last transaction replaced, for ``undo``.

    Methods raise an UnknownClientError for an unregistered client.

    Only one process may write, one thread at a time. A forked process must open the folder itself. Other processes can
    read at the same time with ``ClientStore.open(path, readonly=True)``.

    The folder must be on a local disk; ext4, XFS, tmpfs and btrfs are tested. NFS, SMB, AFS and Coda support only
    ``save``. A full disk raises a StoreError, with one exception. On btrfs, after a snapshot or reflink of a store,
    even overwriting a row needs new disk space; if the disk is full, this write kills the process (SIGBUS). The last
    commit stays intact.

    Cost: one row (4 n, 2 n or 1.0625 n bytes) for each client with a row, and one more for each client of the largest
        cohort. From 64 KiB on, the size of a row is rounded up to a multiple of 4 KiB; from 1 MiB on, of 64 KiB. From
        the first row on, the store needs 25 bytes of memory for each client. The index of an mmap store has about 30
        bytes for each row. ``keep_previous`` adds a row and 32 bytes of index for each client of a cohort, and one copy
        of each vector. A commit reads each new row once for its checksums, unless ``note_checksums`` was called for it.

    >>> store = ClientStore(clients=3, n=2)
    >>> store.stage(1)[:] = [4, 5]
    >>> store.commit(round=0)
    >>> store.read(1), store.read(2)
    (array([4., 5.], dtype=float32), array([0., 0.], dtype=float32))
    """

    def __init__(
        self,
        clients: int | Iterable[ClientId],
        n: int,
        *,
        medium: Medium | str = "ram",
        codec: Codec = "f32",
        path: str | os.PathLike[str] | None = None,
        durability: Durability = "round",
        resident_rows: int | None = None,
        keep_previous: bool = False,
    ) -> None:
        device = device_of(medium, durability)
        require_folder(keep_previous, medium, readonly=False)
        form, registry, folder = RowFormat(codec, n, device), Registry(clients), None
        if (medium == "mmap") != (path is not None):
            only = f"path={str(path)!r}: only for medium='mmap'; save() writes a store in memory to a folder"
            raise RangeError("path: give a folder for medium='mmap'" if path is None else only)
        if path is not None:
            with replacing(absolute(path), form, registry, existing=False):
                pass
            durable = durability != "none"
            folder = Folder(absolute(path), readonly=False, durable=durable, keep_previous=keep_previous)
        super().__init__(Session(Content(form, registry, folder), durability, resident_rows))

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        medium: Medium | str = "mmap",
        readonly: bool = False,
        durability: Durability = "round",
        resident_rows: int | None = None,
        keep_previous: bool = False,
    ) -> Self:
        """Open the store in a folder at its last commit.

        Args:
            path: the folder.
            medium: "mmap" to continue in the folder; "ram" or "cuda" to load everything into host or device memory and
                leave the folder unchanged.
            readonly: whether to open the store for reading only; another process may write. The store shows the commit
                at which it was opened until ``refresh``, and the writer keeps that commit until then.
            durability, resident_rows: see ``ClientStore``.
            keep_previous: see ``ClientStore``. Data are kept from the next commit on. True upgrades a folder
                of an older format, which older versions of fedcore then cannot open. With False the next commit drops
                the kept data.

        Raises:
            StoreError: the folder has no store, or one of a newer format.
            LockedError: another process writes to the store.
            CorruptionError: a file is damaged. (A damaged row is detected when it is first read.)

        Cost: reads the index, about a second for a million rows; for "ram" and "cuda" reads everything.
        """
        device = device_of(medium, durability)
        require_folder(keep_previous, medium, readonly=readonly)
        place, readonly, durable = absolute(path), readonly or medium != "mmap", durability != "none"

        def read() -> Self:  # type: ignore[type-var]
            folder = Folder(place, readonly=readonly, durable=durable, keep_previous=keep_previous)
            with closed_on_error(folder):
                store = cls._of(Content.read(folder), durability, resident_rows)
            if medium == "mmap":
                return store
            with store:
                return store.in_memory(device)

        return undisturbed(place, read)

    @classmethod
    def _of(cls, content: Content, durability: Durability = "round", resident_rows: int | None = None) -> Self:
        store = cls.__new__(cls)
        CommittedRows.__init__(store, Session(content, durability, resident_rows))
        return store

    def in_memory(self, device: str = CPU) -> Self:
        """Return a copy of the commit that a reader shows, in host memory or on a device."""
        copy = Content(RowFormat(self.codec, self.n, device), self.registry, None)
        self._content.copy_to(copy)
        copy.documents = self.documents()
        return self._of(copy, self.durability)

    @property
    def durability(self) -> Durability:
        """The durability of commits; see ``Durability``."""
        return self._session.durability

    def read_into(self, device: str) -> None:
        """Let ``read`` return vectors on a device of host memory, such as a ``FileMemory``."""
        self._content.form.read_into(device)

    def stage(self, client: object, round: int | None = None) -> Row:
        """Return a writable slot, float32[n] or Codes, that becomes the client's row at ``commit``.

        The content of the slot is undefined. If the row was staged before, its checksums from ``note_checksums`` are
        discarded.

        Args:
            round: the round of the row. Default: the round of the commit.

        Raises:
            StoreError: the disk or the memory is full, or the store cannot be written to.
        """
        return self._stage(np.array([self._number(client)]), round)[0]

    def stage_all(self, clients: Sequence[ClientId], round: int | None = None) -> list[Row]:
        """Stage rows and return them in the order of ``clients``. An error may leave some staged; see ``discard``."""
        return self._stage(self._numbers(clients), round)

    def replace_rows(self, clients: Sequence[ClientId]) -> tuple[list[Row | None], list[Row]]:
        """Return the present rows of clients, and new staged rows that replace them at ``commit``."""
        numbers = self._numbers(clients)
        return self._read_all(numbers), self._stage(numbers, None)

    def room_for_checksums(self, rows: int) -> npt.NDArray[np.uint64] | None:
        """Return memory for the checksums of ``rows`` rows, for ``kernels.exchange`` and ``note_checksums``.

        Return None if checksums are not needed: a store in memory has none, and ``commit`` reads encoded rows anyway.
        """
        if self._folder is None or self._content.form.codec != "f32":
            return None
        return np.empty((rows, self._content.rows.slots.geometry.blocks), np.uint64)

    def note_checksums(self, clients: Sequence[ClientId], checksums: npt.NDArray[np.uint64]) -> None:
        """Set the checksums of staged rows, so that ``commit`` need not read the rows.

        The checksums are not verified. If one is wrong, its row counts as damaged when it is read. To write to a row
        again, stage it again and use the new view.

        Args:
            clients: the clients of the rows; clients without a staged row are ignored.
            checksums: uint64[k, blocks], for each row ``checksums(row, 65536)``.
        """
        due, rows = (len(clients), self._content.rows.slots.geometry.blocks), self._content.rows
        if checksums.dtype != np.uint64 or checksums.shape != due:
            got = f"{checksums.dtype}{list(checksums.shape)}"
            raise ShapeError(f"checksums: must be uint64{list(due)}, not {got}")
        for number, sums in zip(self._numbers(clients).tolist(), checksums.copy(), strict=True):
            if number in rows.staged:
                rows.sums[number] = sums

    def unstage(self, client: object) -> None:
        """Discard the client's staged row, if it exists."""
        self._content.rows.unstage(self._number(client))

    def discard(self) -> None:
        """Discard every staged row."""
        self._content.rows.discard()

    def commit(
        self,
        round: int,
        vectors: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
        *,
        documents: Sequence[tuple[int, str]] = (),
    ) -> None:
        """Make every staged row the row of its client, and free the old slots.

        Args:
            round: the round of the rows, 0..2**63 - 1.
            vectors: all named vectors, as arrays of numbers. They are copied, except arrays that ``vector`` returned,
                which stay in place. Default: unchanged.
            state: a dict that JSON can encode. Default: unchanged.
            documents: texts to keep permanently, with ascending numbers; they replace those from the first number on.

        Raises:
            StoreError: the disk is full, for example. The last commit is unchanged and the rows stay staged. Try again,
                unless the message says otherwise.

        Cost: reads each new vector once, and each new row without checksums from ``note_checksums``. With
            durability="round" it syncs the slots to disk, and then the index.
        """
        self._session.require_right()
        with span("commit"):
            self._session.commit(check_integer("round", round, 0, 2**63 - 1), vectors, _text(state), documents)
        self._session.after_commit()

    def documents(self, first: int = 0) -> list[tuple[int, str]]:
        """Return the documents of all commits as (number, text), from the number ``first`` on. An undo leaves them."""
        return self._session.documents(first)

    def checkpoint(self) -> None:
        """Make all commits survive a loss of power. Only stores with durability="checkpoint" need this call."""
        self._session.require_right()
        with span("save"):
            self._session.publish()

    @property
    def commits(self) -> int:
        """The number of commits, checkpoints, compactions and undos through this object."""
        return self._session.count

    @property
    def is_ahead(self) -> bool:
        """Whether clients were added or removed since the last commit."""
        return self._session.is_ahead

    def add(self, client: ClientId) -> None:
        """Register a client; the next commit, checkpoint or close writes it to the folder. See ``Registry.add``."""
        self.add_all([client])

    def add_all(self, clients: Iterable[ClientId]) -> list[int]:
        """Register clients and return their numbers in the registry. An error registers none of them."""
        self._session.require_writer()
        return self._session.add(list(clients))

    def forget(self, client: ClientId) -> None:
        """Remove a client. The next commit, checkpoint or close removes its row."""
        self._session.require_writer()
        self._session.remove(self.registry.check(client))

    def rollback(self) -> None:
        """Discard staged rows, and undo added and removed clients since the last commit."""
        self._session.rollback()

    def undo(self) -> bool:
        """Undo the last transaction: restore rows, vectors, clients, round and state.

        ``undo`` first calls ``rollback``. Only one transaction can be undone: a second ``undo`` does nothing until the
        next transaction. A transaction is one of:

        - a commit, with the added and removed clients before it;
        - with durability="checkpoint" all commits since the last checkpoint, or since the one before it if there is
          none yet;
        - a close or checkpoint that only writes added and removed clients.

        The undo is itself a transaction, as atomic and durable as a commit. Readers continue to see their commit.
        ``compact`` drops the kept data.

        Returns:
            Whether a transaction was undone; False if ``previous`` is None.

        Raises:
            StoreError: the store was opened without keep_previous=True, or the disk is full. Nothing has changed,
                unless the message says otherwise.

        Cost: like a commit without rows. Restored rows are checked when they are read.

        >>> import tempfile
        >>> store = ClientStore(2, n=1, medium="mmap", path=tempfile.mkdtemp(), keep_previous=True)
        >>> for round in range(2):
        ...     store.stage(1)[:] = round
        ...     store.commit(round)
        >>> store.previous.round, store.undo(), store.round, store.read(1), store.undo()
        (0, True, 0, array([0.], dtype=float32), False)
        """
        self._session.require_right()
        if not self.keep_previous:
            raise StoreError("undo: the previous data were not kept; open the store with keep_previous=True")
        return self._session.undo()

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        vectors: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
        parts: Callable[[Path], object] = lambda _: None,
    ) -> None:
        """Write a copy of the last commit to a folder. The copy has no data for ``undo``.

        Args:
            path: a new or empty folder, or an older copy, which is kept until the new one is complete. A store that was
                committed to is not a copy.
            vectors, state: values to write instead of the committed ones; see ``commit``.
            parts: a function that writes further stores into the folder, which is in its place afterwards.

        Raises:
            StoreError: the folder has other content or is in use, or the disk is full.
            CorruptionError: a row or vector is damaged; no copy is written.

        Cost: reads and writes every row once.
        """
        self._session.require_whole()
        self._session.require_files()
        self._content.save(absolute(path), vectors, _text(state), self.documents(), parts)

    def compact(self, *, erase: bool = False) -> None:
        """Move the highest rows to free slots, and free the memory or disk space after the last slot.

        This is a transaction that cannot be undone and drops the data kept for ``undo``. Slots that readers still use
        stay. Existing views stay at the old slots: read the rows again.

        Args:
            erase: whether the files must no longer contain any bytes of earlier rows, vectors and clients. It has no
                effect on stores in memory.

        Raises:
            StoreError: rows are staged, or the folder cannot be written to. With ``erase`` also: a reader, or a view of
                a vector, uses an earlier commit; the store is compacted, but has some of the bytes.
        """
        self._session.require_right()
        if self._content.rows.staged:
            raise StoreError(f"compact: {len(self._content.rows.staged)} rows are staged; commit or discard them first")
        self._session.compact(erase=erase)

    def refresh(self) -> None:
        """Show a reader the last commit. The content of existing views may change afterwards."""
        self._session.refresh()

    def close(self) -> None:
        """Make all commits durable, and close the files. A store in memory has no files.

        Raises:
            StoreError: a write failed. If the disk is full, the store stays open: free space and close it again. If the
                message says to open the store again, a second close only closes the files. If only the shortening of
                files failed, the store is durable and closed.
        """
        self._session.close()

    def _stage(self, numbers: I64, round: int | None) -> list[Row]:
        rows, listed = self._content.rows, numbers.tolist()
        if rows.staged:
            self._session.require_writer()
        else:
            self._session.require_right()  # once a round
        rows.make_room(max(listed, default=-1), self.registry.capacity)
        slots = rows.stage(listed, round)
        rows.slots.use(slots)
        return self._content.form.rows(rows.slots, slots, writable=True)


def _text(state: Mapping[str, Any] | None) -> str | None:
    if state is None:
        return None
    try:
        return json.dumps(dict(state))
    except (TypeError, ValueError) as error:
        raise RangeError(f"state: JSON cannot encode it: {error}") from None


def create(
    path: Path,
    form: RowFormat,
    registry: Registry,
    vectors: Mapping[str, Any],
    state: Mapping[str, Any],
    parts: Callable[[Path], object],
) -> None:
    """Write a new store with a first commit. After a kill the folder has all of it, or does not exist.

    ``parts`` writes further stores into the folder, before it is in its place.
    """
    with replacing(path, form, registry, existing=False) as folder:
        with ClientStore._of(Content(form, registry, folder)) as store:
            store.commit(0, vectors, state)
        parts(folder.path)


class Piece(NamedTuple):
    """The elements [start, stop) of a store's rows; both are multiples of 64 (an int8 block) or the row's end."""

    rows: ClientStore
    start: int
    stop: int


@contextmanager
def joined(
    path: Path,
    pieces: Sequence[Piece],
    vectors: Mapping[str, Any],
    state: Any,
    documents: Sequence[tuple[int, str]],
    row_done: Callable[[], object],
) -> Iterator[Path]:
    """Write a store of joined rows durably to a new or empty folder; after an error the folder has no store.

    The pieces are in the order of their elements; without elements, a row is one zero. Their stores must have the same
    codec, clients and rounds, which the new store gets. ``row_done`` is called after each row. The block may write
    further stores into the folder that it gets, which is then put in its place. Reads and writes each row once.
    """
    first = pieces[0].rows
    require_alike([piece.rows for piece in pieces])
    form = RowFormat(first.codec, max(1, sum(piece.stop - piece.start for piece in pieces)))
    with replacing(path, form, first.registry, existing=False) as folder:
        content = Content.read(folder)
        rows, numbers, rounds = content.rows, *first.written()
        rows.grow(int(numbers.max(initial=-1)) + 1)
        seals = []
        for number, round in zip(numbers.tolist(), rounds.tolist(), strict=True):
            slots = rows.stage([number], round)
            _copy(pieces, first.registry.id_of(number), form.rows(rows.slots, slots, writable=True)[0])
            seals.append(rows.slots.seal(slots[0]))
            rows.slots.let_go(slots)
            row_done()
        entries = row_entries(numbers, list(rows.staged.values()), rounds, seals)
        content.adopt(entries, vectors)
        head = replace(folder.head, round=first.round, state=json.dumps(state), vectors=content.vectors.table)
        folder.publish(Transaction(head, entries, documents=documents))
        yield folder.path


def require_alike(stores: Sequence[ClientStore]) -> None:
    """Raise a CheckpointError unless all stores have the same codec, clients, and rounds of rows."""
    facts = [
        (store.codec, store.round, store.registry.explicit(), *(column.tolist() for column in store.written()))
        for store in stores
    ]
    if any(one != facts[0] for one in facts):
        raise CheckpointError(
            f"{stores[0].path}: the clients or rounds of the stores differ; they may belong to different servers"
        )


def _copy(pieces: Sequence[Piece], client: Any, out: Row) -> None:
    at = 0
    for store, start, stop in pieces:
        row, end = store.row(client), at + stop - start
        for source, target, block in zip(_arrays(row), _arrays(out), (1, BLOCK), strict=False):
            target[-(-at // block) : -(-end // block)] = source[start // block : -(-stop // block)]
        at = end


def _arrays(row: Row | None) -> list[npt.NDArray[Any]]:
    """Return the arrays of a row: its elements, and for int8 also its scales, one per 64 elements."""
    if not isinstance(row, Codes):
        return [np.asarray(row)]
    return [row.codes] if row.scales is None else [row.codes, row.scales]


Occasion = Literal["a reply", "a history that is folded", "a warm start"]
"""The reason to write a row. A client writes at most one row per reason and round, so no two rows share random bits."""


def rounding_keys(
    store: ClientStore, occasion: Occasion, round: int, clients: Sequence[ClientId]
) -> npt.NDArray[np.uint64] | None:
    """Return rounding keys for ``kernels.exchange``, uint64[k, 2]; None for float32 rows.

    The keys depend only on the round, the client and the occasion. A round that is run again therefore has the same
    bits.
    """
    if store.codec == "f32":
        return None
    return randomness.keys(f"row of {occasion}", round=round, clients=clients)
