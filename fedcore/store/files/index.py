"""The index: which slot holds whose row, in an SQLite file that changes by whole transactions."""

import ctypes
import fcntl
import os
import sqlite3
import stat
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedcore.errors import CorruptionError, LockedError, StoreError
from fedcore.store.files import disk
from fedcore.store.files.entries import (
    CLIENTS_TABLE,
    ENTRY,
    PREVIOUS_TABLE,
    Entries,
    Head,
    Listed,
    Previous,
    StoredId,
    as_table,
    client_digests,
    columns_digest,
    delete_clients,
    listed_digests,
    read_all_clients,
    read_clients,
    row_digests,
    total,
    write_clients,
)
from fedcore.store.files.inventory import SHARED, require_no_journal
from fedcore.store.slots import GRAINS, VERSION

Access = Literal["rw", "ro", "immutable"]
_File = tuple[int, int]  # device and number
_RESERVED = 0x40000001  # the byte of its file that SQLite locks for a writer with a rollback journal
_TRIES = 100

_turn = threading.Lock()
_uses: dict[_File, int] = {}  # the open connections to each index
_open: dict[_File, list[int]] = {}  # and the descriptors that hold its lock


def _begin_in_fork() -> None:
    global _turn
    _turn = threading.Lock()


os.register_at_fork(after_in_child=_begin_in_fork)


class _Connection(sqlite3.Connection):
    """A connection to a locked index."""

    file: _File | None = None

    def close(self) -> None:
        with _turn:
            super().close()
            file, self.file = self.file, None
            if file is not None:
                _release(file)


def connect(path: Path, access: Access) -> sqlite3.Connection:
    """Connect to an existing index, so that SQLite plays back no rollback journal, whenever one appears.

    SQLite plays a journal back unless a live writer holds the index's reserved byte. So this process holds it, by a
    shared lock of the open file. No index of a store is ever locked there otherwise: all have a write-ahead log.

    Args:
        access: "immutable" looks for no journal, and takes no lock.
    """
    if access == "immutable":
        return _connected(path, "immutable=1")
    with _turn, disk.explained("opening", path):
        for _ in range(_TRIES):
            file, before = _held(path), _files()
            try:
                connection = _connected(path, f"mode={access}")
            except BaseException:
                _release(file)
                raise
            # Nothing was read yet. A file of another thread looks like a swapped index here: the next try shows which.
            if all(opened == file for _, opened in _files() - before):
                connection.file = file
                return connection
            sqlite3.Connection.close(connection)  # without the turn, which is taken
            _release(file)
    raise StoreError(f"{path}: expected one index, got others in its place meanwhile: do not use this folder")


def _connected(path: Path, options: str) -> _Connection:
    name = f"{path.absolute().as_uri()}?{options}"
    return sqlite3.connect(
        name, uri=True, isolation_level=None, timeout=60, check_same_thread=False, factory=_Connection
    )


def _held(path: Path) -> _File:
    """Lock the index, once for all connections of this process; its number."""
    file = _number_of(os.lstat(path))
    if file not in _uses:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        file = _number_of(os.fstat(fd))
        _open.setdefault(file, []).append(fd)
    _uses[file] = _uses.get(file, 0) + 1
    try:
        if lock := getattr(fcntl, "F_OFD_SETLK", None):  # Linux alone has it
            for fd in _open[file]:
                fcntl.fcntl(fd, lock, struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, _RESERVED, 1, 0))
    except BaseException:
        _release(file)
        raise
    return file


def _release(file: _File) -> None:
    """Unlock an index behind its last connection: to close any descriptor of a file gives up SQLite's own locks."""
    _uses[file] -= 1
    if not _uses[file]:
        del _uses[file]
        for fd in _open.pop(file):
            os.close(fd)


def _files() -> set[tuple[int, _File]]:
    """The regular files that this process has open; none where the system does not list them."""
    found: set[tuple[int, _File]] = set()
    with suppress(FileNotFoundError):
        for fd in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):  # closed meanwhile
                if stat.S_ISREG((status := os.fstat(fd)).st_mode):
                    found.add((fd, _number_of(status)))
    return found


def _number_of(status: os.stat_result) -> _File:
    return status.st_dev, status.st_ino


