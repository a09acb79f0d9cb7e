"""The entries of an index: rows, clients, their digests, the head, and the previous commit."""

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

from fedcore.arrays import I64, core
from fedcore.errors import CorruptionError
from fedcore.store.files.slot_file import digest
from fedcore.store.registry import ClientId
from fedcore.store.slots import Codec
from fedcore.validation import check_integer

U64 = npt.NDArray[np.uint64]

Entries: TypeAlias = npt.NDArray[np.void]
"""Entries of rows, of dtype ``ENTRY``; slot 0 means no row."""
ENTRY = np.dtype([("number", "<i8"), ("slot", "<i8"), ("round", "<i8"), ("seal", "<u8")])

StoredId: TypeAlias = int | str | None
"""A str, or an int as a signed 64-bit number (SQLite's type). None marks a number below the count without a client."""

CLIENTS_TABLE = "CREATE TABLE clients(number INTEGER PRIMARY KEY, id)"
PREVIOUS_TABLE = (
    "CREATE TABLE previous(key INTEGER PRIMARY KEY, head TEXT NOT NULL, rows BLOB NOT NULL, clients TEXT NOT NULL)"
)
_SIGN = 1 << 63
_BATCH = 100
"""Entries per statement. This is many times faster than one each; older versions of SQLite bind at most 999 values."""
_CHUNK = 500
"""Entries per read, few enough not to start Python's garbage collector."""
_MARKS = {int: 0, str: 1, NoneType: 2}
_MOST, _SUMS = 2**62, 2**64 - 1
_HEAD_BOUNDS = {
    "n": (1, _MOST),
    "clients": (0, _MOST),
    "sequence": (0, _MOST),
    "rows_sum": (0, _SUMS),
    "clients_sum": (0, _SUMS),
}
_FORGED = (LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""Errors from reading values that no store writes."""


def row_entries(numbers: Any, slots: Any = 0, rounds: Any = 0, seals: Any = 0) -> Entries:
    """Return entries from columns; a single value fills its column."""
    entries = np.empty(len(numbers), ENTRY)
    entries["number"], entries["slot"], entries["round"], entries["seal"] = numbers, slots, rounds, seals
    return entries


def as_table(entries: Entries) -> I64:
    """Return the entries as int64[k, 4], a view; seals become signed numbers with the same 64 bits."""
    return entries.view("<i8").reshape(-1, 4)


def used_slots(entries: Entries) -> I64:
    """Return the slots of the entries that have one."""
    slots: I64 = entries["slot"]
    return slots[slots > 0]


def stored(clients: Sequence[ClientId | None]) -> Sequence[StoredId]:
    """Return the ids, with each int in 0..2^64-1 as the signed number with the same 64 bits."""
    if int not in set(map(type, clients)):
        return clients
    return [id - 2 * _SIGN if isinstance(id, int) and id >= _SIGN else id for id in clients]


def restored(clients: Sequence[StoredId]) -> Sequence[ClientId | None]:
    """Return the ids that ``stored`` was called with."""
    if int not in set(map(type, clients)):
        return clients
    return [id + 2 * _SIGN if isinstance(id, int) and id < 0 else id for id in clients]


class Listed(NamedTuple):
    """Entries of an index's list of clients: int64[k] numbers, and the stored id of each."""

    numbers: I64
    ids: Sequence[StoredId]


def read_all_clients(connection: sqlite3.Connection) -> Listed:
    """Return the whole list of clients."""
    numbers: list[int] = []
    ids: list[StoredId] = []
    entries = connection.execute("SELECT number, id FROM clients ORDER BY number")
    while some := entries.fetchmany(_CHUNK):
        few_numbers, few_ids = zip(*some, strict=True)
        numbers += few_numbers
        ids += few_ids
    return Listed(np.array(numbers, np.int64), ids)


def read_clients(connection: sqlite3.Connection, numbers: Sequence[int]) -> list[tuple[int, StoredId]]:
    """Return the listed clients with these numbers, in the order of the numbers."""
    found: dict[int, StoredId] = {}
    for some in _batches(numbers):
        marks = ", ".join("?" * len(some))
        found.update(connection.execute(f"SELECT number, id FROM clients WHERE number IN ({marks})", some))
    return [(number, found[number]) for number in numbers if number in found]


def write_clients(connection: sqlite3.Connection, entries: Iterable[tuple[int, StoredId]]) -> None:
    """Add or replace entries of the list of clients."""
    for some in _batches(entries):
        marks = ", ".join(["(?, ?)"] * len(some))
        connection.execute(f"REPLACE INTO clients VALUES {marks}", list(chain.from_iterable(some)))


def _batches(entries: Iterable[Any]) -> Iterator[list[Any]]:
    remaining = iter(entries)
    while some := list(islice(remaining, _BATCH)):
        yield some


def mixed(*columns: npt.ArrayLike) -> U64:
    """Return a 64-bit digest of each row of a table of integers (splitmix64's mixing after each column)."""
    h = np.full(np.shape(columns[0]), 0x9E3779B97F4A7C15, np.uint64)
    for column in columns:
        h += np.asarray(column).astype(np.uint64, casting="unsafe")
        h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        h ^= h >> np.uint64(31)
    return h


def row_digests(entries: Entries) -> U64:
    """Return a digest of each row's entry."""
    return mixed(*(entries[name] for name in ("number", "slot", "round", "seal")))


def client_digests(clients: Sequence[tuple[int, StoredId]]) -> U64:
    """Return a digest of each pair of a number and a stored id."""
    return listed_digests(Listed(np.array([n for n, _ in clients], np.int64), [client for _, client in clients]))


def listed_digests(clients: Listed) -> U64:
    """Return a digest of each entry of the list of clients."""
    ids = clients.ids
    kinds = set(map(type, ids))
    if not kinds <= {int, str, NoneType}:
        raise TypeError(f"ids of {kinds}: must be ints, strs or None")
    marks = [_MARKS[kind] for kind in kinds] * len(ids) if len(kinds) == 1 else [_MARKS[type(client)] for client in ids]
    return mixed(clients.numbers, core.id_words(ids), np.array(marks, np.int64))


def total(digests: U64) -> int:
    """Return the sum of the digests modulo 2^64."""
    return int(digests.sum(dtype=np.uint64))


@dataclass(frozen=True)
class StoredVector:
    """The place of a vector: a slot in the file for its payload size."""

    payload: int
    slot: int
    dtype: str
    shape: tuple[int, ...]
    seal: int

    def check(self) -> None:
        """Raise a ValueError or TypeError for values that no store writes."""
        dtype = np.dtype(self.dtype)
        if dtype.kind not in "biufc" or dtype.str != self.dtype:
            raise ValueError(f"vectors: {self.dtype!r} is not a dtype of numbers")
        check_integer("payload", self.payload, 1, _MOST)
        check_integer("slot", self.slot, 1, _MOST)
        check_integer("seal", self.seal, 0, _SUMS)
        for length in self.shape:
            check_integer("shape", length, 0, _MOST)
        if self.payload != max(1, dtype.itemsize * math.prod(self.shape)):
            raise ValueError(f"vectors: {dtype}{list(self.shape)} does not have {self.payload} bytes")


@dataclass(frozen=True)
class Head:
    """The metadata of an index, stored as one JSON text.

    Attributes:
        store: the hexadecimal id that all files of one store share.
        clients: the count of clients with implicit ids; 0 if all ids are listed.
        sequence: the number of transactions.
        rows_sum, clients_sum: the sums of the digests of all rows and of all listed clients.
        previous: the digest of the previous commit; None if it is not kept.
        copy: whether ``save`` wrote the store and nothing was committed since. A later save may then replace it.
        unsynced: whether a loss of power may damage the commits since the previous one, which is then the last
            checkpoint.
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
    unsynced: bool = False

    def text(self) -> str:
        """Return a digest and the head as JSON. Older formats have no ``previous``, ``copy`` and ``unsynced``."""
        omitted = {name for name in ("previous", "copy", "unsynced") if not getattr(self, name)}
        content = json.dumps({name: value for name, value in asdict(self).items() if name not in omitted})
        return digest(content.encode()).hex() + content

    @classmethod
    def parsed(cls, text: object) -> "Head":
        """Return the head of this text."""
        check, content = (text[:16], text[16:]) if isinstance(text, str) else ("", "")
        if check != digest(content.encode()).hex():
            raise CorruptionError("head: the digest does not match")
        try:
            fields = json.loads(content)
            fields["vectors"] = {
                name: StoredVector(**{**vector, "shape": tuple(vector["shape"])})
                for name, vector in fields["vectors"].items()
            }
            head = cls(**fields)
            head.check()
        except _FORGED as error:
            raise CorruptionError(f"head: {error}") from error
        return head

    def check(self) -> None:
        """Raise an error for values that no store writes. The digest does not suffice, since it can be forged."""
        if len(bytes.fromhex(self.store)) != 16:
            raise ValueError(f"store: {self.store!r} is not an id of 16 bytes")
        if self.codec not in get_args(Codec):
            raise ValueError(f"codec: {self.codec!r} is not one of {get_args(Codec)}")
        for name, bounds in _HEAD_BOUNDS.items():
            check_integer(name, getattr(self, name), *bounds)
        check_integer("round", 0 if self.round is None else self.round, 0, _MOST)
        if self.previous is not None and not re.fullmatch("[0-9a-f]{16}", self.previous):
            raise ValueError(f"previous: {self.previous!r} is not a digest")
        if self.state is not None:
            json.loads(self.state)
        for vector in self.vectors.values():
            vector.check()


@dataclass(frozen=True)
class Previous:
    """The previous commit or the last checkpoint, which the index contains for ``undo`` and for a loss of power.

    Attributes:
        rows: the old entries of the rows that were changed since; slot 0 means no row.
        listed: the ids, by number, that were replaced or removed since.
        unlisted: the numbers that were added to the list of clients since.
    """

    head: Head
    rows: Entries
    listed: tuple[tuple[int, StoredId], ...]
    unlisted: tuple[int, ...]

    def extended(self, later: "Previous") -> "Previous":
        """Return this commit with the entries that a further transaction replaced, which ``later`` has."""
        rows = later.rows[~np.isin(later.rows["number"], self.rows["number"])]
        known = {*self.unlisted, *(number for number, _ in self.listed)}
        return Previous(
            self.head,
            np.concatenate([self.rows, rows]),
            (*self.listed, *(one for one in later.listed if one[0] not in known)),
            (*self.unlisted, *(number for number in later.unlisted if number not in known)),
        )

    def columns(self) -> tuple[str, bytes, str]:
        """Return the columns of this commit in the index. The head of the last commit has their digest."""
        clients = json.dumps({"listed": self.listed, "unlisted": self.unlisted})
        return self.head.text(), self.rows.tobytes(), clients

    @classmethod
    def parsed(cls, columns: tuple[Any, ...] | None, last: Head) -> "Previous":
        """Return the commit from these columns."""
        try:
            if columns is None or columns_digest(columns) != last.previous:
                raise ValueError("missing, or the digest does not match")
            text, rows, clients = columns
            changes = json.loads(clients)
            listed = tuple((number, client) for number, client in changes["listed"])
            found = cls(Head.parsed(text), np.frombuffer(rows, ENTRY), listed, tuple(changes["unlisted"]))
            found.require_plausible(last)
        except _FORGED as error:
            raise CorruptionError(f"previous: {error}") from error
        return found

    def require_plausible(self, last: Head) -> None:
        """Raise a ValueError or TypeError for values that no store writes. The digest can be forged."""
        head, numbers = self.head, self.rows["number"]
        if (head.store, head.codec, head.n, head.clients) != (last.store, last.codec, last.n, last.clients):
            raise ValueError("a commit of a different store")
        if head.sequence >= last.sequence:
            raise ValueError(f"must be before commit {last.sequence}, not {head.sequence}")
        if as_table(self.rows)[:, :3].min(initial=0) < 0 or (np.diff(np.sort(numbers)) == 0).any():
            raise ValueError("rows: a number is negative or listed twice")
        changed = [number for number, _ in self.listed] + list(self.unlisted)
        for number in changed:
            check_integer("number", number, 0, _SIGN - 1)
        for _, client in self.listed:
            if not isinstance(client, str | None):
                check_integer("id", client, -_SIGN, _SIGN - 1)
        if len(set(changed)) < len(changed):
            raise ValueError("clients: a number is listed twice")


class Transaction(NamedTuple):
    """One change of an index. The index computes the sums of ``head``.

    Attributes:
        rows: new or changed entries; entries with slot 0 are deleted.
        clients: new or changed ids, by number.
        removed: numbers whose ids are deleted.
        replaced: the old entries of these rows, to keep with the old head, or to add to what was kept at the last
            checkpoint; None to keep nothing.
        documents: the caller's documents by ascending number. They replace all documents from the first number on.
    """

    head: Head
    rows: Entries
    clients: Sequence[tuple[int, StoredId]] = ()
    removed: Sequence[int] = ()
    replaced: Entries | None = None
    documents: Sequence[tuple[int, str]] = ()


def columns_digest(columns: tuple[Any, ...]) -> str:
    """Return a digest of the columns of the previous commit, in hexadecimal."""
    text, rows, clients = columns
    parts = (str(text).encode(), bytes(rows), str(clients).encode())
    return digest(b"".join(digest(part) for part in parts)).hex()
