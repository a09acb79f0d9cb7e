"""A store that can take back its last transaction: what that is, what is kept for it, and what it costs."""

import os
import shutil

import numpy as np
import pytest

from fedcore import ClientStore, Server, Update, errors
from fedcore.store import recovery
from tests.cli.command import invoke
from tests.server.invariant import contradictions
from tests.server.stopping import lasting
from tests.store.contents import content, write
from tests.store.test_disk_full import fail_at
from tests.store.undoing import CALLS, N, assert_is_at, died, made, play


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


@pytest.mark.parametrize("reopened", [False, True])
def test_it_is_what_it_was_before_the_last_commit(path, reopened):
    store = made(path)
    play(store, 0)
    play(store, 1, [1, "a"])
    before = store.registry.explicit()
    store.forget(1)
    store.add_all(["new", 7])
    play(store, 2, [0, "a", "new"])
    if reopened:
        died(store)
        store = ClientStore.open(path, undoable=True)
    assert (store.previous.round, store.previous.state, store.previous.rows) == (1, {"round": 1}, 3)
    assert store.undo()
    for _ in range(2):
        assert_is_at(store, 1, {0: 0, 1: 1, "a": 1})
        assert store.registry.explicit() == before
        assert store.previous is None
        assert not store.undo()
    died(store)
    with ClientStore.open(path, undoable=True) as store:
        assert_is_at(store, 1, {0: 0, 1: 1, "a": 1})
        assert store.registry.explicit() == before
        assert not store.undo()
        play(store, 2, [2])  # and it goes on
        assert_is_at(store, 2, {0: 0, 1: 1, "a": 1, 2: 2})
        assert store.undo()
        assert_is_at(store, 1, {0: 0, 1: 1, "a": 1})


def test_counted_clients_that_left_and_came_back(path):
    with ClientStore(5, N, medium="mmap", path=path, undoable=True) as store:
        store.forget(3)
        store.forget(4)
        store.commit(0)
        store.add(3)
        store.forget(0)
        store.add("visitor")
        store.commit(1)
        assert store.undo()
        assert list(store.registry) == [0, 1, 2]
        assert store.add("visitor") is None
        assert store.registry.number("visitor") == 5
    with ClientStore.open(path, undoable=True) as store:
        assert list(store.registry) == [0, 1, 2, "visitor"]
        assert store.undo()  # of the close, which made the arrival known
        assert list(store.registry) == [0, 1, 2]


def test_what_came_since_the_last_commit_is_forgotten(path):
    with made(path) as store:
        play(store, 0)
        play(store, 1)
        write(store, 2, content(N, "x"))
        store.add("new")
        store.forget("a")
        assert store.undo()
        assert_is_at(store, 0, {0: 0, 1: 0})
        assert list(store.registry) == [0, 1, 2, "a"]
        write(store, 2, content(N, "x"))
        store.add("new")
        assert not store.undo()
        assert "new" not in store.registry
        store.commit(1)
        assert store.round_of(2) is None


def test_the_first_commit_of_all_can_be_taken_back(path):
    with made(path) as store:
        assert store.undo() is False
        play(store, 0)
        assert (store.previous.round, store.previous.state) == (None, None)
        assert store.undo()
        assert_is_at(store, None, {})


def test_a_vector_that_somebody_holds_outlives_an_undo(path):
    with made(path) as store:
        play(store, 0)
        play(store, 1)
        held = store.vector("x")
        store.undo()
        for round in range(1, 5):
            play(store, round)
        np.testing.assert_array_equal(held, content(100, 1))


def test_the_disk_holds_a_cohort_more_at_most(path, tmp_path):
    """Three clients of four; slots: a row for each, the next cohort's, and what the last replaced."""
    highs = {}
    for undoable in (False, True):
        with ClientStore(4, N, medium="mmap", path=tmp_path / f"{undoable}", undoable=undoable) as store:
            for round in range(12):
                play(store, round, [(round + i) % 4 for i in range(3)])
                if undoable and round % 5 == 4:
                    store.undo()
                    play(store, round, [(round + i) % 4 for i in range(3)])
            highs[undoable] = store._content.rows.slots.high
            if undoable:
                died(store)
        with ClientStore.open(tmp_path / f"{undoable}", undoable=undoable) as store:
            for round in range(12, 16):
                play(store, round, [(round + i) % 4 for i in range(3)])
            assert store._content.rows.slots.high == highs[undoable]
    assert highs == {False: 4 + 3, True: 4 + 3 + 3}


