"""The last transaction is taken back, whatever fails, as a model of histories has it."""

import copy
import os
import shutil
import sqlite3
import tempfile
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fedcore import ClientStore, Server, Update, errors
from fedcore.store import inspect as recovery
from fedcore.store.registry import Registry
from tests.cli.command import invoke
from tests.kit import with_history
from tests.server.invariant import contradictions
from tests.server.stopping import lasting
from tests.store.kit import CALLS, N, assert_is_at, content, died, made, play, write
from tests.store.test_full_disk import broken, fail_at, full


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
    server = Server(np.zeros(60, np.float32), with_history(method, 2), lr=0.1, storage=rows)
    states = []
    for t in range(5):
        if t == 3:
            server.remove_client(1)
            server.add_clients("new")
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
    assert said().endswith("rolls back commit 1, of round 0: to commit 0, before any round")
    with ClientStore.open(path, undoable=True) as store:
        play(store, 1)
        assert store.info().previous == store.previous
        assert (store.previous.commit, store.previous.round, store.previous.rows) == (1, 0, 2)
    assert said().endswith("rolls back commit 2, of round 1: to commit 1, of round 0")
    with ClientStore.open(path, undoable=True) as store:
        store.undo()
    assert said().endswith("nothing to roll back")


def test_verify_reads_what_is_kept(path):
    with made(path) as store:
        play(store, 0)
        play(store, 1)
        rows, vectors = store._content.previous.rows, store._content.previous.head.vectors
        slot, place = int(rows["slot"][rows["number"] == 1][0]), vectors["x"]
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
            if store._session.commits.broken is not None:
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
            if store._session.commits.broken is not None:
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


FEW = 20
CLIENTS = [0, 1, 2, "a", "b"]
NAMES = {"x": 20, "y": 20, "wide": 50}
"""Vectors, and their elements."""


@dataclass(frozen=True)
class Commit:
    """What a store is at a commit: contents by the number that was their key."""

    registry: Registry
    rows: dict[Any, int] = field(default_factory=dict)
    vectors: dict[str, int] = field(default_factory=dict)
    round: int | None = None

    def require(self, store):
        assert store.registry == self.registry
        assert store.round == self.round
        assert store.state == (None if self.round is None else {"round": self.round})
        assert len(store) == len(self.rows)
        for client in self.registry:
            key = self.rows.get(client)
            assert store.round_of(client) == key
            expected = np.zeros(FEW, np.float32) if key is None else content(FEW, str(client), key)
            np.testing.assert_array_equal(store.read(client), expected)
        assert set(store.vector_names()) == set(self.vectors)
        for name, key in self.vectors.items():
            np.testing.assert_array_equal(store.vector(name), content(NAMES[name], name, key))


