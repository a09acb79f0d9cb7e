"""The entries of an index: rows, clients, their digests, the head, and the commit before the last."""

import json
import math
import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from types import NoneType
from typing import Any, NamedTuple, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from fedcore.arguments import whole
from fedcore.arrays import I64
from fedcore.errors import CorruptionError
from fedcore.native import core
from fedcore.store.files.slot_file import digest
from fedcore.store.registry import ClientId
from fedcore.store.slots import Codec

U64 = npt.NDArray[np.uint64]

Entries: TypeAlias = npt.NDArray[np.void]
"""Entries of rows by the clients' numbers, of dtype ``ENTRY``; slot 0 stands for no row."""
ENTRY = np.dtype([("number", "<i8"), ("slot", "<i8"), ("round", "<i8"), ("seal", "<u8")])

StoredId: TypeAlias = int | str | None
"""An int as a signed one of 64 bits (as SQLite has them), a str, or None for a number of a count without a client."""

CLIENTS_TABLE = "CREATE TABLE clients(number INTEGER PRIMARY KEY, id)"
PREVIOUS_TABLE = (
    "CREATE TABLE previous(key INTEGER PRIMARY KEY, head TEXT NOT NULL, rows BLOB NOT NULL, clients TEXT NOT NULL)"
)
_SIGN = 1 << 63
_AT_ONCE = 100
"""Entries of one statement: it is many times as fast as a statement for each, and older SQLites bind 999 values."""
_CHUNK = 500
"""Entries that are read in one call: fewer than bring Python's garbage collector to look at them."""
_MARKS = {int: 0, str: 1, NoneType: 2}
_MOST, _SUMS = 2**62, 2**64 - 1


def row_entries(numbers: Any, slots: Any = 0, rounds: Any = 0, seals: Any = 0) -> Entries:
    """Entries of columns, or of one value for all."""
    entries = np.empty(len(numbers), ENTRY)
    entries["number"], entries["slot"], entries["round"], entries["seal"] = numbers, slots, rounds, seals
    return entries


def as_table(entries: Entries) -> I64:
    """The entries as int64[k, 4], with seals as the signed numbers of the same 64 bits: a view."""
    return entries.view("<i8").reshape(-1, 4)


def used_slots(entries: Entries) -> I64:
    """The slots of the entries that have one."""
    slots: I64 = entries["slot"]
    return slots[slots > 0]


def stored(client: ClientId | None) -> StoredId:
    """An int in 0..2^64-1 as the signed one of the same 64 bits; another id as it is."""
    return client - 2 * _SIGN if isinstance(client, int) and client >= _SIGN else client


def restored(client: StoredId) -> ClientId | None:
    """The inverse of ``stored``."""
    return client + 2 * _SIGN if isinstance(client, int) and client < 0 else client


class Listed(NamedTuple):
    """Entries of an index's list of clients: int64[k] numbers, and the stored id of each."""

    numbers: I64
    ids: Sequence[StoredId]

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, StoredId]]) -> "Listed":
        """The entries of pairs of a number and a stored id."""
        return cls(np.array([number for number, _ in pairs], np.int64), [client for _, client in pairs])


def all_stored(clients: Sequence[ClientId | None]) -> Sequence[StoredId]:
    """``stored`` of each."""
    return list(map(stored, clients)) if int in set(map(type, clients)) else clients


def all_restored(clients: Sequence[StoredId]) -> Sequence[ClientId | None]:
    """``restored`` of each."""
    return list(map(restored, clients)) if int in set(map(type, clients)) else clients


def read_all_clients(connection: sqlite3.Connection) -> Listed:
    """The whole list of clients."""
    numbers: list[int] = []
    ids: list[StoredId] = []
    entries = connection.execute("SELECT number, id FROM clients ORDER BY number")
    while some := entries.fetchmany(_CHUNK):
        few_numbers, few_ids = zip(*some, strict=True)
        numbers += few_numbers
        ids += few_ids
    return Listed(np.array(numbers, np.int64), ids)


def read_clients(connection: sqlite3.Connection, numbers: Sequence[int]) -> list[tuple[int, StoredId]]:
    """The entries of those of these numbers that are listed, in the order of the numbers."""
    found: dict[int, StoredId] = {}
    for some in _parts(numbers):
        marks = _places("?", some)
        found.update(connection.execute(f"SELECT number, id FROM clients WHERE number IN ({marks})", some))
    return [(number, found[number]) for number in numbers if number in found]


