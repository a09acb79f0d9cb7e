"""One row per client: its last mean gradient, in memory or in files, changed by whole rounds."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from fedcore import randomness
from fedcore.arguments import absolute, whole
from fedcore.arrays import I64
from fedcore.errors import CheckpointError, RangeError, ShapeError, StoreError
from fedcore.kernels import Codes
from fedcore.kernels.rows import BLOCK
from fedcore.profiling import span
from fedcore.store.commits import Durability, Medium, Session, require_files, require_names
from fedcore.store.content import Content
from fedcore.store.files.entries import row_entries
from fedcore.store.files.folder import Folder, replacing, undisturbed
from fedcore.store.reader import CommittedRows
from fedcore.store.registry import ClientId, Registry
from fedcore.store.slots import Codec, Row, RowFormat


class ClientStore(CommittedRows):
    """Rows of n elements by client id, and named vectors of the server, changed by whole rounds.

    A round's rows are *staged* into free slots, invisible to readers, and *commit* makes them the clients' rows all
    at once, together with the vectors and a state; *discard* forgets them. So a round that is left half-way leaves
    everything as it was, on the disk too: a folder that is opened again holds what was committed last. A row that was
    never written takes neither memory nor disk and reads as zero.

    Args:
        clients: a count (ids 0..count - 1) or the ids, each an int in 0..2**64 - 1 or a str.
        n: elements of a row.
        medium: "ram"; "mmap" for rows in a file that may be larger than memory; or "cuda" (or "cuda:1", say) for rows
            in that device's memory, which leave it by ``save`` alone.
        codec: how a row is stored: "f32", "bf16", or "int8" with a scale for every 64 elements. Its writer rounds a
            row; a ``Server`` does so stochastically.
        path: the folder of an mmap store: new, or empty. ``ClientStore.open`` opens it again.
        durability: when an mmap store is safe. "round": a committed round survives a loss of power. "checkpoint":
            ``checkpoint`` makes what was committed safe, and a crash goes back to the last one. "none": a committed
            round survives the death of the process; after a loss of power rows may be damaged, which is noticed.
        resident_rows: about how many rows of an mmap store stay in the process's memory between rounds; None for as
            many as 1 GiB holds. What a round uses comes on top.
        undoable: whether an mmap store keeps what its last transaction replaced, so that ``undo`` can take that back.

    Raises:
        UnknownNameError, RangeError: an argument is not as described.
        DeviceError: there is no such device.
        StoreError: the folder cannot be made.

    One process writes, and calls on one store take turns; a process that is forked opens the folder itself. Any number
    may read beside the writer (``ClientStore.open(path, readonly=True)``).

    A folder is meant for a local ext4, XFS, tmpfs or btrfs, where a full disk is a StoreError. On btrfs a new store's
    files are overwritten in place; what a snapshot, a reflink or a copy elsewhere makes of them is copied on writing,
    and there a full disk can end the process (SIGBUS), the last committed round intact. On NFS, SMB, AFS and Coda a
    store cannot be opened for writing; copies by ``save`` may lie there. Others were not tried.

    Cost: a row's bytes (4 n, 2 n, or 1.0625 n) for each client that has one and for each of the largest cohort (where
        ``undoable`` for each of the largest two in turn, and one more of each vector), rounded up to 4 KiB from 64 KiB
        on and to 64 KiB from 1 MiB on; 25 bytes a client, once one has a row; for mmap about 30 bytes a row in the
        index too, and 32 for each of the last cohort where ``undoable``. A commit reads each new row once for its
        checksums, unless its writer has noted them, as a ``Server``'s rounds do for float32 rows.

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
        undoable: bool = False,
    ) -> None:
        device = require_names(medium, durability)
        require_files(undoable, medium, readonly=False)
        form, registry = RowFormat(codec, n, device), Registry(clients)
        if medium != "mmap":
            if path is not None:
                raise RangeError(f"path: expected none for a store in memory, got {str(path)!r}; save() writes one")
            super().__init__(Session(Content(form, registry, None), durability, resident_rows))
            return
        if path is None:
            raise RangeError("path: expected a folder for medium='mmap', got None")
        place = absolute(path)
        with replacing(place, form, registry, existing=False):
            pass
        folder = Folder(place, readonly=False, durable=durability != "none", undoable=undoable)
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
        undoable: bool = False,
    ) -> Self:
        """A store from its folder, as it was committed last.

        Args:
            path: the folder.
            medium: "mmap" to go on in the folder; "ram", or "cuda", to load everything into the host's memory, or a
                device's, and leave the folder alone.
            readonly: read beside a writer. What was committed when it was opened is seen until ``refresh``, and the
                writer keeps that for so long.
            durability, resident_rows: as for a new store.
            undoable: as for a new store. Each writer decides anew: what the last transaction replaced is
                there as long as no writer without it commits. An older format is raised to the present one, in one
                step, which older versions of fedcore then refuse; rows and vectors stay as they lie.

        Raises:
            StoreError: there is no store, or one of a newer format.
            LockedError: another process writes to it.
            CorruptionError: a file was damaged. (A damaged row is noticed when it is first read.)

        Cost: reads the index, about a second for a million rows; for "ram" everything.
        """
        device = require_names(medium, durability)
        require_files(undoable, medium, readonly=readonly)
        place, readonly, durable = absolute(path), readonly or medium != "mmap", durability != "none"

        def read() -> Content:
            folder = Folder(place, readonly=readonly, durable=durable, undoable=undoable)
            try:
                content = Content.read(folder)
                if medium != "mmap":
                    loaded = Content(RowFormat(content.form.codec, content.form.n, device), content.registry, None)
                    content.copy_to(loaded)
                    loaded.documents = folder.index.documents()
                    content = loaded
            except BaseException:
                folder.close()
                raise
            if medium != "mmap":
                folder.close()
            return content

        store = cls.__new__(cls)
        CommittedRows.__init__(
            store, Session(undisturbed(place, read) if readonly else read(), durability, resident_rows)
        )
        return store

    @property
    def durability(self) -> Durability:
        """The moment from which a commit is safe: see ``Durability``."""
        return self._session.durability

    def stage(self, client: object, round: int | None = None) -> Row:
        """A slot, float32[n] or Codes of undefined content, that becomes the client's row at ``commit``.

        Whatever checksums were noted of it before are forgotten.

        Args:
            client: whose.
            round: of the row, where that is not the commit's: a row that is written anew in another form, say.

        Raises:
            UnknownClientError: no such client is registered.
            StoreError: there is no room for one more, or the store cannot be written to.
        """
        return self._stage(np.array([self._number(client)]), round)[0]

    def stage_all(self, clients: Sequence[ClientId], round: int | None = None) -> list[Row]:
        """``stage`` for many clients, in their order; after an error some are staged, which ``discard`` forgets."""
        return self._stage(self._numbers(clients), round)

    def replace_rows(self, clients: Sequence[ClientId]) -> tuple[list[Row | None], list[Row]]:
        """``rows_of`` and ``stage_all`` at once: the clients' rows, and those that become theirs at ``commit``."""
        numbers = self._numbers(clients)
        return self._read_all(numbers), self._stage(numbers, None)

    def room_for_checksums(self, rows: int) -> npt.NDArray[np.uint64] | None:
        """Memory for the checksums of so many rows, for ``kernels.exchange`` and then for ``note_checksums``.

        None where they are of no use: a store in memory keeps none, and rows through a codec are read at the commit.
        """
        if self._folder is None or self._content.form.codec != "f32":
            return None
        return np.empty((rows, self._content.rows.slots.geometry.blocks), np.uint64)

    def note_checksums(self, clients: Sequence[ClientId], checksums: npt.NDArray[np.uint64]) -> None:
        """Note the checksums of staged rows as they lie now, so that ``commit`` does not read those rows.

        They are not checked, and a row that has other ones would be found damaged. ``stage`` forgets them: to write
        to a row once more, stage it once more, and no longer write to the view that ``stage`` returned before.

        Args:
            clients: whose; a row that is not staged counts for nothing.
            checksums: uint64[k, blocks], each row's by ``checksums(row, 65536)``. Read-only.

        Raises:
            ShapeError, UnknownClientError: an argument is not as described; nothing was noted.
        """
        due, rows = (len(clients), self._content.rows.slots.geometry.blocks), self._content.rows
        if checksums.dtype != np.uint64 or checksums.shape != due:
            got = f"{checksums.dtype}{list(checksums.shape)}"
            raise ShapeError(f"checksums: expected uint64{list(due)}, got {got}")
        for number, sums in zip(self._numbers(clients).tolist(), checksums.copy(), strict=True):
            rows.note_sums(number, sums)

    def unstage(self, client: object) -> None:
        """Forget the client's staged row, if there is one."""
        self._content.rows.unstage(self._number(client))

    def discard(self) -> None:
        """Forget every staged row."""
        self._content.rows.discard()

    def commit(
        self,
        round: int,
        vectors: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
        *,
        document: str | None = None,
    ) -> None:
        """Make every staged row its client's row, written in ``round``; their old slots become free.

        Args:
            round: 0..2**63 - 1.
            vectors: arrays of numbers by name, all that there are from now on; None leaves them as they are. They are
                copied, except what ``vector`` returned, which stays where it is.
            state: what JSON can hold; None leaves it as it is.
            document: a text that stays with this round for good: ``documents`` has those of all rounds.

        Raises:
            RangeError, DtypeError: an argument is not as described; nothing has changed.
            StoreError: the disk is full, say. The last committed round is as it was, the rows stay staged, and it
                may be tried again unless the message says otherwise.

        Cost: reads each new vector once, and each new row without noted checksums; with durability="round"
            writes them to the disk, waits for it, and then for the index.
        """
        self._session.require_right()
        with span("commit"):
            self._session.commits.commit(whole("round", round, 0, 2**63 - 1), vectors, _text(state), document)
        self._session.after_commit()

    def documents(self) -> list[tuple[int, str]]:
        """The documents of the commits, (round, text) in the order of the rounds."""
        return self._session.commits.documents()

    def checkpoint(self) -> None:
        """Make everything that was committed safe, where durability="checkpoint"; elsewhere it is already."""
        self._session.require_right()
        with span("save"):
            self._session.commits.publish()

    @property
    def commits(self) -> int:
        """The number of commits, checkpoints, compactions and undos of this object: it grows as soon as one counts."""
        return self._session.commits.count

    @property
    def is_ahead(self) -> bool:
        """Return whether clients arrived or departed since the last commit."""
        return self._session.commits.is_ahead

    def add(self, client: ClientId) -> None:
        """Register a client that arrives; the folder knows it with the next commit, checkpoint or close.

        Raises:
            UnknownClientError: it is no id.
            RangeError: it is registered already.
        """
        self.add_all([client])

    def add_all(self, clients: Iterable[ClientId]) -> list[int]:
        """Register many clients that arrive, or, if one is refused, none of them.

        Returns:
            their numbers in the registry.

        Raises:
            UnknownClientError, RangeError: as ``add``.
        """
        self._session.require_writer()
        return self._session.commits.arrive(list(clients))

    def forget(self, client: ClientId) -> None:
        """A client departs: it is registered no more, and its row goes with the next commit, checkpoint or close.

        Raises:
            UnknownClientError: no such client is registered.
        """
        self._session.require_writer()
        self._session.commits.leave(self.registry.check(client))

    def rollback(self) -> None:
        """Forget all that came since the last commit: staged rows, clients that arrived, and departures."""
        self._session.commits.rollback()

    def undo(self) -> bool:
        """Take the last transaction back: rows, vectors, clients, round and state are what they were before it.

        What came since the last commit (staged rows, arrivals, departures) is forgotten first, as by ``rollback``. One
        transaction can be taken back, so a second ``undo`` changes nothing more, until something is committed again.

        A transaction is what changes the folder at once: a commit, with what arrived and departed before it; with
        durability="checkpoint" a checkpoint, with all commits since the one before; and a close or checkpoint that
        writes arrivals and departures only. An undo is a transaction as well: a crash leaves the store as before it
        or as after it, readers go on seeing the commit at which they look, and it is as durable as a commit.
        ``compact`` leaves nothing to take back.

        Returns:
            whether one was taken back; False where none is kept: see ``previous``.

        Raises:
            StoreError: the store was not opened with undoable=True, or has commits that no checkpoint has made safe,
                or the disk is full, say: everything is as it was then, unless the message says otherwise.
            CorruptionError: what is kept cannot be a commit.

        Cost: a commit without rows; what comes back is checked when it is read.

        >>> import tempfile
        >>> store = ClientStore(2, n=1, medium="mmap", path=tempfile.mkdtemp(), undoable=True)
        >>> for round in range(2):
        ...     store.stage(1)[:] = round
        ...     store.commit(round)
        >>> store.previous.round, store.undo(), store.round, store.read(1), store.undo()
        (0, True, 0, array([0.], dtype=float32), False)
        """
        self._session.require_right()
        if not self.undoable:
            raise StoreError("undo: expected a store opened with undoable=True, which keeps what it takes, got another")
        return self._session.commits.undo()

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        vectors: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a copy of what was committed last, a folder that ``open`` opens. It has nothing to take back.

        Args:
            path: a new or empty folder, or an older copy, which stays until the new one is there. A store to which
                anything was committed after its first commit is no copy.
            vectors, state: as for ``commit``, except that it is for the copy alone.

        Raises:
            StoreError: the folder is something else, or in use, or the disk is full.
            CorruptionError: something is not what was written; the copy is not made.

        Cost: reads and writes every row once.
        """
        self._session.require_whole()
        self._session.require_files()
        self._content.save(absolute(path), vectors, _text(state), self.documents())

    def compact(self) -> None:
        """Move the highest rows to free slots and give back what is behind the last, in memory or on the disk.

        It is a transaction as a commit is, but none that can be taken back: what is kept for ``undo`` is given back
        too. What readers still look at is not, and views move along with nothing: ask for rows anew.

        Raises:
            StoreError: rows are staged, or the folder cannot be written to.
        """
        self._session.require_right()
        if self._content.rows.staged:
            raise StoreError(f"compact: expected no staged rows, got {len(self._content.rows.staged)}")
        self._session.commits.compact()

    def refresh(self) -> None:
        """Let a reader see what was committed last; views that it holds may change from now on."""
        self._session.refresh()

    def close(self) -> None:
        """Make what was committed safe, and close the files; a store in memory has nothing to close.

        Raises:
            StoreError: what was committed is not safe yet. Where that is for want of room, the store stays open: close
                it again once there is some. Where it says to open the store again, nothing more can be done here, and
                a second close only lets the files go. Or all is safe, and the files are closed, but may be longer than
                they need to be.
        """
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stage(self, numbers: I64, round: int | None) -> list[Row]:
        rows, listed = self._content.rows, numbers.tolist()
        if rows.staged:
            self._session.require_writer()
        else:
            self._session.require_right()  # asked once a round
        rows.make_room(max(listed, default=-1), self.registry.capacity)
        slots = rows.stage(listed, round)
        rows.slots.use(slots)
        return self._content.form.rows(rows.slots, slots, writable=True)


def _text(state: Mapping[str, Any] | None) -> str | None:
    """A caller's state as JSON; None for none."""
    if state is None:
        return None
    try:
        return json.dumps(dict(state))
    except (TypeError, ValueError) as error:
        raise RangeError(f"state: expected what JSON can hold: {error}") from None