def test_a_commit_calls_for_as_much_and_writes_hardly_more(tmp_path, monkeypatch):
    """The same syncs; in the log 32 bytes a row and the head as it was, by pages of the index."""
    calls, logs, clients, cohort = {}, {}, 2000, 100
    for undoable in (False, True):
        path = tmp_path / f"{undoable}"
        with ClientStore(clients, 50, medium="mmap", path=path, undoable=undoable) as store:
            grown = []
            for round in range(12):
                for client in range(cohort):
                    write(store, (client * 17 + round * 29) % clients, content(50, client))
                called = fail_at(monkeypatch, -1, OSError, (*CALLS, "start_writing"))
                before = os.stat(path / "index.sqlite-wal").st_size if round else 0
                store.commit(round, {"x": content(50, round)}, {"round": round})
                monkeypatch.undo()
                grown.append(os.stat(path / "index.sqlite-wal").st_size - before)
            calls[undoable] = [name for name in called if name in ("sync", "sync_path", "commit")]
            logs[undoable] = grown[-1]
    assert calls[True] == calls[False]
    assert logs[True] - logs[False] <= 32 * cohort + 4 * 1048 + 1024
    assert logs[True] < 1.25 * logs[False]


def test_readers_see_the_commit_at_which_they_look(path):
    with made(path) as store:
        play(store, 0)
        play(store, 1)
        with ClientStore.open(path, readonly=True) as reader:
            assert reader.previous.round == 0
            store.undo()
            for round in (1, 2, 3):
                play(store, round, [0, 1, 2])
                store.undo()
                play(store, round, [0, "a"])
            assert_is_at(reader, 1, {0: 1, 1: 1})
            reader.refresh()
            assert_is_at(reader, 3, {0: 3, 1: 0, "a": 3})
            store.undo()
            assert_is_at(reader, 3, {0: 3, 1: 0, "a": 3})
            reader.refresh()
            assert_is_at(reader, 2, {0: 2, 1: 0, "a": 2})
            with pytest.raises(errors.StoreError, match="readonly"):
                reader.undo()


def test_a_writer_that_keeps_nothing_takes_it_away_with_its_first_commit(path):
    with made(path) as store:
        play(store, 0)
        play(store, 1)
    with ClientStore.open(path) as store:
        assert store.previous.round == 0
        with pytest.raises(errors.StoreError, match="expected a store opened with undoable=True"):
            store.undo()
        write(store, 2, content(N, "x"))  # in no slot that is kept
    with ClientStore.open(path, undoable=True) as store:
        assert store.undo()
        assert_is_at(store, 0, {0: 0, 1: 0})
        play(store, 1)
    with ClientStore.open(path) as store:
        play(store, 2)
        assert store.previous is None
        high = store._content.rows.slots.high
        for round in range(3, 6):
            play(store, round)
        assert store._content.rows.slots.high == high
    with ClientStore.open(path, undoable=True) as store:
        assert not store.undo()


def test_a_compaction_leaves_nothing_to_take_back(path):
    with made(path) as store:
        for round in range(4):
            play(store, round, [0, 1, 2, "a"])
        assert store._content.rows.slots.high == 12
        store.compact()
        assert store._content.rows.slots.high == 4
        assert (store.previous, store.undo()) == (None, False)
        assert_is_at(store, 3, dict.fromkeys([0, 1, 2, "a"], 3))
    with ClientStore.open(path, undoable=True) as store:
        assert not store.undo()


def test_a_recovery_leaves_nothing_to_take_back(path, tmp_path):
    """What a lost commit may have written over is no reason to refuse the one that is there."""
    with made(path) as store:
        play(store, 0)
        play(store, 1)
    shutil.copy(path / "index.sqlite", tmp_path / "index")
    with ClientStore.open(path, undoable=True) as store:
        for round in range(2, 4):
            play(store, round, [2, "a"])  # of which nothing lies where the second commit has its rows
            store.undo()
    shutil.copy(tmp_path / "index", path / "index.sqlite")
    with pytest.raises(errors.CorruptionError, match="commits were lost"):
        ClientStore.open(path, undoable=True)
    assert recovery.give_up(path).problems == []
    with ClientStore.open(path, undoable=True) as store:
        assert not store.undo()
        assert_is_at(store, 1, {0: 1, 1: 1})


