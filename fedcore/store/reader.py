"""Read access to a store: the rows, vectors and clients of its last commit."""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.arrays import CPU, I64
from fedcore.errors import RangeError
from fedcore.runtime import Unpicklable
from fedcore.store.commits import Medium, Session
from fedcore.store.inspect import PreviousCommit, StoreInfo, info, previous_commit
from fedcore.store.registry import ClientId, Clients, Registry
from fedcore.store.slots import Codec, Row
from fedcore.validation import Represented

_SPAN = 512  # clients of one step of a search


class CommittedRows(Represented, Unpicklable):
    """The read methods of a ``ClientStore``. Several objects may share the open store ``session``."""

    _instead = "save the store with ClientStore.save(path), and open it with ClientStore.open(path)"

    def __init__(self, session: Session) -> None:
        self._session, self._content, self._folder = session, session.content, session.folder
        self._form = session.content.form

    @property
    def registry(self) -> Registry:
        """The registered clients."""
        return self._content.registry

    @property
    def n(self) -> int:
        """Elements of a row."""
        return self._content.form.n

    @property
    def codec(self) -> Codec:
        """The format of a row: "f32", "bf16" or "int8"."""
        return self._content.form.codec

    @property
    def medium(self) -> Medium:
        """The medium of the rows: "ram", "mmap" or "cuda"."""
        if self._folder is not None:
            return "mmap"
        return "ram" if self._content.form.device == CPU else "cuda"

    @property
    def device(self) -> str:
        """The device of the rows: "cpu" for host memory and files, otherwise for example "cuda:0"."""
        return self._content.form.device

    @property
    def path(self) -> Path | None:
        """The store's folder; None for a store in memory."""
        return None if self._folder is None else self._folder.path

    @property
    def readonly(self) -> bool:
        """Whether the store was opened with readonly=True."""
        return self._folder is not None and self._folder.readonly

    @property
    def round(self) -> int | None:
        """The last committed round; None before the first commit."""
        return self._content.round

    @property
    def state(self) -> Any:
        """The last committed state, as decoded from JSON; None if no state was committed."""
        return None if self._content.state is None else json.loads(self._content.state)

    @property
    def keep_previous(self) -> bool:
        """Whether the store was opened with keep_previous=True."""
        return self._folder is not None and self._folder.keep_previous

    @property
    def previous(self) -> PreviousCommit | None:
        """The commit to which ``undo`` returns; None if it is not kept."""
        return previous_commit(self._content)

    def _facts(self) -> dict[str, Any]:
        return {
            "clients": len(self.registry),
            "rows": len(self),
            "n": self.n,
            "codec": self.codec,
            "medium": self.medium,
            "device": None if self.device == CPU else self.device,
            "path": None if self.path is None else str(self.path),
            "round": self.round,
        }

    def _in_files(self) -> bool:
        return self.medium == "mmap"

    def read_only(self) -> "ReadRows":
        """Return a read-only view of the store."""
        return ReadRows(self._session)

    def require_files(self) -> None:
        """Raise a CorruptionError if a file was truncated. Reading a view of it would kill the process."""
        self._session.require_files()

    def __len__(self) -> int:
        """The number of clients with a row."""
        return self._content.rows.written

    def row(self, client: object) -> Row | None:
        """Return the client's row on ``device``, float32[n] or Codes, read-only; None if it was never written.

        The result is a view of the slot, which a later round may reuse; ``read`` copies the row.

        Raises:
            CorruptionError: the row is damaged.
        """
        return self._read(np.array([self._number(client)]))[0]

    def rows_of(self, clients: Sequence[ClientId]) -> list[Row | None]:
        """Return the rows of several clients, in the order of ``clients``; see ``row``."""
        return self._read_all(self._numbers(clients))

    def read(self, client: object) -> npt.NDArray[np.float32]:
        """Return a decoded copy of the client's row, float32[n]; zeros if it was never written. Errors: see ``row``."""
        return self._form.decoded(self.row(client))

    def round_of(self, client: object) -> int | None:
        """Return the round of the client's row, usually the round that wrote it; None without a row."""
        number = self._number(client)
        return int(self._content.rows.round[number]) if self._content.rows.slot_of(number) else None

    def rounds_of(self, clients: Sequence[ClientId]) -> list[int | None]:
        """Return the rounds of several clients' rows, in the order of ``clients``; see ``round_of``."""
        rows, numbers = self._content.rows, self._numbers(clients)
        slots = rows.slots_of(numbers)
        written = [number for number, slot in zip(numbers.tolist(), slots, strict=True) if slot]
        rounds = iter(rows.round[written].tolist())
        return [next(rounds) if slot else None for slot in slots]

    def without_row(self, most: int) -> list[ClientId]:
        """Return at most ``most`` clients that have no row. Cost: reads 8 bytes a client, up to the last one found."""
        slots, capacity = self._content.rows.slot, self.registry.capacity
        known = min(len(slots), capacity)
        spans = (range(start, min(start + _SPAN, known)) for start in range(0, known, _SPAN))
        empty = (span[i] for span in spans for i in np.flatnonzero(slots[span.start : span.stop] == 0).tolist())
        found: list[ClientId] = []
        for number in chain(empty, range(known, capacity)):
            if len(found) == most:
                break
            with suppress(RangeError):  # a number without a client
                found.append(self.registry.id_of(number))
        return found

    def written(self) -> tuple[I64, I64]:
        """Return the numbers of the clients with a row, ascending, and the rounds of these rows: two int64[rows].

        Cost: reads 8 bytes a client.
        """
        rows = self._content.rows
        numbers = np.flatnonzero(rows.slot)
        return numbers, rows.round[numbers]

    @property
    def latest(self) -> int | None:
        """The latest round of all rows; None without rows."""
        rows = self._content.rows
        return int(rows.round[rows.slot > 0].max()) if rows.written else None

    def clients_of(self, round: int) -> list[ClientId]:
        """Return the clients whose row is of this round, by their numbers. Cost: reads 16 bytes a client."""
        self._session.require_open()
        rows = self._content.rows
        numbers = np.flatnonzero((rows.round == round) & (rows.slot > 0))
        return [self.registry.id_of(number) for number in numbers.tolist()]

    def vector(self, name: str) -> npt.NDArray[Any] | None:
        """Return the last committed vector of this name, read-only; None if it does not exist.

        The result is a view of the slot. The slot is not reused while a view of it exists.

        Raises:
            CorruptionError: the vector is damaged.
        """
        self._session.require_open()
        return self._content.vectors.get(name)

    def vector_names(self) -> tuple[str, ...]:
        """Return the names of the vectors."""
        return tuple(self._content.vectors.table)

    def prefetch(self, clients: Iterable[ClientId]) -> None:
        """Start to read the rows of the next cohort from disk while its clients train.

        Cost: a background thread requests the rows; this call returns at once. In memory this does nothing.
        """
        self._session.require_open()
        if self._session.background is not None:
            slots = self._content.rows.slots_of(self.registry.numbers(clients))
            self._session.background.read_ahead(list(filter(None, slots)))

    def info(self) -> StoreInfo:
        """Return the format and size of the store."""
        self._session.require_open()
        return info(self._content)

    def verify(self) -> list[str]:
        """Return one line for each damaged row or vector, also of the previous commit. Cost: reads every row once."""
        self._session.require_open()
        self._session.require_files()
        return self._content.problems(with_previous=True)

    def _read_all(self, numbers: I64) -> list[Row | None]:
        return self._read(numbers)

    def _read(self, numbers: I64) -> list[Row | None]:
        """Return the rows of these client numbers, read-only, or None for each client without a row."""
        content, rows = self._content, self._content.rows
        slots = rows.slots_of(numbers)
        used = list(filter(None, slots))
        rows.slots.require_whole()
        if self._folder is not None:
            for number, slot in zip(numbers.tolist(), slots, strict=True):
                if slot and not rows.trusted[number]:
                    content.check(number)
            rows.slots.use(used)
        found: list[Row | None] = [*content.form.rows(rows.slots, used, writable=False)]
        remaining = iter(found)
        return found if len(used) == len(slots) else [next(remaining) if slot else None for slot in slots]

    def _numbers(self, clients: Sequence[ClientId]) -> npt.NDArray[np.int64]:
        self._session.require_open()
        return self._content.registry.numbers(clients)

    def _number(self, client: object) -> int:
        self._session.require_open()
        return self._content.registry.number(client)


class ReadRows(CommittedRows):
    """A read-only view of a store at its last commit."""

    @property
    def registry(self) -> Clients:  # type: ignore[override]
        """The registered clients."""
        return Clients(self._content.registry.index)
