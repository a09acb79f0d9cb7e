"""One row per client: its last mean gradient, in memory or in files, changed by whole rounds."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fedcore.arguments import whole
from fedcore.clients.registry import ClientId, Registry
from fedcore.errors import RangeError, ShapeError, StoreError
from fedcore.store.committed_rows import CommittedRows
from fedcore.store.content import Content
from fedcore.store.files.atomic_folder import replacing
from fedcore.store.files.store_folder import Folder
from fedcore.store.row_format import Codec, Row, RowFormat
from fedcore.store.session import Durability, Medium, Session, require_names


class ClientStore(CommittedRows):
    """Rows of n elements by client id, and named vectors of the server, changed by whole rounds.

    A round's rows are *staged* into free slots, where nobody sees them, and *commit* makes them the clients' rows all
    at once, together with the vectors and a state; *discard* forgets them. So a round that is left half-way leaves
    everything as it was, on the disk too: a folder that is opened again holds what was committed last. A row that was
    never written takes neither memory nor disk and reads as zero.

    Args:
        clients: a count (ids 0..count - 1) or the ids, each an int in 0..2**64 - 1 or a str.
        n: elements of a row.
        medium: "ram"; "mmap" for rows in a file that may be larger than memory; or "cuda" (or "cuda:1", say) for rows
            in that device's memory, which leave it by ``save`` alone.
        codec: how a row is stored: "f32", "bf16", or "int8" with a scale for every 64 elements. Whoever writes a row
            rounds it; a ``Server`` does so stochastically.
        path: the folder of an mmap store: new, or empty. ``ClientStore.open`` opens it again.
        durability: when an mmap store is safe. "round": a committed round survives a loss of power. "checkpoint":
            ``checkpoint`` makes what was committed safe, and a crash goes back to the last one. "none": a committed
            round survives the death of the process; after a loss of power rows may be damaged, which is noticed.
        resident_rows: about how many rows of an mmap store stay in the process's memory between rounds; None for as
            many as 1 GiB holds. What a round uses comes on top.

    Raises:
        UnknownNameError, RangeError: an argument is not what is said above.
        DeviceError: there is no such device.
        StoreError: the folder cannot be made.

    One process writes, and calls on one store take turns; a process that is forked opens the folder itself. Any number
    may read beside the writer (``ClientStore.open(path, readonly=True)``).

    A folder is meant for a local ext4, XFS, tmpfs or btrfs, where a full disk is a StoreError. On btrfs a new store's
    files are overwritten in place; what a snapshot, a reflink or a copy elsewhere makes of them is copied on writing,
    and there a full disk can end the process (SIGBUS), the last committed round intact. On NFS, SMB, AFS and Coda a
    store cannot be opened for writing; copies by ``save`` may lie there. Others were not tried.

    Cost: a row's bytes (4 n, 2 n, or 1.0625 n) for each client that has one and for each of the largest cohort,
        rounded up to 4 KiB from 64 KiB on and to 64 KiB from 1 MiB on; 25 bytes a client, once one has a row; for mmap
        about 30 bytes a row in the index too. A commit reads each new row once for its checksums, unless who
        wrote it has noted them, as a ``Server``'s rounds do for float32 rows.

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
    ) -> None:
        device = require_names(medium, durability)
        form, registry = RowFormat(codec, n, device), Registry(clients)
        if medium != "mmap":
            if path is not None:
                raise RangeError(f"path: expected none for a store in memory, got {str(path)!r}; save() writes one")
            self._begin(Content(form, registry, None), durability, resident_rows)
            return
        if path is None:
            raise RangeError("path: expected a folder for medium='mmap', got None")
        with replacing(Path(path), form, registry, existing=False):
            pass
        folder = Folder(Path(path), readonly=False, durable=durability != "none")
        self._begin(Content(form, registry, folder), durability, resident_rows)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        medium: Medium | str = "mmap",
        readonly: bool = False,
        durability: Durability = "round",
        resident_rows: int | None = None,
    ) -> Self:
        """A store from its folder, as it was committed last.

        Args:
            path: the folder.
            medium: "mmap" to go on in the folder; "ram", or "cuda", to load everything into the host's memory, or a
                device's, and leave the folder alone.
            readonly: read beside a writer. What was committed when it was opened is seen until ``refresh``, and the
                writer keeps that for so long.
            durability, resident_rows: as for a new store.

        Raises:
            StoreError: there is no store, or one of a newer format.
            LockedError: another process writes to it.
            CorruptionError: a file was damaged. (A damaged row is noticed when it is first read.)

        Cost: reads the index, about a second for a million rows; for "ram" everything.
        """
        device = require_names(medium, durability)
        store = cls.__new__(cls)
        folder = Folder(Path(path), readonly=readonly or medium != "mmap", durable=durability != "none")
        try:
            content = Content.read(folder)
            if medium != "mmap":
                loaded = Content(RowFormat(content.form.codec, content.form.n, device), content.registry, None)
                content.copy_to(loaded)
                content = loaded
        except BaseException:
            folder.close()
            raise
        if medium != "mmap":
            folder.close()
        store._begin(content, durability, resident_rows)
        return store

    def _begin(self, content: Content, durability: Durability, resident_rows: int | None) -> None:
        self.durability: Durability = durability
        self._content, self._form, self._folder = content, content.form, content.folder
        self._session = Session(content, durability, resident_rows)
        self._commits, self._residency = self._session.commits, self._session.residency

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
        return self._stage([self._number(client)], round)[0]

    def stage_all(self, clients: Sequence[ClientId], round: int | None = None) -> list[Row]:
        """``stage`` for many clients, in their order; after an error some are staged, which ``discard`` forgets."""
        return self._stage(self._numbers(clients).tolist(), round)

    def _stage(self, numbers: Sequence[int], round: int | None) -> list[Row]:
        rows, form = self._content.rows, self._content.form
        if rows.staged:
            self._session.require_writer()
        else:
            self._session.require_right()  # asked once a round
        rows.make_room(max(numbers, default=-1), self.registry.capacity)
        slots = [rows.stage(number, round) for number in numbers]
        if self._residency is not None:
            for slot in slots:
                self._residency.use(slot)
        return [form.row(rows.slots.memory(slot)) for slot in slots]

    def room_for_checksums(self, rows: int) -> npt.NDArray[np.uint64] | None:
        """Memory for the checksums of so many rows, for ``kernels.exchange`` and then for ``note_checksums``.

        None where nobody asks for them: a store in memory keeps none, and rows through a codec are read at the commit.
        """
        if self._folder is None or self._content.form.codec != "f32":
            return None
        return np.empty((rows, self._content.rows.slots.geometry.blocks), np.uint64)

    def note_checksums(self, clients: Sequence[ClientId], checksums: npt.NDArray[np.uint64]) -> None:
        """Note the checksums of staged rows as they lie now, so that ``commit`` does not read those rows.

        They are believed, and a row that is no longer what they say would be found damaged. ``stage`` forgets them: who
        writes to a row once more stages it once more, and no longer writes to what ``stage`` returned before.

        Args:
            clients: whose; a row that is not staged counts for nothing.
            checksums: uint64[k, blocks], each row's by ``checksums(row, 65536)``. Read-only.

        Raises:
            ShapeError, UnknownClientError: an argument is not what is said above; nothing was noted.
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
        self, round: int, vectors: Mapping[str, Any] | None = None, state: Mapping[str, Any] | None = None
    ) -> None:
        """Make every staged row its client's row, written in ``round``; their old slots become free.

        Args:
            round: 0..2**63 - 1.
            vectors: arrays of numbers by name, all that there are from now on; None leaves them as they are. They are
                copied, except what ``vector`` returned, which stays where it is.
            state: what JSON can hold; None leaves it as it is.

        Raises:
            RangeError, DtypeError: an argument is not what is said above; nothing has changed.
            StoreError: the disk is full, say. The last committed round is as it was, the rows stay staged, and it
                may be tried again unless the message says otherwise.

        Cost: reads each new vector once, and each new row whose checksums nobody has noted; with durability="round"
            writes them to the disk, waits for it, and then for the index.
        """
        self._session.require_right()
        self._commits.commit(whole("round", round, 0, 2**63 - 1), vectors, _text(state))
        self._session.after_commit()

    def checkpoint(self) -> None:
        """Make everything that was committed safe, where durability="checkpoint"; elsewhere it is already."""
        self._session.require_right()
        self._commits.publish()

    @property
    def commits(self) -> int:
        """The number of commits, checkpoints and compactions of this object count: it grows as soon as one does."""
        return self._commits.count

    @property
    def is_ahead(self) -> bool:
        """Tell whether clients arrived or departed since the last commit."""
        return self._commits.is_ahead

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
        return self._commits.arrive(list(clients))

    def forget(self, client: ClientId) -> None:
        """A client departs: it is registered no more, and its row goes with the next commit, checkpoint or close.

        Raises:
            UnknownClientError: no such client is registered.
        """
        self._session.require_writer()
        self._commits.leave(self.registry.check(client))

    def rollback(self) -> None:
        """Forget all that came since the last commit: staged rows, clients that arrived, and departures."""
        self._commits.rollback()

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        vectors: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a copy of what was committed last, a folder that ``open`` opens.

        Args:
            path: a new or empty folder, or an older copy, which stays until the new one is there.
            vectors, state: as for ``commit``, except that it is for the copy alone.

        Raises:
            StoreError: the folder is something else, or in use, or the disk is full.
            CorruptionError: something is not what was written; the copy is not made.

        Cost: reads and writes every row once.
        """
        self._session.require_whole()
        self._content.save(Path(path), vectors, _text(state))

    def compact(self) -> None:
        """Move the highest rows to free slots and give back what is behind the last, in memory or on the disk.

        It is a transaction as a commit is. What readers still look at is not given back, and views move along with
        nothing: ask for rows anew.

        Raises:
            StoreError: rows are staged, or the folder cannot be written to.
        """
        self._session.require_right()
        if self._content.rows.staged:
            raise StoreError(f"compact: expected no staged rows, got {len(self._content.rows.staged)}")
        self._commits.compact()

    def refresh(self) -> None:
        """Let a reader see what was committed last; views that it holds may change from now on."""
        self._session.refresh()

    def close(self) -> None:
        """Make what was committed safe, and close the files; a store in memory has nothing to close."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _text(state: Mapping[str, Any] | None) -> str | None:
    """A caller's state as JSON; None for none.

    Raises:
        RangeError: JSON cannot hold it.
    """
    if state is None:
        return None
    try:
        return json.dumps(dict(state))
    except (TypeError, ValueError) as error:
        raise RangeError(f"state: expected what JSON can hold: {error}") from None
