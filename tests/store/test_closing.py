"""Stores that are closed, dropped and opened again."""

import gc
import os
import threading
import time
from threading import Event

import numpy as np
import pytest

from fedcore import ClientStore, Server, Update, errors
from fedcore.store.files import disk, index
from fedcore.store.files.slot_file import IDLE_SECONDS
from fedcore.store.registry import MOST
from fedcore.store.slots import GRAINS, VERSION, Geometry
from tests.kills import killed
from tests.kit import python
from tests.server.invariant import contradictions
from tests.store.kit import content, full, write

N = 40


@pytest.fixture
def written(tmp_path):
    """Stores of that durability, each with three clients and one commit in its own folder."""

    def store(durability):
        made = ClientStore(3, N, medium="mmap", path=tmp_path / durability, durability=durability)
        for client in range(3):
            write(made, client, content(N, client))
        made.commit(0, {"x": content(100, 0)})
        return made

    return store


def assert_close_fails(store, monkeypatch, name, match):
    """The disk is full for system calls of that name."""

    def failing(*_):
        raise full(name)

    with monkeypatch.context() as patched, pytest.raises(errors.StoreError, match=match):
        patched.setattr(disk, name, failing)
        store.close()


def test_a_store_whose_files_cannot_shrink_is_closed(written, monkeypatch):
    store = written("round")
    assert_close_fails(store, monkeypatch, "resize", "shrinking failed")
    with ClientStore.open(store.path) as again:  # the first one has released its lock
        assert (again.round, again.verify()) == (0, [])
    store.close()  # a second time does nothing


def test_a_store_that_cannot_publish_can_be_closed_once_there_is_room(written, monkeypatch):
    store = written("checkpoint")
    assert_close_fails(store, monkeypatch, "commit", "the disk is full")
    np.testing.assert_array_equal(store.read(1), content(N, 1))
    store.close()
    with ClientStore.open(store.path) as again:
        assert again.round == 0
        np.testing.assert_array_equal(again.read(1), content(N, 1))


LARGE = 30


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name == "fedcore-store"]


def test_a_store_that_is_dropped_leaves_no_thread_and_no_file(tmp_path):
    gc.collect()  # leftovers of other tests
    files = os.listdir("/proc/self/fd")
    for number in range(5):
        store = ClientStore(3, LARGE, medium="mmap", path=tmp_path / f"{number}", durability="checkpoint")
        write(store, 0, content(LARGE, 0))
        store.commit(0)  # starts writing back
        store.prefetch([0])
        assert threads()
        del store
        gc.collect()
        assert not threads()
        ClientStore.open(tmp_path / f"{number}").close()
    assert os.listdir("/proc/self/fd") == files


def test_a_store_that_is_collected_in_its_own_thread(tmp_path):
    store = ClientStore(3, LARGE, medium="mmap", path=tmp_path / "store")
    write(store, 0, content(LARGE, 0))
    store.commit(0)
    background, done = store._session.background, threading.Event()
    held = [store]
    del store
    background._do(lambda: (held.clear(), gc.collect(), done.set()))
    assert done.wait(60)
    for thread in threading.enumerate():
        if thread.name == "fedcore-store":
            thread.join(60)
    assert not threads()
    ClientStore.open(tmp_path / "store").close()


def test_a_store_that_is_open_when_python_ends(tmp_path):
    program = f"""
from fedcore import ClientStore
store = ClientStore(3, 4, medium="mmap", path={str(tmp_path / "store")!r}, durability="checkpoint")
store.stage(0)[:] = 1
store.commit(0)
store.checkpoint()
store.prefetch([0])
"""
    run = python("-c", program)
    assert run.stdout + run.stderr == ""
    with ClientStore.open(tmp_path / "store") as store:
        assert store.round == 0


@pytest.mark.parametrize("clients", [10**10, MOST])
@pytest.mark.parametrize("method", ["FedAvg", "MIFA", "MimiC"])
def test_a_server_of_more_clients_than_fit_into_memory(method, clients):
    """A client without a row takes no memory."""
    server = Server(np.zeros(4, np.float32), method, clients=clients, lr=0.1)
    server.round([Update(i, server.x + 1, 1) for i in (0, 5)])
    assert server.round_number == 1
    assert server.store.row(clients - 1) is None
    assert server.store.round_of(clients - 1) is None
    server.broadcast([clients - 1])
    server.remove_client(clients - 1)
    server.add_clients("new") if clients < MOST else None
    assert len(server.store) == (0 if method == "FedAvg" else 2)