class Piece(NamedTuple):
    """The elements [start, stop) of a store's rows: multiples of 64, which a scale of int8 covers, or the row's end."""

    rows: ClientStore
    start: int
    stop: int


def join(
    path: Path, pieces: Sequence[Piece], vectors: Mapping[str, Any], state: Any, row_done: Callable[[], object]
) -> None:
    """Write a store of joined rows to a folder, new or empty: safe on the disk when this returns, or not there at all.

    Clients, their numbers, the rounds of the rows and the last round are those of the pieces' stores.

    Args:
        pieces: one behind the other, of stores with one codec and the same clients.
        vectors, state: as for ``ClientStore.commit``.
        row_done: called after each row.

    Raises:
        CheckpointError: the stores are not of one codec, or not of the same clients and rows.
        StoreError: the folder is in use, or the disk is full.
        CorruptionError: something is not what was written.

    Cost: reads and writes each row once.
    """
    first = pieces[0].rows
    require_alike([piece.rows for piece in pieces])
    form = RowFormat(first.codec, sum(piece.stop - piece.start for piece in pieces))
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
        folder.publish(head, entries, (), ())


def require_alike(stores: Sequence[ClientStore]) -> None:
    """Raise a CheckpointError unless all have rows of the same clients and rounds, through one codec."""
    facts = [
        (store.codec, store.round, store.registry.explicit(), *(column.tolist() for column in store.written()))
        for store in stores
    ]
    if any(one != facts[0] for one in facts):
        raise CheckpointError(
            f"{stores[0].path}: expected rows of the same clients and rounds as in the others, got other ones: they "
            "are not of one server"
        )


