"""Stores that are opened again and go on, whatever the size of their rows; rows of a round, and reading ahead."""

import os
import time
from threading import Event

import numpy as np
import pytest

from fedcore import ClientStore, Server, Update, errors
from fedcore.store.files.read_ahead import IDLE_SECONDS
from fedcore.store.geometry import GRAINS, VERSION, Geometry
from tests.store.contents import content, write


@pytest.mark.parametrize(("n", "rows"), [(3, 300), (40_000, 40), (2_000_000, 5)])
@pytest.mark.parametrize("readers", [True, False])
def test_a_store_goes_on_above_the_slots_that_it_had(tmp_path, n, rows, readers):
    """The first slot that is taken is then a high one, past all that the file has reserved at once."""
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
            store.compact()  # beside a reader: nothing that it looks at is given back
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
    write(store, "a", content(131, "anew"))
    store.stage("a", round=3)
    store.stage("b", round=3)
    write(store, "b", content(131, "again"))  # staged without a round: it is of the commit's after all
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


def test_reading_ahead_changes_nothing(make):
    store = make(range(6), 20_000)
    for client in range(4):
        write(store, client, content(20_000, client))
    store.commit(0)
    store.prefetch(range(6))
    store.prefetch([])
    np.testing.assert_array_equal(store.read(2), content(20_000, 2))
    if store.medium == "mmap":
        with pytest.raises(errors.UnknownClientError):
            store.prefetch([9])


def test_a_broadcast_reads_the_cohorts_rows_ahead(tmp_path):
    server = Server("MIFA", np.zeros(30, np.float32), clients=5, lr=1.0, store=f"mmap:{tmp_path / 's'}")
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
            background._do(done.set)  # behind all that it was asked for
            assert done.wait(60)
            assert 0 < len(begun) < 20  # not one for each, even where a busy machine pauses between commits
            assert begun[-1] == 19
        else:
            assert begun == []


def test_a_fork_has_rows_of_its_own():
    """A store in memory is copied with its process, as all else is."""
    store = ClientStore(2, 300_000)  # rows on huge pages, where there are any
    write(store, 0, content(300_000, 0))
    store.commit(0)
    child = os.fork()
    if child == 0:
        try:
            for round in (1, 2, 3):
                write(store, 0, content(300_000, round))
                store.commit(round)
            np.testing.assert_array_equal(store.read(0), content(300_000, 3))
        finally:
            os._exit(0 if store.round == 3 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert store.round == 0
    np.testing.assert_array_equal(store.read(0), content(300_000, 0))
    store.stage(1)[:] = 0
    np.testing.assert_array_equal(store.read(0), content(300_000, 0))


@pytest.mark.parametrize("undoable", [False, True])
def test_slots_of_vectors_that_were_free_are_used_again(tmp_path, undoable):
    path = tmp_path / "s"
    ClientStore(3, 5, medium="mmap", path=path).close()
    for session in range(6):
        with ClientStore.open(path, durability="none", undoable=undoable) as store:
            for round in range(3):
                store.commit(round, {"x": content(100, round), f"y{session}": content(100, session)})
    slots = 2 * (3 if undoable else 2)  # the commits that are there at once, of two vectors each
    assert (path / "vectors-400.slots").stat().st_size <= GRAINS[VERSION] + slots * Geometry.of(400).stride


@pytest.mark.parametrize("change", ["departure", "compaction", "another size"])
def test_a_writer_that_opens_again_takes_no_slot_that_a_reader_looks_at(tmp_path, change):
    """Also none behind all that the index names now, which the next row or vector would be given as a new one."""

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
            assert store.info().free < 1000, "but for a few pages, what was never written waits for nobody"
    reader.close()
    with ClientStore.open(path) as store:
        commit(store, 2, 4)
        assert store.verify() == []
        store.compact()
        rows = store._content.rows.slots
        assert (rows.high, rows.free) == (len(store), 0)
