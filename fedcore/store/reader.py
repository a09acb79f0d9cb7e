"""The committed content of a store: rows, vectors, clients, as they were committed last."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.arrays import CPU, I64
from fedcore.errors import RangeError
from fedcore.pickling import Unpicklable
from fedcore.representation import Represented, first
from fedcore.store.commits import Medium, Session
from fedcore.store.inspect import PreviousCommit, StoreInfo, info, previous_commit
from fedcore.store.registry import ClientId, Registry
from fedcore.store.slots import Codec, Row

_SPAN = 512  # clients that a search looks at in one step


class CommittedRows(Represented, Unpicklable):
    """The reading half of a ``ClientStore``: it changes no row, vector or client.

    Args:
        session: of the open store, which several objects may share.
    """

    _instead = "write it by ClientStore.save(path), and read it by ClientStore.open(path)"

    def __init__(self, session: Session) -> None:
        self._session, self._content, self._folder = session, session.content, session.folder
        self._form = session.content.form

    @property
    def registry(self) -> Registry:
        """The clients."""
        return self._content.registry

    @property
    def n(self) -> int:
        """Elements of a row."""
        return self._content.form.n

    @property
    def codec(self) -> Codec:
        """The format of a stored row."""
        return self._content.form.codec

    @property
    def medium(self) -> Medium:
        """The medium of the rows."""
        if self._folder is not None:
            return "mmap"
        return "ram" if self._content.form.device == CPU else "cuda"

    @property
    def device(self) -> str:
        """The device in whose memory the rows lie: "cpu" for the host's and for files, or "cuda:0", say."""
        return self._content.form.device

    @property
    def path(self) -> Path | None:
        """The folder, or None for a store in memory."""
        return None if self._folder is None else self._folder.path

    @property
    def readonly(self) -> bool:
        """Return whether it was opened to read beside a writer."""
        return self._folder is not None and self._folder.readonly

    @property
    def round(self) -> int | None:
        """The last committed round, or None."""
        return self._content.round

    @property
    def state(self) -> Any:
        """The state that was committed last, as JSON gives it back; None if there never was one."""
        return None if self._content.state is None else json.loads(self._content.state)

    @property
    def undoable(self) -> bool:
        """Return whether it was opened to keep what its last transaction replaced."""
        return self._folder is not None and self._folder.undoable

    @property
    def previous(self) -> PreviousCommit | None:
        """The commit before the last, where it is kept: the last can be taken back."""
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

    def require_files(self) -> None:
        """Raise a CorruptionError if a file was cut short: no row or vector that was read from it may be looked at."""
        self._session.require_files()

    def __len__(self) -> int:
        """The number of clients with a row."""
        return self._content.rows.written

    def row(self, client: object) -> Row | None:
        """The client's row, float32[n] or Codes, read-only, or None if it was never written; where ``device`` says.

        It is the slot itself: a later round may reuse it. ``read`` copies.

        Raises:
            UnknownClientError: no such client is registered.
            CorruptionError: the row is not what was written.
        """
        return self._read(np.array([self._number(client)]))[0]

    def rows_of(self, clients: Sequence[ClientId]) -> list[Row | None]:
        """``row`` of many clients, in their order; errors are those of row."""
        return self._read_all(self._numbers(clients))

    def read(self, client: object) -> npt.NDArray[np.float32]:
        """A decoded copy of the client's row, float32[n]; zeros if it was never written. Errors are those of row.

        It lies where the row does.
        """
        return self._form.decoded(self.row(client))

    def round_of(self, client: object) -> int | None:
        """The round of the client's row, which wrote it as a rule, or None."""
        number = self._number(client)
        return int(self._content.rows.round[number]) if self._content.rows.slot_of(number) else None

    def rounds_of(self, clients: Sequence[ClientId]) -> list[int | None]:
        """``round_of`` many clients, in their order."""
        rows, numbers = self._content.rows, self._numbers(clients)
        slots = rows.slots_of(numbers)
        if all(slots):
            rounds_written: list[int | None] = rows.round[numbers].tolist()
            return rounds_written
        written = [number for number, slot in zip(numbers.tolist(), slots, strict=True) if slot]
        rounds = iter(rows.round[written].tolist())
        return [next(rounds) if slot else None for slot in slots]

    def without_row(self, most: int) -> list[ClientId]:
        """The clients that have no row, at most so many of them.

        Cost: a pass over 8 bytes a client, up to the last that is found.
        """
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
        """The numbers of the clients that have a row, and those rows' rounds: int64[rows] each, ascending numbers.

        Cost: a pass over 8 bytes a client.
        """
        rows = self._content.rows
        numbers = np.flatnonzero(rows.slot)
        return numbers, rows.round[numbers]

    @property
    def latest(self) -> int | None:
        """The latest round of a row, or None where there is none."""
        rows = self._content.rows
        return int(rows.round[rows.slot > 0].max()) if rows.written else None

    def clients_of(self, round: int) -> list[ClientId]:
        """The clients whose rows are of that round, in the order of their numbers.

        Cost: reads 16 bytes a registered client.
        """
        self._session.require_open()
        return [self.registry.id_of(number) for number in self._content.rows.of_round(round).tolist()]

    def vector(self, name: str) -> npt.NDArray[Any] | None:
        """The vector of that name as it was committed last, read-only, or None.

        It is the slot itself, which is not used again while it or a view of it is held.

        Raises:
            CorruptionError: it is not what was written.
        """
        self._session.require_open()
        return self._content.vectors.get(name)

    def vector_names(self) -> tuple[str, ...]:
        """The names of the vectors."""
        return tuple(self._content.vectors.table)

    def prefetch(self, clients: Iterable[ClientId]) -> None:
        """Start reading the rows of the next cohort from the disk, while its clients train.

        Raises:
            UnknownClientError: no such client is registered.

        Cost: nothing here, or in memory; a thread asks the disk for all of them at once.
        """
        self._session.require_open()
        if self._session.background is not None:
            slots = self._content.rows.slots_of(self.registry.numbers(clients))
            self._session.background.read_ahead(list(filter(None, slots)))

    def info(self) -> StoreInfo:
        """The store's form and content, in numbers."""
        self._session.require_open()
        return info(self._content)

    def verify(self) -> list[str]:
        """Read everything, and return a line for each row or vector that is damaged, with client and block.

        What is kept of the commit before is read too.

        Cost: reads every row once.
        """
        self._session.require_open()
        self._session.require_files()
        return self._content.problems() + self._content.kept_problems()

    def _read_all(self, numbers: I64) -> list[Row | None]:
        """``_read`` what a fold needs at once."""
        return self._read(numbers)

    def _read(self, numbers: I64) -> list[Row | None]:
        """The rows of these numbers, read-only; None where there is none."""
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


