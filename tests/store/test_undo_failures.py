"""Undos and commits of an undoable store that fail, and what is kept that is damaged or lost."""

import shutil
import sqlite3
from contextlib import closing

import numpy as np
import pytest

from fedcore import ClientStore, errors
from tests.store.contents import content
from tests.store.test_disk_full import broken, fail_at, full
from tests.store.undoing import CALLS, N, assert_is_at, died, made, play


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


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