def test_a_row_without_memory_is_named(tmp_path):
    for where in ({}, {"medium": "mmap", "path": tmp_path / "store"}):
        with ClientStore(MOST, LARGE, **where) as store:
            with pytest.raises(errors.StoreError, match=r"^clients: .*memory.* \d+: .*[\d,]+ bytes"):
                store.stage(MOST - 1)
            write(store, 7, content(LARGE, 7))
            store.commit(0)
            store.prefetch([MOST - 1, 7])
            store.forget(MOST - 2)
            store.commit(1)
    with ClientStore.open(tmp_path / "store") as store:
        np.testing.assert_array_equal(store.read(7), content(LARGE, 7))
        assert store.row(MOST - 1) is None
        store.save(tmp_path / "copy")
        store.compact()
        assert store.verify() == []


AT_EXIT = """
import atexit, sys, threading
begun, may_go_on = threading.Event(), threading.Event()
def last():
    may_go_on.set()
    thread.join(60)
atexit.register(last)  # first, since later registrations run before it
import numpy as np
from fedcore import Server, Update
from fedcore.store.files import disk, index
server = Server(np.zeros(50, np.float32), "MIFA", 2, lr=0.1, storage=sys.argv[1])
act = getattr(disk, sys.argv[2])
def waiting(*arguments):
    begun.set()
    may_go_on.wait()
    return act(*arguments)
setattr(disk, sys.argv[2], waiting)
updates = [Update(client, server.x + 1, 1) for client in range(2)]
thread = threading.Thread(target=lambda: server.round(updates), daemon=True)
thread.start()
begun.wait()
"""


@pytest.mark.parametrize("call", ["write", "reserve", "sync", "commit"])
def test_a_thread_is_in_a_round_when_the_program_ends(tmp_path, call):
    """Its files stay open until the process ends, as after a kill."""
    assert python("-c", AT_EXIT, tmp_path / "run", call).stderr == ""
    with Server.load(tmp_path / "run") as server:
        assert server.round_number == 1
        assert server.store.verify() + contradictions(server) == []


