"""A writer that opens a store makes durable anew what its log holds, before it believes it."""

import errno
import os
import shutil
import sqlite3

import numpy as np
import pytest

from fedcore import ClientStore, errors
from fedcore.store.files import system_calls as disk
from tests.store.contents import content, write

N = 50


@pytest.fixture
def path(tmp_path):
    """The folder of a store whose process died: its last commits are in the log alone."""
    child = os.fork()
    if child == 0:
        store = ClientStore(3, N, medium="mmap", path=tmp_path / "store")
        for round in range(4):
            write(store, round % 3, content(N, round))
            store.commit(round, {"x": content(N, round, 1)})
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "store" / "index.sqlite-wal").stat().st_size > 0
    return tmp_path / "store"


def assert_is_at(store, round):
    assert store.round == round
    assert store.verify() == []
    np.testing.assert_array_equal(store.read(round % 3), content(N, round))


def test_what_a_dead_process_left_in_the_log_is_in_the_index_at_once(path, tmp_path):
    with ClientStore.open(path) as store:
        assert (path / "index.sqlite-wal").stat().st_size == 0
        shutil.copytree(path, tmp_path / "left", ignore=lambda *_: ["index.sqlite-wal", "index.sqlite-shm"])
        assert_is_at(store, 3)
    with ClientStore.open(tmp_path / "left") as left:
        assert_is_at(left, 3)


def test_the_log_is_durable_before_the_index_is_touched(path, monkeypatch):
    """Else a loss of power in between could leave an index of two commits."""
    said, written = [], []

    def noting(name, act):
        def noted(*arguments):
            if name != "work_in":
                said.append((name, os.path.basename(os.readlink(f"/proc/self/fd/{arguments[0]}"))))
                written.extend(arguments[1:2])
            else:
                said.append(name)
            return act(*arguments)

        return noted

    for name in ("write", "sync", "work_in"):
        monkeypatch.setattr(disk, name, noting(name, getattr(disk, name)))
    before = (path / "index.sqlite-wal").read_bytes()
    ClientStore.open(path).close()
    assert said[:4] == [("write", "lock"), ("write", "index.sqlite-wal"), ("sync", "index.sqlite-wal"), "work_in"]
    assert written[1] == before


@pytest.mark.parametrize("call", ["sync", "work_in"])
def test_a_log_that_cannot_be_made_durable_is_refused(path, monkeypatch, call):
    def failing(_):
        if call == "sync":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
        raise error

    monkeypatch.setattr(disk, call, failing)
    with pytest.raises(errors.StoreError, match=r"store/index.sqlite.* failed"):
        ClientStore.open(path)
    with ClientStore.open(path, readonly=True) as reader:
        assert_is_at(reader, 3)
    monkeypatch.undo()
    with ClientStore.open(path) as store:
        assert_is_at(store, 3)


def test_a_log_that_somebody_reads_is_refused(path, monkeypatch):
    monkeypatch.setattr(disk, "work_in", lambda connection: False)
    with pytest.raises(errors.StoreError, match="another process reads its log"):
        ClientStore.open(path)


def test_a_reader_in_a_read_holds_the_opening_up(path):
    """SQLite's own word for it, where it is not given the time to wait."""
    reader = sqlite3.connect(path / "index.sqlite", isolation_level=None)
    try:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM rows").fetchone() == (3,)
        writer = sqlite3.connect(path / "index.sqlite", isolation_level=None, timeout=0)
        assert not disk.work_in(writer)
        reader.execute("ROLLBACK")
        assert disk.work_in(writer)
        writer.close()
    finally:
        reader.close()


def test_a_store_without_promises_is_durable_once_it_is_closed(path):
    """The next writer may promise more, and does not write what is in the index again."""
    with ClientStore.open(path, durability="none") as store:
        connection = store._content.folder.index._connection()
        assert connection.execute("PRAGMA synchronous").fetchone() == (0,)
        said = []
        connection.set_trace_callback(said.append)
    assert said[-1] == "PRAGMA synchronous = FULL"
