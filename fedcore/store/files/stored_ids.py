"""Client ids as the index keeps them: SQLite's integers are signed."""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fedcore.clients.registry import ClientId
from fedcore.typing import I64

StoredId: TypeAlias = int | str | None
"""An int as a signed one of 64 bits, a str, or None for a number of a count whose client has left."""

TABLE = "CREATE TABLE clients(number INTEGER PRIMARY KEY, id)"
_SIGN = 1 << 63
_AT_ONCE = 100
"""Entries of one statement: it is many times as fast as a statement for each, and older SQLites bind 999 values."""
_CHUNK = 500
"""Entries that are read in one call: fewer than bring Python's garbage collector to look at them."""


def stored(client: ClientId | None) -> StoredId:
    """An int in 0..2^64-1 as the signed one of the same 64 bits; anything else as it is."""
    return client - 2 * _SIGN if isinstance(client, int) and client >= _SIGN else client


def restored(client: StoredId) -> ClientId | None:
    """The id that ``stored`` was given."""
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


def read_all(connection: sqlite3.Connection) -> Listed:
    """The whole list of clients."""
    numbers: list[int] = []
    ids: list[StoredId] = []
    entries = connection.execute("SELECT number, id FROM clients ORDER BY number")
    while some := entries.fetchmany(_CHUNK):
        few_numbers, few_ids = zip(*some, strict=True)
        numbers += few_numbers
        ids += few_ids
    return Listed(np.array(numbers, np.int64), ids)


def read(connection: sqlite3.Connection, numbers: Sequence[int]) -> list[tuple[int, StoredId]]:
    """The entries of those of these numbers that are listed, in the order of the numbers."""
    found: dict[int, StoredId] = {}
    for some in _parts(numbers):
        found.update(connection.execute(f"SELECT number, id FROM clients WHERE number IN ({_marks('?', some)})", some))
    return [(number, found[number]) for number in numbers if number in found]


def write(connection: sqlite3.Connection, entries: Iterable[tuple[int, StoredId]]) -> None:
    """List clients, or others under numbers that are listed, in one transaction."""
    for some in _parts(entries):
        connection.execute(f"REPLACE INTO clients VALUES {_marks('(?, ?)', some)}", list(chain.from_iterable(some)))


def delete(connection: sqlite3.Connection, numbers: Iterable[int]) -> None:
    """Remove the entries of these numbers."""
    connection.executemany("DELETE FROM clients WHERE number = ?", zip(numbers))


def _parts(entries: Iterable[Any]) -> Iterator[list[Any]]:
    remaining = iter(entries)
    while some := list(islice(remaining, _AT_ONCE)):
        yield some


def _marks(of_each: str, entries: Sequence[object]) -> str:
    return ", ".join([of_each] * len(entries))
