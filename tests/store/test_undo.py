"""A store that can take back its last transaction: what that is, what is kept for it, and what it costs."""

import os
import shutil
import sqlite3
from contextlib import closing

import numpy as np
import pytest

from fedcore import ClientStore, Server, Update, errors
from fedcore.store import recovery
from tests.cli.command import invoke
from tests.server.invariant import contradictions
from tests.server.stopping import lasting
from tests.store.contents import content, write
from tests.store.test_disk_full import broken, fail_at, full

N = 40_000  # 160,000 bytes: three blocks
CALLS = ("resize", "reserve", "sync", "sync_path", "write", "commit")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


def made(path, n=N, **options):
    return ClientStore([0, 1, 2, "a"], n, medium="mmap", path=path, undoable=True, **options)


def play(store, round, clients=(0, 1)):
    for client in clients:
        write(store, client, content(store.n, str(client), round))
    store.commit(round, {"x": content(100, round), f"of{round}": content(100 + round, round)}, {"round": round})


def assert_is_at(store, round, rows):
    """Rows by the rounds that wrote them."""
    assert (store.round, store.state) == (round, None if round is None else {"round": round})
    assert {client: store.round_of(client) for client in store.registry if store.row(client) is not None} == rows
    for client, written in rows.items():
        np.testing.assert_array_equal(store.read(client), content(store.n, str(client), written))
    assert set(store.vector_names()) == (set() if round is None else {"x", f"of{round}"})
    if round is not None:
        np.testing.assert_array_equal(store.vector("x"), content(100, round))
        np.testing.assert_array_equal(store.vector(f"of{round}"), content(100 + round, round))
    assert store.verify() == []


def died(store):
    """Leave the folder as a process that ends at once does."""
    store._session._finalizer()


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


def test_verify_reads_what_is_kept(path):
    with made(path) as store:
        play(store, 0)
        play(store, 1)
        rows, vectors = store._content.previous.rows, store._content.previous.head.vectors
        slot, place = int(rows.slots[list(rows.numbers).index(1)]), vectors["x"]
        row_at, vector_at = (
            store._content.rows.slots._end(slot - 1),
            store._content.vectors._slots(400)._end(place.slot - 1),
        )
    for file, at in (("rows.slots", row_at + 70_000), ("vectors-400.slots", vector_at)):
        with open(path / file, "r+b") as raw:
            raw.seek(at)
            raw.write(b"\xff" * 3)
    with ClientStore.open(path, undoable=True) as store:
        row, vector = store.verify()
        assert f"the row of number 1 before the last commit (slot {slot}) is damaged: block 1 of 3 changed" in row
        assert "the vector 'x' before the last commit is damaged" in vector
        store.read(1)
        store.undo()
        with pytest.raises(errors.CorruptionError, match="the row of client 1"):
            store.read(1)
        np.testing.assert_array_equal(store.read(0), content(N, "0", 0))


