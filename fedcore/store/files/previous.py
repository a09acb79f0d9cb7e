"""The commit before the last, as the index of an undoable store keeps it: what the last transaction replaced."""

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcore.arguments import whole
from fedcore.errors import CorruptionError
from fedcore.store.files.index_head import Head
from fedcore.store.files.row_entries import RowEntries
from fedcore.store.files.slot_file_header import digest
from fedcore.store.files.stored_ids import StoredId

TABLE = "CREATE TABLE previous(key INTEGER PRIMARY KEY, head TEXT NOT NULL, rows BLOB NOT NULL, clients TEXT NOT NULL)"
_ENTRY = np.dtype("<i8")
_WORD = 2**63


@dataclass(frozen=True)
class Previous:
    """The commit before the last.

    Attributes:
        head: its head.
        rows: the entries of the numbers that the last transaction changed, as they were; slot 0 for no row.
        listed: the ids, by number, that it replaced or removed.
        unlisted: the numbers that it listed, and that were not listed before.
    """

    head: Head
    rows: RowEntries
    listed: tuple[tuple[int, StoredId], ...]
    unlisted: tuple[int, ...]

    @classmethod
    def of(
        cls, head: Head, rows: RowEntries, listed: Sequence[tuple[int, StoredId]], changed: Sequence[int]
    ) -> "Previous":
        """The commit before a transaction.

        Args:
            head: as it was.
            rows: the entries that change, as they were.
            listed: those of the clients that change which were listed.
            changed: the numbers of all clients that change.
        """
        known = {number for number, _ in listed}
        return cls(head, rows, tuple(listed), tuple(number for number in changed if number not in known))

    def _packed(self) -> tuple[str, bytes, str]:
        """The columns in which the index keeps it, and of which the head of the last commit has a digest."""
        clients = json.dumps({"listed": self.listed, "unlisted": self.unlisted})
        return self.head.text(), self.rows.table().astype(_ENTRY).tobytes(), clients

    @classmethod
    def _parsed(cls, columns: tuple[Any, ...] | None, last: Head) -> "Previous":
        """The commit of which these are the columns.

        Raises:
            CorruptionError: they are not what the last head tells of.
        """
        try:
            if columns is None or _digest(columns) != last.previous:
                raise ValueError("expected the one that was written, got another, or none")
            text, rows, clients = columns
            said = json.loads(clients)
            table = np.frombuffer(rows, _ENTRY).astype(np.int64).reshape(-1, 4)
            listed = tuple((number, client) for number, client in said["listed"])
            found = cls(Head.parsed(text), RowEntries.of(table), listed, tuple(said["unlisted"]))
            found._check(last)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CorruptionError(f"previous: {error}") from error
        return found

    def _check(self, last: Head) -> None:
        """Refuse what no store keeps: who made the digest may have made up the rest.

        Raises:
            ValueError, TypeError: it is such a thing.
        """
        head, rows = self.head, self.rows
        if (head.store, head.codec, head.n, head.clients) != (last.store, last.codec, last.n, last.clients):
            raise ValueError("expected a commit of this store, got another store's")
        if head.sequence != last.sequence - 1:
            raise ValueError(f"expected commit {last.sequence - 1}, got {head.sequence}")
        numbers = rows.numbers
        if len(numbers) and (rows.table()[:, :3].min() < 0 or (np.diff(np.sort(numbers)) == 0).any()):
            raise ValueError("expected entries of rows, each number once")
        changed = [number for number, _ in self.listed] + list(self.unlisted)
        for number in changed:
            whole("number", number, 0, _WORD - 1)
        for _, client in self.listed:
            if not isinstance(client, str | None):
                whole("id", client, -_WORD, _WORD - 1)
        if len(set(changed)) < len(changed):
            raise ValueError("expected the clients that changed, each number once")


def read(connection: sqlite3.Connection, last: Head) -> Previous | None:
    """The commit before the last, None where the last head says that it is not kept.

    Raises:
        CorruptionError: it is not what the last head tells of.
    """
    if last.previous is None:
        return None
    return Previous._parsed(connection.execute("SELECT head, rows, clients FROM previous").fetchone(), last)


def write(connection: sqlite3.Connection, kept: Previous | None, before: Previous | None) -> str | None:
    """Keep a commit, or none, in place of the one that was kept before; the digest of it for the head."""
    if kept is None:
        if before is not None:
            connection.execute("DELETE FROM previous")
        return None
    columns = kept._packed()
    connection.execute("REPLACE INTO previous VALUES(0, ?, ?, ?)", columns)
    return _digest(columns)


def _digest(columns: tuple[Any, ...]) -> str:
    """A digest of the columns, in hexadecimal."""
    text, rows, clients = columns
    parts = (str(text).encode(), bytes(rows), str(clients).encode())
    return digest(b"".join(digest(part) for part in parts)).hex()