_APPLICATION = 0x66656463  # "fedc"
_TABLES = (
    "CREATE TABLE head(key INTEGER PRIMARY KEY, content TEXT NOT NULL)",
    "CREATE TABLE rows"
    "(number INTEGER PRIMARY KEY, slot INTEGER NOT NULL, round INTEGER NOT NULL, seal INTEGER NOT NULL)",
    CLIENTS_TABLE,
)
_DOCUMENTS = "CREATE TABLE documents(number INTEGER PRIMARY KEY, content TEXT NOT NULL)"
KEEPS_PREVIOUS = 3
"""The first format whose index can keep the commit before the last."""
_SCHEMA = "SELECT sql, type FROM sqlite_master ORDER BY sql"
_WAL_PAGES = 16000  # of 1 KB: how long the log grows before it is worked into the file

_inherited: list[sqlite3.Connection] = []  # a forked process must not even close what its parent has open
_mapped: dict[tuple[int, int], int] = {}  # the bytes of each shared memory, when this process looked last
os.register_at_fork(after_in_child=_mapped.clear)  # the numbers are other files' once the parent has closed its own


class _CutError(StoreError):
    """A file that this process has mapped was cut short."""


class Index:
    """An index file; each process that uses it has a connection of its own.

    Every entry goes into a sum of digests, and the sums into the head, which has a digest of its own: whatever was
    changed, lost or brought back in the file is noticed when it is loaded.

    Args:
        path: an existing index.
        durable: whether a transaction survives a loss of power, and not only the end of this process.
        access: "rw"; "ro"; or "immutable" for a folder that no process can write to.

    Attributes:
        version: of the store's format.
        previous: the commit before the last, as it was loaded or written last; None where it is not kept.
    """

    def __init__(self, path: Path, *, durable: bool, access: Access) -> None:
        self.path = path
        self.in_doubt = False  # whether a transaction failed in a way that leaves open if it happened
        self._durable, self._access = durable, access
        self._owner = 0
        self._shared: sqlite3.Connection | None = None
        self._shared_file: tuple[int, int] | None = None  # device and number of the shared memory
        self.previous: Previous | None = None
        self._digests = np.zeros(0, np.uint64)  # of the rows, by number
        self._known: str | None = None  # the head, as this process has loaded or written it last
        self._tried: str | None = None  # and as it tried to write it
        self._version = 0  # of the file, as SQLite counts others' transactions
        try:
            with self._reading() as connection:
                self.version = _version_of(path, connection)
        except BaseException:
            with suppress(StoreError):
                self.close()
            raise

    @classmethod
    def create(cls, path: Path, head: Head, clients: Listed) -> None:
        """Write a new index, durably, with these clients and without rows."""
        require_no_journal(path)
        with _explained(path):
            connection = sqlite3.connect(path, isolation_level=None)
            try:
                # Small pages, because a cohort's entries lie scattered, and a transaction writes every page they touch.
                connection.execute("PRAGMA page_size = 1024")
                connection.execute("PRAGMA journal_mode = MEMORY")  # so that no store ever has a rollback journal
                connection.execute("PRAGMA synchronous = OFF")  # half an index is of no use: one sync at the end
                connection.execute(f"PRAGMA application_id = {_APPLICATION}")
                connection.execute(f"PRAGMA user_version = {VERSION}")
                connection.execute("BEGIN")
                for statement in (*_TABLES, PREVIOUS_TABLE):
                    connection.execute(statement)
                write_clients(connection, zip(clients.numbers.tolist(), clients.ids, strict=True))
                head = replace(head, clients_sum=total(listed_digests(clients)))
                connection.execute("INSERT INTO head VALUES(0, ?)", (head.text(),))
                connection.execute("COMMIT")
                connection.execute("PRAGMA journal_mode = WAL")
            finally:
                connection.close()
        with disk.explained("syncing", path):
            disk.sync_path(path)

    def raise_format(self) -> None:
        """Let the index keep the commit before the last, in one transaction that raises an older format to this one."""
        if self.version >= KEEPS_PREVIOUS:
            return
        with self._using() as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute(PREVIOUS_TABLE)
                connection.execute(f"PRAGMA user_version = {VERSION}")
                disk.commit(connection)
            except BaseException:
                if connection.in_transaction:
                    connection.rollback()
                raise
        self.version = VERSION

    def renew(self) -> None:
        """Make durable anew what the log holds, before a writer believes it.

        Of a process that died, a sync may have failed: the log's last commits are then in the system's memory alone,
        which takes them for written, and whatever followed them in the log would be lost with them.
        """
        log = self.path.with_name(f"{self.path.name}-wal")
        with disk.explained("making it durable", log):
            if self._durable and log.exists():
                fd = os.open(log, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    disk.renew(fd)
                finally:
                    os.close(fd)
        with self._using() as connection:
            if not disk.work_in(connection):
                raise StoreError(f"{self.path}: another process reads its log, and does not end: end it, and try again")

    def head(self) -> Head:
        """The head as it was committed last."""
        with self._reading() as connection:
            self._known, self._version = _text(connection), _version(connection)
            head = _head(connection)
            self.previous = _read_previous(connection, head)
        return head

    def load(self) -> tuple[Head, Entries, Listed]:
        """The head, all rows and all listed clients, as they were committed last."""
        with self._reading() as connection:
            head = _head(connection)
            try:
                table = np.array(connection.execute("SELECT * FROM rows").fetchall(), np.int64).reshape(-1, 4)
                clients = read_all_clients(connection)
                if total(listed_digests(clients)) != head.clients_sum:
                    raise CorruptionError("clients: expected the list that was written, got another")
            except (OverflowError, TypeError, ValueError) as error:
                raise CorruptionError(str(error)) from error
            rows = table.view(ENTRY).reshape(-1)
            digests = row_digests(rows)
            if total(digests) != head.rows_sum or (table[:, :3] < 0).any():
                raise CorruptionError("rows: expected the list that was written, got another")
            kept = _read_previous(connection, head)
            self._known, self._version = _text(connection), _version(connection)
        self._digests = np.zeros(int(rows["number"].max(initial=-1)) + 1, np.uint64)
        self._digests[rows["number"]] = digests
        self.previous = kept
        return head, rows, clients

    def write(
        self,
        head: Head,
        rows: Entries,
        clients: Sequence[tuple[int, StoredId]],
        gone: Sequence[int],
        replaced: tuple[Head, Entries] | None = None,
        documents: Sequence[tuple[int, str]] = (),
    ) -> Head:
        """One transaction; returns the head that it wrote.

        Args:
            head: what it is now; the sums are seen to here.
            rows: entries that are new or changed, or (slot 0) go.
            clients: ids that are new or changed, by number.
            gone: numbers whose ids go.
            replaced: the head as it was, and the entries of the same numbers as they were, to be kept as the commit
                before; None to keep nothing of it.
            documents: the caller's, by number, ascending; those of the first one's number or more are replaced.
        """
        numbers, digests = rows["number"], np.where(rows["slot"] > 0, row_digests(rows), 0)
        most = int(numbers.max(initial=-1)) + 1
        if (known := len(self._digests)) < most:  # by steps that copy all, and so a part larger each
            more = max(most, 1024, known * 5 // 4) - known
            self._digests = np.concatenate([self._digests, np.zeros(more, np.uint64)])
        rows_sum = (head.rows_sum + total(digests) - total(self._digests[numbers])) % 2**64
        with self._using() as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
                self._require_alone(connection)
                changed = [number for number, _ in clients] + list(gone)
                before = read_clients(connection, changed)
                clients_sum = head.clients_sum + total(client_digests(clients)) - total(client_digests(before))
                table = as_table(rows)[np.argsort(numbers)]  # in the order of the file
                connection.executemany("REPLACE INTO rows VALUES(?, ?, ?, ?)", table[table[:, 1] > 0].tolist())
                connection.executemany("DELETE FROM rows WHERE number = ?", table[table[:, 1] == 0, :1].tolist())
                write_clients(connection, clients)
                delete_clients(connection, gone)
                if documents:
                    if not _has_documents(connection):
                        connection.execute(_DOCUMENTS)
                    connection.execute("DELETE FROM documents WHERE number >= ?", (documents[0][0],))
                    connection.executemany("INSERT INTO documents VALUES(?, ?)", documents)
                listed = dict(before)
                unlisted = tuple(number for number in changed if number not in listed)
                kept = None if replaced is None else Previous(*replaced, tuple(before), unlisted)
                seal = self._keep(connection, kept)
                head = replace(head, rows_sum=rows_sum, clients_sum=clients_sum % 2**64, previous=seal)
                self._tried = head.text()
                connection.execute("UPDATE head SET content = ?", (self._tried,))
                self.in_doubt = True
                disk.commit(connection)
                self._known = self._tried
                self.in_doubt = False
            except BaseException as error:
                # After a full disk the log lacks its end, and the transaction with it; so after any write that failed,
                # as it does at a quota or where files may be so long only. After other failures, of a sync, it may come
                # back when the file is opened again.
                # An error that is not SQLite's came before or after: the file shows which.
                if _code(error) == sqlite3.SQLITE_FULL or _is_write(error) or not isinstance(error, sqlite3.Error):
                    self.in_doubt = False
                if connection.in_transaction:
                    connection.rollback()
                raise
        self._digests[numbers] = digests
        self.previous = kept
        return head

    def _keep(self, connection: sqlite3.Connection, kept: Previous | None) -> str | None:
        """Keep a commit, or none, in place of the one that was kept before; the digest of it for the head."""
        if kept is not None:
            columns = kept.columns()
            connection.execute("REPLACE INTO previous VALUES(0, ?, ?, ?)", columns)
            return columns_digest(columns)
        if self.previous is not None:
            connection.execute("DELETE FROM previous")
        return None

    def documents(self) -> list[tuple[int, str]]:
        """The caller's documents, by number, ascending."""
        with self._reading() as connection:
            if not _has_documents(connection):
                return []
            return [(int(number), str(text)) for number, text in connection.execute("SELECT * FROM documents")]

    def has(self, sequence: int) -> bool:
        """Return whether the file holds this process's own transaction of that number."""
        with self._reading() as connection:
            return _head(connection).sequence >= sequence and _text(connection) == self._tried

    def check(self) -> list[str]:
        """The faults that SQLite finds in its file."""
        with self._reading() as connection:
            found = [str(line) for (line,) in connection.execute("PRAGMA integrity_check(20)")]
        return [] if found == ["ok"] else found

    def close(self) -> None:
        """Close this process's connection."""
        connection, self._shared = self._shared, None
        if connection is not None and self._owner != os.getpid():
            _inherited.append(connection)
        elif connection is not None:
            with _explained(self.path):
                try:
                    self._require_mapped()
                except _CutError:
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))  # to close it would end the process
                    return
                except StoreError:
                    pass
                _mapped.pop(self._shared_file or (0, 0), None)  # whose number another file may get
                try:
                    if not self._durable and self._access == "rw":
                        # The log is worked in now, and the next may be durable.
                        connection.execute("PRAGMA synchronous = FULL")
                finally:
                    connection.close()

    def _require_alone(self, connection: sqlite3.Connection) -> None:
        """Raise a LockedError if another process has committed, in spite of the lock; in a transaction."""
        version = _version(connection)
        if version != self._version and _text(connection) != self._known:
            raise LockedError(
                f"{self.path}: expected no other writer, got a commit of another process, which the lock did not keep "
                "from writing: this one's round does not count; see to it that there is one, and open the store again"
            )
        self._version = version  # it changes after this process's own errors too

    def _connection(self) -> sqlite3.Connection:
        if self._shared is not None and self._owner != os.getpid():
            _inherited.append(self._shared)
            self._shared = None
        if self._shared is None:
            require_no_journal(self.path)
            connection = connect(self.path, self._access)
            try:
                connection.execute(f"PRAGMA synchronous = {'FULL' if self._durable else 'OFF'}")
                if self._access != "immutable" and connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
                    # Every transaction would look for a rollback journal, and play it back.
                    raise StoreError(
                        f"{self.path}: expected a database with a write-ahead log, got another: use a copy"
                    )
                connection.execute("PRAGMA fullfsync = ON")  # of syncs on macOS, which alone takes note of it
                connection.execute("PRAGMA trusted_schema = OFF")  # the file may be a stranger's
                connection.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
            except BaseException:
                connection.close()
                raise
            self._owner, self._shared = os.getpid(), connection
        return self._shared

    @contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        """The connection; whatever is wrong is named with the file."""
        with _explained(self.path):
            self._require_mapped()
            connection = self._connection()
            try:
                yield connection
            finally:
                with suppress(StoreError):
                    self._require_mapped()  # which remembers how long it has become

    def _require_mapped(self) -> None:
        """Reject an index whose shared memory was cut short: SQLite has mapped it, and would end the process."""
        shared = self.path.with_name(SHARED)
        with disk.explained("looking at", shared):
            if not shared.exists():  # not made yet; if it is deleted, its memory stays
                return
            found = os.lstat(shared)
        self._shared_file = found.st_dev, found.st_ino
        most = _mapped.setdefault(self._shared_file, found.st_size)
        if found.st_size < most:
            raise _CutError(
                f"{shared}: expected {most} bytes, got {found.st_size}: another program has cut it short; end this "
                "process, and open the store in a new one"
            )
        _mapped[self._shared_file] = found.st_size

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """A connection that sees one commit until the block is done; whatever is wrong is named with the file."""
        with self._using() as connection:
            connection.execute("BEGIN")
            try:
                yield connection
            except CorruptionError as error:
                raise _damaged(self.path, error) from error
            finally:
                connection.rollback()