class Clients(Represented):
    """The registered clients, read-only.

    Args:
        registry: changed by its owner only.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    @property
    def capacity(self) -> int:
        """Every client's number is below it."""
        return self._registry.capacity

    def _facts(self) -> dict[str, Any]:
        return {"count": len(self), "first": first(self)}

    def __len__(self) -> int:
        return len(self._registry)

    def __contains__(self, client: object) -> bool:
        return client in self._registry

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._registry)

    def __eq__(self, other: object) -> bool:
        return self._registry == (other._registry if isinstance(other, Clients) else other)

    __hash__ = None  # type: ignore[assignment]

    def check(self, client: object) -> ClientId:
        """See ``Registry.check``."""
        return self._registry.check(client)

    def number(self, client: object) -> int:
        """See ``Registry.number``."""
        return self._registry.number(client)

    def numbers(self, clients: Iterable[ClientId] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """See ``Registry.numbers``."""
        return self._registry.numbers(clients)

    def id_of(self, number: int) -> ClientId:
        """See ``Registry.id_of``."""
        return self._registry.id_of(number)


class ReadRows(CommittedRows):
    """A read-only view of a store: its owner changes it, and this shows what was committed last.

    Args:
        rows: the store.
    """

    def __init__(self, rows: CommittedRows) -> None:
        super().__init__(rows._session)

    @property
    def registry(self) -> Clients:  # type: ignore[override]  # all of it that reads
        """The clients."""
        return Clients(self._content.registry)
