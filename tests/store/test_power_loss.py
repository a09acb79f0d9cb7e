"""A loss of power leaves the last durable commit, also after a failed sync."""

import copy
import errno
import os
import random
import shutil
import sqlite3

import numpy as np
import pytest

from fedcore import ClientStore, errors
from fedcore.store.files import disk
from tests.store.kit import content, write
from tests.store.recording import Recorder, put

N = 20
# A round writes these rows (with the round as the key) : and these vectors; or something else happens.
STEPS = {
    "round": "a:x ab:x bc:xy -a c:y +d cd:xz compact b: d:x",
    "checkpoint": "a: ab: checkpoint a:x a:x -b checkpoint :x :x +d d: compact d: checkpoint",
}
UNDOABLE = {
    "round": "ab:x undo bc:xy -a c:y undo +d ad:xz d: undo compact b: undo d:x",
    "checkpoint": "ab:x checkpoint a: -b c:y checkpoint undo b:x +d d:x checkpoint compact d: checkpoint undo",
}


class Model:
    """The present content of a store, the one in its folder, and the previous one or that of the last checkpoint."""

    def __init__(self):
        self.now = {"rows": {}, "vectors": {}, "round": 0, "clients": ["a", "b", "c"]}
        self.told, self.previous, self.unsynced = copy.deepcopy(self.now), None, False

    def tell(self, store, *, synced=True):
        """Publish the present content."""
        if self.now == self.told and not self.unsynced:
            return
        if not self.unsynced:
            self.previous = self.told
        if synced and not store.keep_previous:
            self.previous = None
        self.told, self.unsynced = copy.deepcopy(self.now), not synced

    def undo(self):
        self.now, self.told = copy.deepcopy(self.previous), self.previous
        self.previous, self.unsynced = None, False


def run(store, recorder, model, steps):
    """Do the steps."""
    recorder.upcoming = model
    for round, step in enumerate(steps.split(), 1):
        now = model.now
        match step.partition(":"):
            case ("compact", "", _):
                model.tell(store)
                model.previous = None
                store.compact()
            case ("checkpoint", "", _):
                model.tell(store)
                store.checkpoint()
            case ("undo", "", _):
                model.undo()
                assert store.undo()
            case (change, "", _) if change.startswith("-"):
                store.forget(step[-1])
                now["rows"].pop(step[-1], None)
                now["clients"].remove(step[-1])
            case (_, "", _):
                store.add(step[-1])
                now["clients"].append(step[-1])
            case (clients, _, vectors):
                for client in clients:
                    write(store, client, content(N, client, round))
                    now["rows"][client] = round
                if vectors:
                    now["vectors"] = dict.fromkeys(vectors, round)
                now["round"] = round
                model.tell(store, synced=store.durability == "round")
                named = {name: content(N, name, round) for name in vectors} if vectors else None
                store.commit(round, named, {"round": round})


def assert_is_any(store, *models):
    """The store is at one of these states; return it."""
    found = next((model for model in models if model.told["round"] == store.round), models[0])
    assert_holds(store, found.told)
    return found