def _version_of(path: Path, connection: sqlite3.Connection) -> int:
    """The version of the format of a file that is an index, in a transaction: a writer may raise it."""
    kind = connection.execute("PRAGMA application_id").fetchone()[0]
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if kind != _APPLICATION:
        raise StoreError(f"{path}: expected the index of a fedcore store, got another SQLite file")
    if version not in GRAINS:
        raise StoreError(
            f"{path}: expected a format up to {VERSION}, got {version}: open it with the version of "
            "fedcore that wrote it, or a newer one"
        )
    _require_tables(connection, version)
    return version


def _require_tables(connection: sqlite3.Connection, version: int) -> None:
    """Refuse a file that holds anything but the index's tables: a view can compute without end, a trigger can write."""
    found = [row[0] if row[1] == "table" else f"{row[1]} {row[0]}" for row in connection.execute(_SCHEMA)]
    found = [sql for sql in found if sql != _DOCUMENTS]
    if found != sorted((*_TABLES, PREVIOUS_TABLE) if version >= KEEPS_PREVIOUS else _TABLES):
        raise CorruptionError(f"schema: expected the tables of an index, got {', '.join(map(str, found))[:200]}")


def _has_documents(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'documents'").fetchone() is not None


def _read_previous(connection: sqlite3.Connection, last: Head) -> Previous | None:
    """The commit before the last, None where the last head has no digest of one."""
    if last.previous is None:
        return None
    return Previous.parsed(connection.execute("SELECT head, rows, clients FROM previous").fetchone(), last)


def _head(connection: sqlite3.Connection) -> Head:
    return Head.parsed(_text(connection))


def _text(connection: sqlite3.Connection) -> Any:
    found = connection.execute("SELECT content FROM head").fetchall()
    return found[0][0] if found else None


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA data_version").fetchone()[0])


def _code(error: BaseException) -> int | None:
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF  # without SQLite's extension of it


def _is_write(error: BaseException) -> bool:
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_IOERR_WRITE


def _damaged(path: Path, error: Exception) -> CorruptionError:
    return CorruptionError(f"{path}: damaged: {error}; use a copy of the store")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into a store's."""
    try:
        yield
    except UnicodeDecodeError as error:  # of SQLite's message, which repeats what it has found
        raise _damaged(path, error) from error
    except sqlite3.Error as error:
        what = {
            sqlite3.SQLITE_FULL: "the disk is full",
            sqlite3.SQLITE_READONLY: "it cannot be written to",
            sqlite3.SQLITE_CANTOPEN: "it cannot be opened",
            sqlite3.SQLITE_BUSY: "another process holds it",
            sqlite3.SQLITE_IOERR: "reading or writing failed",
            sqlite3.SQLITE_PROTOCOL: "locking it failed",
        }.get(_code(error) or 0)
        if _is_write(error):
            what = "writing failed, at a quota or a limit of the file's size, say"
        if what is not None:
            raise StoreError(f"{path}: {what} ({error})") from error
        raise _damaged(path, error) from error