def write_clients(connection: sqlite3.Connection, entries: Iterable[tuple[int, StoredId]]) -> None:
    """List clients, or others under numbers that are listed, in one transaction."""
    for some in _parts(entries):
        connection.execute(f"REPLACE INTO clients VALUES {_places('(?, ?)', some)}", list(chain.from_iterable(some)))


def delete_clients(connection: sqlite3.Connection, numbers: Iterable[int]) -> None:
    """Remove the entries of these numbers."""
    connection.executemany("DELETE FROM clients WHERE number = ?", zip(numbers))


def _parts(entries: Iterable[Any]) -> Iterator[list[Any]]:
    remaining = iter(entries)
    while some := list(islice(remaining, _AT_ONCE)):
        yield some


def _places(of_each: str, entries: Sequence[object]) -> str:
    return ", ".join([of_each] * len(entries))


def mixed(*columns: npt.ArrayLike) -> U64:
    """A digest of 64 bits for each row of a table of integers (splitmix64's mixing after each column)."""
    h = np.full(np.shape(columns[0]), 0x9E3779B97F4A7C15, np.uint64)
    for column in columns:
        h += np.asarray(column).astype(np.uint64, casting="unsafe")
        h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        h ^= h >> np.uint64(31)
    return h


def row_digests(entries: Entries) -> U64:
    """A digest for each row's entry."""
    return mixed(*(entries[name] for name in ("number", "slot", "round", "seal")))


def client_digests(clients: Sequence[tuple[int, StoredId]]) -> U64:
    """A digest for each pair of a number and a stored id."""
    return listed_digests(Listed.of(clients))


def listed_digests(clients: Listed) -> U64:
    """A digest for each entry of the list of clients."""
    ids = clients.ids
    kinds = set(map(type, ids))
    if not kinds <= {int, str, NoneType}:
        raise TypeError(f"expected ids that are ints, strs or None, got {kinds}")
    marks = [_MARKS[kind] for kind in kinds] * len(ids) if len(kinds) == 1 else [_MARKS[type(client)] for client in ids]
    return mixed(clients.numbers, core.id_words(ids), np.array(marks, np.int64))


def total(digests: U64) -> int:
    """Their sum modulo 2^64."""
    return int(digests.sum(dtype=np.uint64))


@dataclass(frozen=True)
class StoredVector:
    """The place of a vector: in a slot of the file for its payload."""

    payload: int
    slot: int
    dtype: str
    shape: tuple[int, ...]
    seal: int

    def check(self) -> None:
        """Raise a ValueError or TypeError for values that no store writes."""
        dtype = np.dtype(self.dtype)
        if dtype.kind not in "biufc" or dtype.str != self.dtype:
            raise ValueError(f"vectors: expected the dtype of numbers, got {self.dtype!r}")
        whole("payload", self.payload, 1, _MOST)
        whole("slot", self.slot, 1, _MOST)
        whole("seal", self.seal, 0, _SUMS)
        for length in self.shape:
            whole("shape", length, 0, _MOST)
        if self.payload != max(1, dtype.itemsize * math.prod(self.shape)):
            raise ValueError(f"vectors: expected {self.payload} bytes, got {dtype}{list(self.shape)}")