class Histories(RuleBasedStateMachine):
    @initialize(
        clients=st.sampled_from([3, CLIENTS]),
        codec=st.sampled_from(["f32", "bf16", "int8"]),
        durability=st.sampled_from(["round", "checkpoint", "none"]),
    )
    def start(self, clients, codec, durability):
        self.folder = Path(tempfile.mkdtemp())
        self.path, self.key, self.readers = self.folder / "store", 0, []
        options = {"codec": codec, "durability": durability, "undoable": True}
        self.store = ClientStore(clients, FEW, medium="mmap", path=self.path, **options)
        self.committed = self.published = Commit(Registry(clients))
        self.previous = None
        self.held = []

    def teardown(self):
        if hasattr(self, "folder"):
            for reader, _ in self.readers:
                reader.close()
            self.store._session._finalizer()
            shutil.rmtree(self.folder)

    @property
    def ahead(self):
        """Whether anybody came or went since the last commit."""
        return self.store.is_ahead

    def present(self):
        """The last commit as it would be with those who came and went since."""
        registry = copy.copy(self.store.registry)
        return replace(
            self.committed,
            registry=registry,
            rows={client: key for client, key in self.committed.rows.items() if client not in self.departed},
        )

    departed = frozenset()

    def published_now(self):
        """The folder is told of all that there is."""
        if self.committed != self.published or self.ahead:
            self.previous = self.published if self.store.undoable else None
            self.committed = self.published = self.present()
            self.departed = frozenset()

    @rule(chosen=st.sets(st.integers(0, 9)), vectors=st.none() | st.sets(st.sampled_from(list(NAMES))))
    def commit(self, chosen, vectors):
        self.key += 1
        clients = [client for i, client in enumerate(self.store.registry) if i in chosen]
        for client in clients:
            write(self.store, client, content(FEW, str(client), self.key))
        named = None
        if vectors is not None:
            # What is given back is kept where it lies.
            kept = {name for name in vectors if name in self.committed.vectors and self.key % 2}
            fresh = {name: content(NAMES[name], name, self.key) for name in vectors - kept}
            named = fresh | {name: self.store.vector(name) for name in kept}
        now = self.present()
        rows = now.rows | dict.fromkeys(clients, self.key)
        if named is not None:
            now = replace(now, vectors={n: self.committed.vectors[n] if n in kept else self.key for n in vectors})
        self.store.commit(self.key, named, {"round": self.key})
        self.committed, self.departed = replace(now, rows=rows, round=self.key), frozenset()
        if self.store.durability != "checkpoint":
            self.previous = self.published if self.store.undoable else None
            self.published = self.committed

    @rule(client=st.sampled_from([*CLIENTS, "c", 7]))
    def arrive_or_depart(self, client):
        if client in self.store.registry:
            self.store.forget(client)
            self.departed |= {client}
        else:
            self.store.add(client)

    @rule(clients=st.lists(st.sampled_from([*CLIENTS, "c", 7, *range(100, 130)])))
    def all_arrive_or_none(self, clients):
        before = self.store.registry.explicit()
        new = len(set(clients)) == len(clients) and not any(client in self.store.registry for client in clients)
        with nullcontext() if new else pytest.raises(errors.RangeError):
            self.store.add_all(clients)
        assert new or self.store.registry.explicit() == before

    @rule()
    def rollback(self):
        self.store.rollback()
        self.departed = frozenset()
        assert self.store.registry == self.committed.registry

    @rule()
    def checkpoint(self):
        self.published_now()
        self.store.checkpoint()

    @rule()
    def undo(self):
        if not self.store.undoable:
            with pytest.raises(errors.StoreError, match="expected a store opened with undoable=True"):
                self.store.undo()
            return
        for client in list(self.store.registry)[:2]:
            self.store.stage(client)
        self.departed = frozenset()
        if self.committed != self.published:
            with pytest.raises(errors.StoreError, match="some since the last checkpoint"):
                self.store.undo()
            return
        assert self.store.undo() == (self.previous is not None)
        if self.previous is not None:
            self.committed = self.published = self.previous
            self.previous = None

    @rule()
    def compact(self):
        self.published_now()
        self.previous = None
        self.store.compact()
        self.held.clear()

    @rule(
        undoable=st.booleans(),
        dies=st.booleans(),
        durability=st.sampled_from(["round", "checkpoint", "none"]),
    )
    def another_writer(self, undoable, dies, durability):
        if dies:
            self.store._session._finalizer()
            self.committed, self.departed = self.published, frozenset()
        else:
            self.published_now()
            self.store.close()
        self.held.clear()
        self.store = ClientStore.open(self.path, durability=durability, undoable=undoable)

    @rule()
    def somebody_reads(self):
        if len(self.readers) == 2:
            self.readers.pop(0)[0].close()
        self.readers.append((ClientStore.open(self.path, readonly=True), self.published))

    @rule(i=st.integers(0, 1))
    def a_reader_looks_again(self, i):
        if i < len(self.readers):
            reader, _ = self.readers[i]
            reader.refresh()
            self.readers[i] = (reader, self.published)

    @rule(name=st.sampled_from(list(NAMES)))
    def somebody_holds_a_vector(self, name):
        if name in self.committed.vectors:
            self.held.append((self.store.vector(name), name, self.committed.vectors[name]))

    @precondition(lambda self: self.key % 4 == 0)
    @rule()
    def save(self):
        self.store.save(self.folder / "copy")
        with ClientStore.open(self.folder / "copy", undoable=True) as saved:
            assert (saved.previous, saved.undo(), saved.round) == (None, False, self.committed.round)
            assert len(saved) == len(self.store)

    @invariant()
    def it_is_as_the_model_says(self):
        if not hasattr(self, "store"):
            return
        self.store.discard()
        self.present().require(self.store)
        previous = self.store.previous
        assert (previous is None) == (self.previous is None)
        if previous is not None:
            assert previous.round == self.previous.round
        for reader, commit in self.readers:
            commit.require(reader)
            assert reader.verify() == []
        for vector, name, key in self.held:
            np.testing.assert_array_equal(vector, content(NAMES[name], name, key))
        assert self.store.verify() == []

    @invariant()
    def every_slot_is_used_or_free_or_kept(self):
        if not hasattr(self, "store") or self.committed != self.published or self.ahead:
            return
        kept = self.store._content.previous
        slots = self.store._content.rows.slots
        assert slots.high == len(self.store) + slots.free + (0 if kept is None else (kept.rows["slot"] > 0).sum())
        vectors = self.store._content.vectors
        places = {(entry.payload, entry.slot) for entry in vectors.table.values()}
        if kept is not None:
            places |= {(entry.payload, entry.slot) for entry in kept.head.vectors.values()}
        for payload in {payload for payload, _ in places}:
            found = vectors._slots(payload)
            waiting = sum(place[0] == payload for _, place in vectors._retired)
            assert found.high == sum(place[0] == payload for place in places) + waiting + found.free


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)


class TestLongHistories(Histories.TestCase):
    settings = settings(max_examples=600, stateful_step_count=60, deadline=None)
    pytestmark = pytest.mark.endurance
