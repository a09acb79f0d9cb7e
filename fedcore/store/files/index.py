"""The index: the slot of each row, in an SQLite file that changes by atomic transactions."""

import ctypes
import fcntl
import os
import sqlite3
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedcore.errors import CorruptionError, LockedError, StoreError
from fedcore.files import SAFE, OpenFolder, closed_on_error, opened
from fedcore.store.files import disk, entries
from fedcore.store.files.entries import Entries, Head, Listed, Previous, Transaction, client_digests, total
from fedcore.store.files.inventory import INDEX, LOG, SHARED, require_no_journal
from fedcore.store.files.slot_file import unknown_format
from fedcore.store.slots import GRAINS, VERSION

Access = Literal["rw", "ro", "immutable"]
_File = tuple[int, int]  # device and inode number
_RESERVED = 0x40000001  # the byte of its file that SQLite locks for a writer with a rollback journal
_TRIES = 100


class _Turn:
    """A lock for which a garbage collection may ask while its thread has it: a dropped store is then closed at the end.

    Without that, a collection within ``connect`` would wait for its own thread.
    """

    def __init__(self) -> None:
        self._lock, self._holder = threading.Lock(), 0
        self.dropped: list[_Connection] = []

    @property
    def is_held(self) -> bool:
        """Whether the calling thread has the lock."""
        return self._holder == threading.get_ident()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._holder = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        while True:
            while self.dropped:
                self.dropped.pop().end()
            self._holder = 0
            self._lock.release()
            if not self.dropped or not self._lock.acquire(blocking=False):
                return
            self._holder = threading.get_ident()


_turn = _Turn()
_uses: dict[_File, int] = {}  # the number of open connections to each index
_open: dict[_File, list[int]] = {}  # the descriptors that hold the lock of each index


def _begin_in_fork() -> None:
    global _turn
    _turn = _Turn()


os.register_at_fork(after_in_child=_begin_in_fork)


class _Connection(sqlite3.Connection):
    """A connection to a locked index."""

    file: _File | None = None

    def close(self) -> None:
        if _turn.is_held:
            _turn.dropped.append(self)
            return
        with _turn:
            self.end()

    def end(self) -> None:
        """Close the connection; ``_turn`` is held."""
        super().close()
        file, self.file = self.file, None
        if file is not None:
            _release(file)


def connect(folder: OpenFolder, access: Access) -> sqlite3.Connection:
    """Connect to the index in a folder, so that SQLite never rolls back from a journal that appears next to it.

    SQLite uses such a journal unless a live writer locks the reserved byte of the index. So this process locks the
    byte, with a shared lock of the open file. Since every index has a write-ahead log, no other code locks the byte.
    For "immutable" access, SQLite looks for no journal.
    """
    path = folder.path / INDEX
    if access == "immutable":
        return _connected(path, "immutable=1")
    with _turn, disk.explained("opening", path):
        for _ in range(_TRIES):
            file, before = _locked(folder), _files()
            try:
                connection = _connected(path, f"mode={access}")
            except BaseException:
                _release(file)
                raise
            # Nothing was read yet. If another thread opens a file, it looks like a swapped index, and the loop repeats.
            if all(opened == file for _, opened in _files() - before):
                connection.file = file
                return connection
            connection.end()
            _release(file)
    raise StoreError(f"{path}: other processes keep replacing the file; do not use this folder")


def _connected(path: Path, options: str) -> _Connection:
    name = f"{path.absolute().as_uri()}?{options}"
    return sqlite3.connect(
        name, uri=True, isolation_level=None, timeout=60, check_same_thread=False, factory=_Connection
    )


def _locked(folder: OpenFolder) -> _File:
    """Lock the index, once for all connections of this process; return its device and inode number."""
    file = _number_of(os.stat(INDEX, dir_fd=folder.fd, follow_symlinks=False))
    if file not in _uses:
        fd = folder.open(INDEX, os.O_RDONLY)
        file = _number_of(os.fstat(fd))
        _open.setdefault(file, []).append(fd)
    _uses[file] = _uses.get(file, 0) + 1
    try:
        if lock := getattr(fcntl, "F_OFD_SETLK", None):  # only Linux has it
            for fd in _open[file]:
                fcntl.fcntl(fd, lock, struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, _RESERVED, 1, 0))
    except BaseException:
        _release(file)
        raise
    return file


def _release(file: _File) -> None:
    """Unlock an index after its last connection: closing any descriptor of a file releases SQLite's own locks."""
    _uses[file] -= 1
    if not _uses[file]:
        del _uses[file]
        for fd in _open.pop(file):
            os.close(fd)