CHANGES = {
    "lost": "DELETE FROM previous",
    "entries": "UPDATE previous SET rows = zeroblob(64)",
    "clients": """UPDATE previous SET clients = '{"listed": [[0, 7]], "unlisted": []}'""",
    "head": "UPDATE previous SET head = (SELECT content FROM head)",
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_kept_is_changed_or_lost(path, change):
    with made(path) as store:
        play(store, 0)
        play(store, 1)
    with closing(sqlite3.connect(path / "index.sqlite")) as connection, connection:
        connection.execute(CHANGES[change])
    for options in ({"undoable": True}, {"readonly": True}):
        with pytest.raises(errors.CorruptionError, match=r"index.sqlite: damaged: previous: expected"):
            ClientStore.open(path, **options)


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


@pytest.mark.parametrize("failure", [full, broken, KeyboardInterrupt])
def test_every_call_of_an_undo_fails_in_turn(path, tmp_path, monkeypatch, failure):
    """Memory and folder are both as before it, or both as after it."""
    with made(tmp_path / "start", n=300) as store:
        play(store, 0)
        store.forget("a")
        store.add("new")
        play(store, 1, [1, 2, "new"])
    states = {0: {0: 0, 1: 0}, 1: {0: 0, 1: 1, 2: 1, "new": 1}}
    clients = {0: [0, 1, 2, "a"], 1: [0, 1, 2, "new"]}
    for call in range(1, 100):
        shutil.copytree(tmp_path / "start", path)
        store = ClientStore.open(path, undoable=True)
        called = fail_at(monkeypatch, call, failure, CALLS)
        try:
            store.undo()
        except (errors.StoreError, KeyboardInterrupt):
            monkeypatch.undo()
            if store._commits.broken is not None:
                died(store)
                store = ClientStore.open(path, undoable=True)
            assert_is_at(store, store.round, states[store.round])
            assert list(store.registry) == clients[store.round]
            was = store.round
            assert store.undo() == (was == 1)
        monkeypatch.undo()
        assert_is_at(store, 0, states[0])
        assert list(store.registry) == clients[0]
        died(store)
        with ClientStore.open(path, readonly=True) as reader:
            assert_is_at(reader, 0, states[0])
            assert reader.previous is None
        shutil.rmtree(path)
        if len(called) < call:
            break
    assert call > 2


def test_an_undo_that_fails_is_forgotten(path, monkeypatch):
    with made(path) as store:
        play(store, 0)
        store.forget("a")
        store.add_all(["new", 7])
        play(store, 1, [1, 2, "new"])
        before = store.registry.explicit()
        fail_at(monkeypatch, 1, full, ["commit"])
        with pytest.raises(errors.StoreError, match="the disk is full"):
            store.undo()
        monkeypatch.undo()
        play(store, 2, [0])
        died(store)
    with ClientStore.open(path, undoable=True) as store:
        assert store.registry.explicit() == before
        assert_is_at(store, 2, {0: 2, 1: 1, 2: 1, "new": 1})


@pytest.mark.parametrize("failure", [full, broken])
def test_a_commit_that_fails_leaves_the_one_before_to_be_taken_back(path, tmp_path, monkeypatch, failure):
    with made(tmp_path / "start", n=300) as store:
        play(store, 0)
        play(store, 1)
    for call in range(1, 100):
        shutil.copytree(tmp_path / "start", path)
        store = ClientStore.open(path, undoable=True)
        called = fail_at(monkeypatch, call, failure, CALLS)
        try:
            play(store, 2)
        except errors.StoreError:
            monkeypatch.undo()
            if store._commits.broken is not None:
                died(store)
                store = ClientStore.open(path, undoable=True)
            assert (store.round, store.previous.round) == (1, 0)
            assert store.undo()
            assert_is_at(store, 0, {0: 0, 1: 0})
            play(store, 1)
            play(store, 2)
        monkeypatch.undo()
        assert_is_at(store, 2, {0: 2, 1: 2})
        assert store.undo()
        assert_is_at(store, 1, {0: 1, 1: 1})
        store.close()
        shutil.rmtree(path)
        if len(called) < call:
            break
    assert call > 5


@pytest.mark.parametrize("undoable", [False, True])
def test_a_departure_that_a_checkpoint_could_not_tell_goes_with_the_next_commit(path, monkeypatch, undoable):
    with ClientStore([0, 1, "a"], N, medium="mmap", path=path, undoable=undoable) as store:
        play(store, 0, ["a", 1])
        store.forget("a")
        fail_at(monkeypatch, 1, full, ["commit"])
        with pytest.raises(errors.StoreError, match="the disk is full"):
            store.checkpoint()
        monkeypatch.undo()
        play(store, 1, [1])
        died(store)
    with ClientStore.open(path, undoable=undoable) as store:
        assert_is_at(store, 1, {1: 1})
        if undoable:
            assert store.undo()
            assert_is_at(store, 0, {1: 0, "a": 0})


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
