"""Two writers, where the lock file was deleted or locks do nothing: one of them stops before it writes anything."""

import fcntl
import os
import shutil

import numpy as np
import pytest

from fedcore import ClientStore, Server, Update, errors
from tests.server.invariant import contradictions
from tests.store.contents import content, write

N = 50


def slots(folder):
    return {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.suffix == ".slots"}


def play(server):
    server.round([Update(i, server.x + 1 + i + server.round_number, 1) for i in range(4)])


def delete(lock):
    lock.unlink()


def replace(lock):
    lock.unlink()
    lock.write_bytes(b"process 1\n")


def rename(lock):
    lock.rename(lock.with_name("old"))


def overwrite(lock):
    """What another process does where locks do nothing."""
    lock.write_bytes(b"process 1\n")


@pytest.fixture
def server(tmp_path):
    server = Server("MIFA", np.zeros(N, np.float32), 4, lr=0.1, store=f"mmap:{tmp_path / 'run'}")
    play(server)
    yield server
    server.close()


@pytest.mark.parametrize("harm", [delete, replace, rename, overwrite])
def test_who_has_lost_the_lock_writes_nothing_more(server, tmp_path, harm):
    folder = tmp_path / "run"
    before, x, index = slots(folder), server.x.copy(), (folder / "index.sqlite-wal").read_bytes()
    harm(folder / "lock")
    for act in (play, play, lambda server: server.depart(1), lambda server: server.arrive(9)):
        with pytest.raises(errors.StoreError, match=r"open (it|the store) again"):
            act(server)
    assert (server.round_number, server.x.tobytes()) == (1, x.tobytes())
    server.close()  # nor does it cut the files to its own size
    assert slots(folder) == before
    shutil.copytree(folder, tmp_path / "left")
    (tmp_path / "left" / "lock").unlink(missing_ok=True)
    with Server.load(tmp_path / "left") as again:
        assert contradictions(again) == []
    assert index


def test_the_first_error_says_what_happened(server, tmp_path):
    (tmp_path / "run" / "lock").unlink()
    with pytest.raises(errors.LockedError, match=r"run/lock: expected the lock of this process .*, got none \(No such"):
        play(server)


def test_the_other_writer_goes_on(server, tmp_path):
    (tmp_path / "run" / "lock").unlink()
    with Server.load(tmp_path / "run") as other:
        for _ in range(3):
            with pytest.raises(errors.StoreError):
                play(server)
            play(other)
        server.close()
        play(other)
    with Server.load(tmp_path / "run") as again:
        assert again.round_number == 5
        assert contradictions(again) == []
        assert again.store.verify() == []


def test_where_locks_do_nothing_the_one_that_came_first_stops(server, tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    with Server.load(tmp_path / "run") as other:
        with pytest.raises(errors.LockedError, match=rf"got that of process {os.getpid()}: another process may write"):
            play(server)
        play(other)
        assert contradictions(other) == []


def stores(tmp_path, monkeypatch):
    """Two writers of one store that know nothing of each other."""
    monkeypatch.setattr("fedcore.store.files.locks.WriterLock.require", lambda lock: None)
    one = ClientStore(4, N, medium="mmap", path=tmp_path / "store")
    write(one, 0, content(N, 0))
    one.commit(0)
    (tmp_path / "store" / "lock").unlink()
    return one, ClientStore.open(tmp_path / "store")


def test_a_commit_of_another_stops_the_next(tmp_path, monkeypatch):
    one, other = stores(tmp_path, monkeypatch)
    write(other, 1, content(N, 1))
    other.commit(1)
    with pytest.raises(errors.LockedError, match=r"index.sqlite: expected no other writer, got a commit of another"):
        one.commit(1)
    assert one.round == 0
    with pytest.raises(errors.StoreError, match="another process has written to it: open it again"):
        one.commit(2)
    one.close()
    assert other.verify() == []
    write(other, 3, content(N, 3))
    other.commit(2)
    other.close()
    with ClientStore.open(tmp_path / "store") as store:
        assert (store.round, store.verify()) == (2, [])
        np.testing.assert_array_equal(store.read(1), content(N, 1))


def test_an_error_beside_another_s_commit_does_not_make_it_one_s_own(tmp_path, monkeypatch):
    """The number of the other's commit is the one that this one's would have had."""
    one, other = stores(tmp_path, monkeypatch)
    act = "fedcore.store.files.store_folder.Folder.publish"

    def failing(*_):
        write(other, 1, content(N, 1))
        monkeypatch.undo()
        other.commit(7)
        raise MemoryError

    write(one, 2, content(N, 2))
    monkeypatch.setattr(act, failing)
    with pytest.raises(MemoryError):
        one.commit(1)
    assert (one.round, one.round_of(2)) == (0, None)
    monkeypatch.setattr("fedcore.store.files.locks.WriterLock.require", lambda lock: None)
    with pytest.raises(errors.LockedError):
        one.commit(1)
    one.close()
    other.close()


def test_one_s_own_commits_and_checkpoints_of_the_log_are_nobody_else_s(tmp_path):
    with ClientStore(4, N, medium="mmap", path=tmp_path / "store") as store:
        store._content.folder.index._connection().execute("PRAGMA wal_autocheckpoint = 3")
        for round in range(40):
            write(store, round % 4, content(N, round))
            store.commit(round)
            with ClientStore.open(tmp_path / "store", readonly=True) as reader:
                assert reader.round == round