def _files() -> set[tuple[int, _File]]:
    """Return the regular files that this process has open; nothing if the system does not list them."""
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
    entries.CLIENTS_TABLE,
)
_DOCUMENTS = "CREATE TABLE documents(number INTEGER PRIMARY KEY, content TEXT NOT NULL)"
KEEPS_PREVIOUS = 3
"""The first format whose index can keep the previous commit."""
_SCHEMA = "SELECT sql, type FROM sqlite_master ORDER BY sql"
_WAL_PAGES = 16000  # pages of 1 KB: the size at which the log is moved into the file
_REASONS = {
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_READONLY: "writing to the file is not permitted",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened",
    sqlite3.SQLITE_BUSY: "another process has locked the file",
    sqlite3.SQLITE_IOERR: "reading or writing failed",
    sqlite3.SQLITE_PROTOCOL: "locking the file failed",
}

_inherited: list[sqlite3.Connection] = []  # a forked process must not even close its parent's connections
_mapped: dict[_File, int] = {}  # the last known size of each shared memory file, in bytes
os.register_at_fork(after_in_child=_mapped.clear)  # the inode numbers may be reused once the parent closes its files


class _CutError(StoreError):
    """A file that this process has mapped was truncated."""


class Index:
    """An index file. Each process that uses it has its own connection.

    Transactions of a durable index survive a loss of power. The head has sums of the digests of all entries, and a
    digest of itself. So ``load`` detects entries that were changed, lost or restored.

    Attributes:
        previous: the previous commit, as last loaded or written; None if it is not kept.
        in_doubt: whether a transaction failed with an unknown result.
    """

    def __init__(self, folder: OpenFolder, *, durable: bool, access: Access) -> None:
        self._folder, self.path = folder, folder.path / INDEX
        self.in_doubt = False
        self._durable, self._access = durable, access
        self._owner = 0
        self._shared: sqlite3.Connection | None = None
        self._syncs = True  # whether each transaction waits for the disk, if the index is durable
        self._shared_file: _File | None = None  # the shared memory file
        self.previous: Previous | None = None
        self._digests = np.zeros(0, np.uint64)  # of the rows, by number
        self._known: str | None = None  # the head that this process loaded or wrote last
        self._tried: str | None = None  # the head that this process tried to write last
        self._documents = -1  # the number of the last document of that head
        self._version = 0  # SQLite's data_version of the file, which other connections' transactions change
        try:
            with self._reading() as connection:
                self.version = _version_of(self.path, connection)
        except BaseException:
            with suppress(StoreError):
                self.close()
            raise

    @classmethod
    def create(cls, path: Path, head: Head, clients: Listed) -> None:
        """Write a new index durably, with these clients and without rows."""
        require_no_journal(path)
        with _explained(path), closing(sqlite3.connect(path, isolation_level=None)) as connection:
            # Small pages, since a cohort's entries are scattered and a transaction writes whole pages.
            connection.execute("PRAGMA page_size = 1024")
            connection.execute("PRAGMA journal_mode = MEMORY")  # so that no store ever has a rollback journal
            connection.execute("PRAGMA synchronous = OFF")  # one sync at the end suffices
            connection.execute(f"PRAGMA application_id = {_APPLICATION}")
            connection.execute(f"PRAGMA user_version = {VERSION}")
            connection.execute("BEGIN")
            for statement in (*_TABLES, entries.PREVIOUS_TABLE):
                connection.execute(statement)
            entries.write_clients(connection, zip(clients.numbers.tolist(), clients.ids, strict=True))
            head = replace(head, clients_sum=total(entries.listed_digests(clients)))
            connection.execute("INSERT INTO head VALUES(0, ?)", (head.text(),))
            connection.execute("COMMIT")
            connection.execute("PRAGMA journal_mode = WAL")
        with disk.explained("syncing", path):
            disk.sync_path(path)

    def raise_format(self) -> None:
        """Let the index keep the previous commit. An older format is upgraded in one transaction."""
        if self.version < KEEPS_PREVIOUS:
            with self._writing() as connection:
                connection.execute(entries.PREVIOUS_TABLE)
                connection.execute(f"PRAGMA user_version = {VERSION}")
                disk.commit(connection)
            self.version = VERSION

    def renew(self) -> None:
        """Make the log durable again before a writer relies on it.

        If a sync of a dead process failed, the last commits in the log exist only in memory. The system treats them as
        written. A loss of power would lose them and everything after them in the log.
        """
        with disk.explained("syncing", self.path.with_name(LOG)):
            if self._durable and self._folder.found(LOG):
                with opened(LOG, os.O_RDWR | SAFE, self._folder.fd) as fd:
                    disk.renew(fd)
        with self._using() as connection:
            self._empty_log(connection)

    def vacuum(self) -> None:
        """Rewrite the file and empty its log, so that neither contains deleted entries."""
        with self._using() as connection:
            connection.execute("PRAGMA temp_store = MEMORY")  # no temporary file has the entries
            connection.execute("VACUUM")
            self._empty_log(connection)

    def _empty_log(self, connection: sqlite3.Connection) -> None:
        if not disk.work_in(connection):
            raise StoreError(f"{self.path}: another process keeps reading the log; end that process and try again")

    def head(self) -> Head:
        """Return the head of the last commit."""
        with self._reading() as connection:
            head = self._read_head(connection)
            self.previous = _read_previous(connection, head)
        return head

    def load(self) -> tuple[Head, Entries, Listed]:
        """Return the head, all rows and all listed clients of the last commit."""
        with self._reading() as connection:
            head = Head.parsed(_text(connection))
            try:
                table = np.array(connection.execute("SELECT * FROM rows").fetchall(), np.int64).reshape(-1, 4)
                clients = entries.read_all_clients(connection)
                if total(entries.listed_digests(clients)) != head.clients_sum:
                    raise CorruptionError("clients: the digest does not match")
            except (OverflowError, TypeError, ValueError) as error:
                raise CorruptionError(str(error)) from error
            rows = table.view(entries.ENTRY).reshape(-1)
            digests = entries.row_digests(rows)
            if total(digests) != head.rows_sum or (table[:, :3] < 0).any():
                raise CorruptionError("rows: the digest does not match")
            previous = _read_previous(connection, head)
            self._documents = _last_document(connection)
            self._read_head(connection)
        self._digests = np.zeros(int(rows["number"].max(initial=-1)) + 1, np.uint64)
        self._digests[rows["number"]] = digests
        self.previous = previous
        return head, rows, clients

    def _read_head(self, connection: sqlite3.Connection) -> Head:
        """Return the head, and record it as the last one that this process knows."""
        self._known, self._version = _text(connection), _version(connection)
        return Head.parsed(self._known)

    def write(self, transaction: Transaction, old: Head) -> Head:
        """Write a transaction after the head ``old``; return the new head."""
        head, rows, clients, removed, replaced, documents = transaction
        numbers, digests = rows["number"], np.where(rows["slot"] > 0, entries.row_digests(rows), 0)
        most = int(numbers.max(initial=-1)) + 1
        if (known := len(self._digests)) < most:  # grow by at least a quarter, since each growth copies the array
            more = max(most, 1024, known * 5 // 4) - known
            self._digests = np.concatenate([self._digests, np.zeros(more, np.uint64)])
        rows_sum = (head.rows_sum + total(digests) - total(self._digests[numbers])) % 2**64
        with self._writing(synced=not head.unsynced) as connection:
            self._require_only_writer(connection)
            changed = [number for number, _ in clients] + list(removed)
            before = entries.read_clients(connection, changed)
            clients_sum = head.clients_sum + total(client_digests(clients)) - total(client_digests(before))
            table = entries.as_table(rows)[np.argsort(numbers)]  # in the order of the file
            connection.executemany("REPLACE INTO rows VALUES(?, ?, ?, ?)", table[table[:, 1] > 0].tolist())
            connection.executemany("DELETE FROM rows WHERE number = ?", table[table[:, 1] == 0, :1].tolist())
            entries.write_clients(connection, clients)
            connection.executemany("DELETE FROM clients WHERE number = ?", zip(removed))
            if documents:
                connection.execute(_DOCUMENTS.replace("TABLE", "TABLE IF NOT EXISTS"))
                connection.execute("DELETE FROM documents WHERE number >= ?", (documents[0][0],))
                connection.executemany("INSERT INTO documents VALUES(?, ?)", documents)
            listed = dict(before)
            unlisted = tuple(number for number in changed if number not in listed)
            previous = None if replaced is None else Previous(old, replaced, tuple(before), unlisted)
            if previous is not None and old.unsynced and self.previous is not None:
                previous = self.previous.extended(previous)
            seal = None
            if previous is not None:
                columns = previous.columns()
                connection.execute("REPLACE INTO previous VALUES(0, ?, ?, ?)", columns)
                seal = entries.columns_digest(columns)
            elif self.previous is not None:
                connection.execute("DELETE FROM previous")
            head = replace(head, rows_sum=rows_sum, clients_sum=clients_sum % 2**64, previous=seal)
            self._tried = head.text()
            connection.execute("UPDATE head SET content = ?", (self._tried,))
            self.in_doubt = True
            disk.commit(connection)
            self._known = self._tried
            self.in_doubt = False
        self._digests[numbers] = digests
        self.previous = previous
        return head

    def documents(self, first: int = 0) -> list[tuple[int, str]]:
        """Return the caller's documents from the number ``first`` on, by ascending number.

        For a reader, those that the commit of ``load`` has: later commits only append documents.
        """
        with self._reading() as connection:
            query = "SELECT number, content FROM documents WHERE number BETWEEN ? AND ? ORDER BY number"
            last = self._documents if self._access == "ro" else _last_document(connection)
            found = connection.execute(query, (first, last)) if last >= 0 else ()
            return [(int(number), str(text)) for number, text in found]

    def has(self, sequence: int) -> bool:
        """Whether the file has this process's own transaction of that number."""
        with self._reading() as connection:
            text = _text(connection)
            return Head.parsed(text).sequence >= sequence and text == self._tried

    def check(self) -> list[str]:
        """Return the faults that SQLite finds in its file."""
        with self._reading() as connection:
            found = [str(line) for (line,) in connection.execute("PRAGMA integrity_check(20)")]
        return [] if found == ["ok"] else found

    def close(self) -> None:
        """Close this process's connection."""
        connection, self._shared = self._shared, None
        if connection is None:  # SQLite may have failed after it shortened an old file
            with suppress(OSError):
                if (found := self._folder.found(INDEX)) is None or _number_of(found) not in _uses:
                    _mapped.pop(self._shared_file or (0, 0), None)
        elif self._owner != os.getpid():
            _inherited.append(connection)
        else:
            with _explained(self.path):
                try:
                    self._require_mapped()
                except _CutError:
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))  # closing it would kill the process
                    return
                except StoreError:
                    pass
                _mapped.pop(self._shared_file or (0, 0), None)  # another file may get the inode number
                try:
                    if not self._durable and self._access == "rw":
                        # Closing moves the log into the file, and the next writer may be durable.
                        connection.execute("PRAGMA synchronous = FULL")
                finally:
                    connection.close()

    def _require_only_writer(self, connection: sqlite3.Connection) -> None:
        """Raise a LockedError if another process has committed despite the lock. Call it in a transaction."""
        version = _version(connection)
        if version != self._version and _text(connection) != self._known:
            raise LockedError(
                f"{self.path}: another process has committed despite the lock, so this commit was discarded; end one "
                "of the two processes and open the store again"
            )
        self._version = version  # this process's own errors change it too

    def _connection(self) -> sqlite3.Connection:
        if self._shared is not None and self._owner != os.getpid():
            _inherited.append(self._shared)
            self._shared = None
        if self._shared is None:
            require_no_journal(self.path)
            connection = connect(self._folder, self._access)
            with closed_on_error(connection):
                connection.execute(f"PRAGMA synchronous = {'FULL' if self._durable else 'OFF'}")
                if self._access != "immutable" and connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
                    # Every transaction would look for a rollback journal and use it.
                    raise StoreError(f"{self.path}: the index has no write-ahead log; use a copy of the store")
                if self._access != "immutable" and not self._is_in_folder():
                    # Closing is safe: SQLite deletes a log only if its index is still in its place.
                    raise StoreError(f"{self.path}: other processes keep replacing the folder; do not use it")
                connection.execute("PRAGMA fullfsync = ON")  # only macOS needs it
                connection.execute("PRAGMA trusted_schema = OFF")  # another user may have written the file
                connection.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
            self._owner, self._shared, self._syncs = os.getpid(), connection, True
        return self._shared

    def _is_in_folder(self) -> bool:
        """Whether SQLite, which opens its files by path, has opened the log and the shared memory of this folder."""
        with disk.explained("reading", self.path):
            found, used = [self._folder.found(name) for name in (LOG, SHARED)], {file for _, file in _files()}
        return not used or all(one is not None and _number_of(one) in used for one in found)

    @contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection; errors name the file."""
        with _explained(self.path):
            self._require_mapped()
            connection = self._connection()
            try:
                yield connection
            finally:
                with suppress(StoreError):
                    self._require_mapped()  # records the new size of the file

    def _require_mapped(self) -> None:
        """Reject an index whose shared memory file was truncated. SQLite has mapped it, and would kill the process."""
        shared = self.path.with_name(SHARED)
        with disk.explained("reading", shared):
            if not shared.exists():  # it does not exist yet; if it was deleted, the mapping stays valid
                return
            found = os.lstat(shared)
        self._shared_file = _number_of(found)
        most = _mapped.setdefault(self._shared_file, found.st_size)
        if found.st_size < most:
            raise _CutError(
                f"{shared}: truncated by another program from {most} to {found.st_size} bytes; end this process and "
                "open the store in a new one"
            )
        _mapped[self._shared_file] = found.st_size

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection that sees one commit until the block ends; errors name the file."""
        with self._using() as connection:
            connection.execute("BEGIN")
            try:
                yield connection
            except CorruptionError as error:
                raise _damaged(self.path, error) from error
            finally:
                connection.rollback()

    @contextmanager
    def _writing(self, *, synced: bool = True) -> Iterator[sqlite3.Connection]:
        """Yield a connection in a transaction. The block commits it; an error rolls it back.

        Without ``synced``, a loss of power can undo the transaction, together with all later ones.

        After a failed write (a full disk, or a quota) the log does not have the transaction. After other SQLite errors,
        for example of a sync, the transaction may or may not reappear when the file is opened again. Any other error
        occurred before or after the commit, and the file shows which.
        """
        with self._using() as connection:
            if self._durable and synced != self._syncs:
                connection.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
                self._syncs = synced
            try:
                connection.execute("BEGIN IMMEDIATE")
                yield connection
            except BaseException as error:
                if _code(error) == sqlite3.SQLITE_FULL or _is_write(error) or not isinstance(error, sqlite3.Error):
                    self.in_doubt = False
                if connection.in_transaction:
                    connection.rollback()
                raise