@dataclass(frozen=True)
class Head:
    """The small part of an index, one JSON text.

    Attributes:
        store: the id that the files of one store share, in hexadecimal.
        codec, n: of the rows.
        clients: how many a count registered; 0 where all ids are listed.
        sequence: how many transactions there were.
        round: the last committed round.
        state: the caller's state as JSON.
        rows_sum, clients_sum: the sums of the digests of all listed rows and clients.
        previous: the digest of the commit before that an undo goes back to; None if none is kept.
        copy: whether a save wrote it, and nothing was committed since: another save may replace it.
    """

    store: str
    codec: Codec
    n: int
    clients: int
    sequence: int = 0
    round: int | None = None
    state: str | None = None
    vectors: dict[str, StoredVector] = field(default_factory=dict)
    rows_sum: int = 0
    clients_sum: int = 0
    previous: str | None = None
    copy: bool = False

    def text(self) -> str:
        """The head as JSON, with a digest of it in front."""
        fields = asdict(self)
        if self.previous is None:
            del fields["previous"]  # which older formats have not
        if not self.copy:
            del fields["copy"]  # likewise
        content = json.dumps(fields)
        return digest(content.encode()).hex() + content

    @classmethod
    def parsed(cls, text: object) -> "Head":
        """The head of this text."""
        check, content = (text[:16], text[16:]) if isinstance(text, str) else ("", "")
        if check != digest(content.encode()).hex():
            raise CorruptionError("head: expected the text that was written, got another")
        try:
            fields = json.loads(content)
            fields["vectors"] = {
                name: StoredVector(**{**vector, "shape": tuple(vector["shape"])})
                for name, vector in fields["vectors"].items()
            }
            head = cls(**fields)
            head.check()
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CorruptionError(f"head: expected a store's: {error}") from error
        return head

    def check(self) -> None:
        """Raise an error for values that no store writes: a right digest can be forged too."""
        if len(bytes.fromhex(self.store)) != 16:
            raise ValueError(f"store: expected 16 bytes, got {self.store!r}")
        if self.codec not in get_args(Codec):
            raise ValueError(f"codec: expected one of {get_args(Codec)}, got {self.codec!r}")
        whole("n", self.n, 1, _MOST)
        for name in ("clients", "sequence"):
            whole(name, getattr(self, name), 0, _MOST)
        whole("round", 0 if self.round is None else self.round, 0, _MOST)
        for name in ("rows_sum", "clients_sum"):
            whole(name, getattr(self, name), 0, _SUMS)
        if self.previous is not None and not re.fullmatch("[0-9a-f]{16}", self.previous):
            raise ValueError(f"previous: expected a digest, got {self.previous!r}")
        if self.state is not None:
            json.loads(self.state)
        for vector in self.vectors.values():
            vector.check()


@dataclass(frozen=True)
class Previous:
    """The commit before the last, as the index of an undoable store keeps it.

    Attributes:
        head: its head.
        rows: the entries of the numbers that the last transaction changed, as they were; slot 0 for no row.
        listed: the ids, by number, that it replaced or removed.
        unlisted: the numbers that it listed, and that were not listed before.
    """

    head: Head
    rows: Entries
    listed: tuple[tuple[int, StoredId], ...]
    unlisted: tuple[int, ...]

    def columns(self) -> tuple[str, bytes, str]:
        """The columns in which the index keeps it, and of which the head of the last commit has a digest."""
        clients = json.dumps({"listed": self.listed, "unlisted": self.unlisted})
        return self.head.text(), self.rows.tobytes(), clients

    @classmethod
    def parsed(cls, columns: tuple[Any, ...] | None, last: Head) -> "Previous":
        """The commit of these columns."""
        try:
            if columns is None or columns_digest(columns) != last.previous:
                raise ValueError("expected the one that was written, got another, or none")
            text, rows, clients = columns
            changes = json.loads(clients)
            listed = tuple((number, client) for number, client in changes["listed"])
            found = cls(Head.parsed(text), np.frombuffer(rows, ENTRY), listed, tuple(changes["unlisted"]))
            found._check(last)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CorruptionError(f"previous: {error}") from error
        return found

    def _check(self, last: Head) -> None:
        """Raise a ValueError or TypeError for values that no store keeps: a right digest can be forged too."""
        head, numbers = self.head, self.rows["number"]
        if (head.store, head.codec, head.n, head.clients) != (last.store, last.codec, last.n, last.clients):
            raise ValueError("expected a commit of this store, got another store's")
        if head.sequence != last.sequence - 1:
            raise ValueError(f"expected commit {last.sequence - 1}, got {head.sequence}")
        if as_table(self.rows)[:, :3].min(initial=0) < 0 or (np.diff(np.sort(numbers)) == 0).any():
            raise ValueError("expected entries of rows, each number once")
        changed = [number for number, _ in self.listed] + list(self.unlisted)
        for number in changed:
            whole("number", number, 0, _SIGN - 1)
        for _, client in self.listed:
            if not isinstance(client, str | None):
                whole("id", client, -_SIGN, _SIGN - 1)
        if len(set(changed)) < len(changed):
            raise ValueError("expected the clients that changed, each number once")


def columns_digest(columns: tuple[Any, ...]) -> str:
    """A digest of the columns of the commit before, in hexadecimal."""
    text, rows, clients = columns
    parts = (str(text).encode(), bytes(rows), str(clients).encode())
    return digest(b"".join(digest(part) for part in parts)).hex()