def assert_holds(store, model):
    assert store.round == model["round"]
    assert store.state == {"round": model["round"]}
    assert sorted(store.registry) == sorted(model["clients"])
    for client in model["clients"]:
        round = model["rows"].get(client)
        assert store.round_of(client) == round
        expected = np.zeros(N, np.float32) if round is None else content(N, client, round)
        np.testing.assert_array_equal(store.read(client), expected)
    assert set(store.vector_names()) == set(model["vectors"])
    for name, round in model["vectors"].items():
        np.testing.assert_array_equal(store.vector(name), content(N, name, round))
    assert store.verify() == []


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("keep_previous", "one_of"),
    [(False, 6), (True, 12), *(pytest.param(keeps, 1, marks=pytest.mark.endurance) for keeps in (False, True))],
)
@pytest.mark.parametrize("durability", ["round", "checkpoint"])
def test_every_disk_that_a_loss_of_power_can_leave(tmp_path, monkeypatch, durability, keep_previous, one_of):
    """All of them, or a random one of so many."""
    path = tmp_path / "store"
    with ClientStore(["a", "b", "c"], N, medium="mmap", codec="bf16", path=path) as store:
        store.commit(0, {}, {"round": 0})
    store = ClientStore.open(path, durability=durability, keep_previous=keep_previous)
    recorder = Recorder(path, monkeypatch)
    run(store, recorder, Model(), (UNDOABLE if keep_previous else STEPS)[durability])
    monkeypatch.undo()
    store.close()
    tried = undone = went_back = 0
    chance = random.Random(1)
    for files, committed in recorder.crashes():
        if chance.randrange(one_of):
            continue
        put(files, tmp_path / "left")
        tried += 1
        durable, latest = committed or Model(), recorder.latest or Model()
        writes = latest.unsynced or tried % (2 if keep_previous else 4) == 0
        with ClientStore.open(
            tmp_path / "left", readonly=not writes, durability="none", keep_previous=writes and keep_previous
        ) as left:
            found = assert_is_any(left, latest, durable)
            if latest.unsynced and found is durable:  # it went back there, which keeps nothing
                assert left.previous is None
                went_back += 1
            elif left.keep_previous and found.previous is not None:
                assert left.undo()
                assert_holds(left, found.previous)
                undone += 1
            if writes:
                client = next(iter(left.registry))
                write(left, client, content(N, "on"))
                left.commit(99, {"x": content(N, "on")}, {"round": 99})
                np.testing.assert_array_equal(left.read(client), content(N, "on"))
                assert left.verify() == []
    assert tried > 200 / one_of
    assert (undone > 30 / one_of) == keep_previous
    assert (went_back > 30 / one_of) == (durability == "checkpoint")


SMALL = 50


@pytest.fixture
def path(tmp_path):
    """The folder of a store whose process died; its last commits are only in the log."""
    child = os.fork()
    if child == 0:
        store = ClientStore(3, SMALL, medium="mmap", path=tmp_path / "store")
        for round in range(4):
            write(store, round % 3, content(SMALL, round))
            store.commit(round, {"x": content(SMALL, round, 1)})
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "store" / "index.sqlite-wal").stat().st_size > 0
    return tmp_path / "store"


def assert_is_at(store, round):
    assert store.round == round
    assert store.verify() == []
    np.testing.assert_array_equal(store.read(round % 3), content(SMALL, round))


def test_opening_moves_the_log_of_a_dead_process_into_the_index(path, tmp_path):
    with ClientStore.open(path) as store:
        assert (path / "index.sqlite-wal").stat().st_size == 0
        shutil.copytree(path, tmp_path / "left", ignore=lambda *_: ["index.sqlite-wal", "index.sqlite-shm"])
        assert_is_at(store, 3)
    with ClientStore.open(tmp_path / "left") as left:
        assert_is_at(left, 3)


def test_the_log_is_durable_before_the_index_is_touched(path, monkeypatch):
    """Otherwise a loss of power in between could leave an index of two commits."""
    output, written = [], []

    def noting(name, act):
        def noted(*arguments):
            if name != "work_in":
                output.append((name, os.path.basename(os.readlink(f"/proc/self/fd/{arguments[0]}"))))
                written.extend(arguments[1:2])
            else:
                output.append(name)
            return act(*arguments)

        return noted

    for name in ("write", "sync", "work_in"):
        monkeypatch.setattr(disk, name, noting(name, getattr(disk, name)))
    before = (path / "index.sqlite-wal").read_bytes()
    ClientStore.open(path).close()
    assert output[:4] == [("write", "lock"), ("write", "index.sqlite-wal"), ("sync", "index.sqlite-wal"), "work_in"]
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


def test_a_log_that_another_process_reads_is_rejected(path, monkeypatch):
    monkeypatch.setattr(disk, "work_in", lambda connection: False)
    with pytest.raises(errors.StoreError, match="reading the log"):
        ClientStore.open(path)


def test_a_reader_in_a_read_holds_the_opening_up(path):
    """As SQLite reports it if it does not wait."""
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


def test_a_store_with_durability_none_is_durable_once_it_is_closed(path):
    """The next writer may be durable, and does not write the index again."""
    with ClientStore.open(path, durability="none") as store:
        connection = store._content.folder.index._connection()
        assert connection.execute("PRAGMA synchronous").fetchone() == (0,)
        output = []
        connection.set_trace_callback(output.append)
    assert output[-1] == "PRAGMA synchronous = FULL"