def _version_of(path: Path, connection: sqlite3.Connection) -> int:
    """Return the format version of an index. Call it in a transaction, since a writer may upgrade the format.

    A file with other tables, views or triggers is rejected: a view can compute without end, and a trigger can write.
    """
    kind = connection.execute("PRAGMA application_id").fetchone()[0]
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if kind != _APPLICATION:
        raise StoreError(f"{path}: an SQLite file, but not the index of a fedcore store")
    if version not in GRAINS:
        raise StoreError(f"{path}: {unknown_format(version)}")
    found = [row[0] if row[1] == "table" else f"{row[1]} {row[0]}" for row in connection.execute(_SCHEMA)]
    found = [sql for sql in found if sql != _DOCUMENTS]
    if found != sorted((*_TABLES, entries.PREVIOUS_TABLE) if version >= KEEPS_PREVIOUS else _TABLES):
        raise CorruptionError(f"schema: unexpected tables, views or triggers: {', '.join(map(str, found))[:200]}")
    return version


def _last_document(connection: sqlite3.Connection) -> int:
    """Return the number of the last document; -1 without documents."""
    table = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'documents'").fetchone()
    return -1 if table is None else connection.execute("SELECT ifnull(max(number), -1) FROM documents").fetchone()[0]


def _read_previous(connection: sqlite3.Connection, last: Head) -> Previous | None:
    """Return the previous commit; None if the last head has no digest of one."""
    if last.previous is None and not last.unsynced:
        return None
    return Previous.parsed(connection.execute("SELECT head, rows, clients FROM previous").fetchone(), last)


def _text(connection: sqlite3.Connection) -> Any:
    found = connection.execute("SELECT content FROM head").fetchall()
    return found[0][0] if found else None


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA data_version").fetchone()[0])


def _code(error: BaseException) -> int | None:
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF  # without SQLite's extended error code


def _is_write(error: BaseException) -> bool:
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_IOERR_WRITE


def _damaged(path: Path, error: Exception) -> CorruptionError:
    return CorruptionError(f"{path}: damaged: {error}; use a copy of the store")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into errors of a store."""
    try:
        yield
    except UnicodeDecodeError as error:  # SQLite's message repeats bytes of the file
        raise _damaged(path, error) from error
    except sqlite3.Error as error:
        reason = _REASONS.get(_code(error) or 0)
        if _is_write(error):
            reason = "writing failed, perhaps because of a quota or a file size limit"
        if reason is not None:
            raise StoreError(f"{path}: {reason} ({error})") from error
        raise _damaged(path, error) from error