def test_a_copy_has_nothing_to_take_back(path, tmp_path):
    with made(path) as store:
        play(store, 0)
        play(store, 1)
        store.save(tmp_path / "copy")
        assert store.undo()
    with ClientStore.open(tmp_path / "copy", undoable=True) as copied:
        assert not copied.undo()
        assert_is_at(copied, 1, {0: 1, 1: 1})
    with ClientStore.open(tmp_path / "copy", medium="ram") as loaded:
        assert loaded.previous is None


def test_with_checkpoints_a_transaction_is_what_one_made_safe(path):
    store = made(path, durability="checkpoint")
    play(store, 0)
    play(store, 1, [1, 2])
    store.checkpoint()
    play(store, 2, [0])
    store.forget(2)
    play(store, 3, ["a", 0])
    with pytest.raises(errors.StoreError, match="undo: expected every commit to be in the folder, got some since"):
        store.undo()
    assert_is_at(store, 3, {0: 3, 1: 1, "a": 3})
    store.checkpoint()
    assert (store.previous.round, store.undo()) == (1, True)
    assert_is_at(store, 1, {0: 0, 1: 1, 2: 1})
    store.checkpoint()
    assert not store.undo()
    play(store, 2, [2])
    died(store)
    with ClientStore.open(path, undoable=True, durability="checkpoint") as store:
        assert_is_at(store, 1, {0: 0, 1: 1, 2: 1})


def test_a_row_that_no_checkpoint_told_leaves_its_slot_free(path):
    with made(path, durability="checkpoint") as store:
        for round in range(6):
            play(store, round, ["a"])
            store.forget("a")
            store.checkpoint()
            store.add("a")
        assert store._content.rows.slots.high == 1


def test_where_it_cannot_be_is_said(path):
    with pytest.raises(
        errors.RangeError, match=r'undoable: expected False, or medium="mmap" .*, got True with medium="ram"'
    ):
        ClientStore(3, N, undoable=True)
    made(path).close()
    for options in ({"medium": "ram"}, {"readonly": True}):
        with pytest.raises(errors.RangeError, match="undoable: expected False, or"):
            ClientStore.open(path, undoable=True, **options)


@pytest.mark.parametrize("method", ["FedAvg", "MIFA", "MimiC", "SCAFFOLD"])
@pytest.mark.parametrize("reopened", [False, True])
def test_a_round_of_a_server_is_taken_back_and_done_again(path, method, reopened):
    """With the bits of the server whose round never was, and of the one that never lost it."""

    def a_round(server):
        t = server.round_number
        heard = [client for i, client in enumerate(sorted(server.clients, key=str)) if (i + t) % 3]
        server.round([Update(c, server.x + np.float32(1 + t + i), 1) for i, c in enumerate(heard)])

    rows = ClientStore(5, 60, medium="mmap", path=path, undoable=True)
    server = Server(method, np.zeros(60, np.float32), lr=0.1, store=rows, history_rounds=2)
    states = []
    for t in range(5):
        if t == 3:
            server.depart(1)
            server.arrive("new")
        a_round(server)
        states.append(lasting(server))
    if reopened:
        server.close()
        rows = ClientStore.open(path, undoable=True)
    assert rows.previous.state["numbers"]["round_number"] == 4
    assert rows.undo()
    died(rows)
    with Server.load(path) as again:
        assert lasting(again) == states[3]
        assert contradictions(again) == []
        a_round(again)
        assert lasting(again) == states[4]


def test_info_says_whether_there_is_something_to_take_back(path):
    def said():
        return next(
            line for line in invoke("store", "info", path).output.splitlines() if line.lstrip().startswith("undo")
        )

    with made(path) as store:
        assert store.info().previous is None
        play(store, 0)
    assert said().endswith("takes back commit 1, of round 0: to commit 0, before any round")
    with ClientStore.open(path, undoable=True) as store:
        play(store, 1)
        assert store.info().previous == store.previous
        assert (store.previous.commit, store.previous.round, store.previous.rows) == (1, 0, 2)
    assert said().endswith("takes back commit 2, of round 1: to commit 1, of round 0")
    with ClientStore.open(path, undoable=True) as store:
        store.undo()
    assert said().endswith("nothing to take back")