@pytest.mark.parametrize(("n", "rows"), [(3, 300), (40_000, 40), (2_000_000, 5)])
@pytest.mark.parametrize("readers", [True, False])
def test_an_opened_store_takes_slots_above_the_old_ones(tmp_path, n, rows, readers):
    """The first slot that is taken is then above the ones that the file has reserved."""
    with ClientStore(2 * rows, n, medium="mmap", path=tmp_path / "s", durability="none") as store:
        for client in range(rows):
            write(store, client, content(n, client))
        store.commit(0)
    with ClientStore.open(tmp_path / "s", durability="none") as store:
        reader = ClientStore.open(tmp_path / "s", readonly=True) if readers else None
        for round in (1, 2):
            for client in range(rows // 2, rows + 1):
                write(store, client, content(n, client, round))
            store.commit(round)
        assert store.verify() == []
        for client in (0, rows // 2, rows):
            key = (client,) if client == 0 else (client, 2)
            np.testing.assert_array_equal(store.read(client), content(n, *key))
        if reader is not None:
            np.testing.assert_array_equal(reader.read(rows - 1), content(n, rows - 1))
            store.compact()  # beside a reader: its slots are not freed
            np.testing.assert_array_equal(reader.read(rows - 1), content(n, rows - 1))
            reader.close()
        store.compact()
        assert store.verify() == []
        assert store.info().free == 0
    with ClientStore.open(tmp_path / "s", medium="ram") as store:
        np.testing.assert_array_equal(store.read(rows), content(n, rows, 2))


def test_rows_may_be_of_another_round_than_the_commit(make):
    store = make(["a", "b", "c"], 131)
    for client in "abc":
        write(store, client, content(131, client))
    store.commit(3)
    write(store, "a", content(131, "again"))
    store.stage("a", round=3)
    store.stage("b", round=3)
    write(store, "b", content(131, "again"))  # staged without a round: it has the commit's
    store.stage("c", round=3)
    store.unstage("c")
    assert store.clients_of(3) == ["a", "b", "c"]
    store.commit(7)
    assert [store.round_of(client) for client in "abc"] == [3, 7, 3]
    assert (store.clients_of(3), store.clients_of(7), store.clients_of(5)) == (["a", "c"], ["b"], [])
    store.stage("a", round=3)
    store.discard()
    write(store, "a", content(131, 1))
    store.commit(8)
    assert store.round_of("a") == 8
    store.forget("c")
    assert store.clients_of(3) == []


def test_a_broadcast_reads_the_cohorts_rows_ahead(tmp_path):
    server = Server(np.zeros(30, np.float32), "MIFA", clients=5, lr=1.0, storage=tmp_path / "s")
    server.round([Update(i, np.zeros(30, np.float32), 1) for i in range(5)])
    asked, done, background = [], Event(), server.store._session.background
    background._slots.will_need = asked.append
    server.broadcast([3, 1])
    background._do(done.set)  # the thread's next task
    assert done.wait(10)
    slots = server.store._content.rows.slot
    assert asked == sorted(slots[[1, 3]].tolist())


@pytest.mark.parametrize("durability", ["round", "checkpoint", "none"])
def test_writing_begins_early_where_it_is_due_later_and_once_for_commits_in_a_row(tmp_path, durability):
    with ClientStore(3, 100, medium="mmap", path=tmp_path / "s", durability=durability) as store:
        begun = []
        store._folder.rows.start_writing = lambda: begun.append(store.round)
        for round in range(20):
            write(store, 0, content(100, round))
            store.commit(round)
        time.sleep(4 * IDLE_SECONDS)
        if durability == "checkpoint":
            background, done = store._session.background, Event()
            background._do(done.set)  # after all other tasks
            assert done.wait(60)
            assert 0 < len(begun) < 20  # fewer than commits, even on a busy machine
            assert begun[-1] == 19
        else:
            assert begun == []


def test_a_fork_has_its_own_rows():
    """A store in memory is copied with its process."""
    store = ClientStore(2, 300_000)  # rows on huge pages, if the system has them
    write(store, 0, content(300_000, 0))
    store.commit(0)

    def act():
        for round in (1, 2, 3):
            write(store, 0, content(300_000, round))
            store.commit(round)
        np.testing.assert_array_equal(store.read(0), content(300_000, 3))

    assert not killed(act)
    assert store.round == 0
    np.testing.assert_array_equal(store.read(0), content(300_000, 0))
    store.stage(1)[:] = 0
    np.testing.assert_array_equal(store.read(0), content(300_000, 0))


@pytest.mark.parametrize("keep_previous", [False, True])
def test_slots_of_vectors_that_were_free_are_used_again(tmp_path, keep_previous):
    path = tmp_path / "s"
    ClientStore(3, 5, medium="mmap", path=path).close()
    for session in range(6):
        with ClientStore.open(path, durability="none", keep_previous=keep_previous) as store:
            for round in range(3):
                store.commit(round, {"x": content(100, round), f"y{session}": content(100, session)})
    slots = 2 * (3 if keep_previous else 2)  # the commits that exist at once, with two vectors each
    assert (path / "vectors-400.slots").stat().st_size <= GRAINS[VERSION] + slots * Geometry.of(400).stride


@pytest.mark.parametrize("change", ["departure", "compaction", "another size"])
def test_a_writer_that_opens_again_takes_no_slot_that_a_reader_looks_at(tmp_path, change):
    """Nor one above all that the index names now, which would look like a new one."""

    def commit(store, client, round):
        write(store, client, content(20, client, round))
        size = 30 if change == "another size" and round == 1 else 20
        store.commit(round, {"x": content(size, round)})

    path = tmp_path / "store"
    with ClientStore(3, 20, medium="mmap", path=path) as store:
        commit(store, 1, 0)
        commit(store, 0, 0)
        write(store, 0, content(20, 0, 1))  # in the highest slot
        store.commit(0)
        reader = ClientStore.open(path, readonly=True)
        if change == "departure":
            store.forget(0)
            store.commit(0)
        elif change == "compaction":
            store.compact()
            store.compact()
        else:
            commit(store, 0, 1)
    for round in (2, 3):
        with ClientStore.open(path) as store:
            commit(store, 1, round)
            commit(store, 2, round)
            np.testing.assert_array_equal(reader.read(0), content(20, 0, 1))
            np.testing.assert_array_equal(reader.read(1), content(20, 1, 0))
            np.testing.assert_array_equal(reader.vector("x"), content(20, 0))
            assert reader.verify() == []
            assert store.info().free < 1000, (
                "slots that were never written do not wait for readers, except on a few pages"
            )
    reader.close()
    with ClientStore.open(path) as store:
        commit(store, 2, 4)
        assert store.verify() == []
        store.compact()
        rows = store._content.rows.slots
        assert (rows.high, rows.free) == (len(store), 0)


def test_a_closed_server_shows_its_model_without_its_files(tmp_path):
    server = Server(content(N, 0), "MIFA", clients=1, lr=0.1, storage=tmp_path / "run")
    server.round([Update(0, content(N, 1), 1)])
    x = server.x.tobytes()
    server.close()
    files = len(os.listdir("/proc/self/fd"))
    assert server.x.tobytes() == x
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_store_that_is_dropped_while_another_one_opens_is_closed(tmp_path, monkeypatch):
    """A collection within the lock of connections must not wait for its own thread."""
    dropped, files = ClientStore(3, N, medium="mmap", path=tmp_path / "dropped"), index._files
    dropped.itself = dropped
    del dropped

    def collecting():
        gc.collect()
        return files()

    with monkeypatch.context() as patched:
        patched.setattr(index, "_files", collecting)
        ClientStore(3, N, medium="mmap", path=tmp_path / "other").close()
    ClientStore.open(tmp_path / "dropped").close()