def _copy(pieces: Sequence[Piece], client: Any, out: Row) -> None:
    """Copy the pieces of a client's row into one."""
    at = 0
    for store, start, stop in pieces:
        row, end = store.row(client), at + stop - start
        for source, target, block in zip(_arrays(row), _arrays(out), (1, BLOCK), strict=False):
            target[-(-at // block) : -(-end // block)] = source[start // block : -(-stop // block)]
        at = end


def _arrays(row: Row | None) -> list[npt.NDArray[Any]]:
    """The arrays of a row: an element each, and then a scale for each block of 64."""
    if not isinstance(row, Codes):
        return [np.asarray(row)]
    return [row.codes] if row.scales is None else [row.codes, row.scales]


Occasion = Literal["a reply", "a history that is folded", "a warm start"]
"""Why a row is written. A client has at most one row of each in a round, so no two rows share their random bits."""


def rounding_keys(
    store: ClientStore, occasion: Occasion, round: int, clients: Sequence[ClientId]
) -> npt.NDArray[np.uint64] | None:
    """Keys for ``kernels.exchange``, uint64[k, 2]; None where rows are float32.

    They depend on the round, the client and the occasion only: not on slots, on other clients, or on when the
    round is done. So a round that was left half-way, or lost with the process, has the same bits when it is done again.

    Args:
        round: the one that is open.
    """
    if store.codec == "f32":
        return None
    return randomness.keys(f"row of {occasion}", round=round, clients=clients)
