"""Undo of the last transaction, with failures, and compared with a model of histories."""

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

from fedcore import ClientStore, errors
from fedcore.store import inspect as recovery
from fedcore.store.registry import Registry
from tests.cli.command import invoke
from tests.store.kit import CALLS, N, assert_is_at, broken, content, died, each_call, fail_at, full, made, play, write


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


def test_keep_previous_needs_slots_for_one_more_cohort(path, tmp_path):
    """Cohorts of three of four clients; slots: a row for each, the next cohort's, and the replaced ones."""
    highs = {}
    for keep_previous in (False, True):
        with ClientStore(4, N, medium="mmap", path=tmp_path / f"{keep_previous}", keep_previous=keep_previous) as store:
            for round in range(12):
                play(store, round, [(round + i) % 4 for i in range(3)])
                if keep_previous and round % 5 == 4:
                    store.undo()
                    play(store, round, [(round + i) % 4 for i in range(3)])
            highs[keep_previous] = store._content.rows.slots.high
            if keep_previous:
                died(store)
        with ClientStore.open(tmp_path / f"{keep_previous}", keep_previous=keep_previous) as store:
            for round in range(12, 16):
                play(store, round, [(round + i) % 4 for i in range(3)])
            assert store._content.rows.slots.high == highs[keep_previous]
    assert highs == {False: 4 + 3, True: 4 + 3 + 3}


def test_keep_previous_adds_no_syncs_and_few_bytes(tmp_path, monkeypatch):
    """The same syncs; in the log 32 bytes a row and the old head, in pages of the index."""
    calls, logs, clients, cohort = {}, {}, 2000, 100
    for keep_previous in (False, True):
        path = tmp_path / f"{keep_previous}"
        with ClientStore(clients, 50, medium="mmap", path=path, keep_previous=keep_previous) as store:
            grown = []
            for round in range(12):
                for client in range(cohort):
                    write(store, (client * 17 + round * 29) % clients, content(50, client))
                called = fail_at(monkeypatch, -1, OSError, (*CALLS, "start_writing"))
                before = os.stat(path / "index.sqlite-wal").st_size if round else 0
                store.commit(round, {"x": content(50, round)}, {"round": round})
                monkeypatch.undo()
                grown.append(os.stat(path / "index.sqlite-wal").st_size - before)
            calls[keep_previous] = [name for name in called if name in ("sync", "sync_path", "commit")]
            logs[keep_previous] = grown[-1]
    assert calls[True] == calls[False]
    assert logs[True] - logs[False] <= 32 * cohort + 4 * 1048 + 1024
    assert logs[True] < 1.25 * logs[False]


def test_a_recovery_leaves_nothing_to_undo(path, tmp_path):
    """Damage to the previous commit by a lost one is no reason to reject the last one."""
    with made(path) as store:
        play(store, 0)
        play(store, 1)
    shutil.copy(path / "index.sqlite", tmp_path / "index")
    with ClientStore.open(path, keep_previous=True) as store:
        for round in range(2, 4):
            play(store, round, [2, "a"])  # none of them in slots of the second commit
            store.undo()
    shutil.copy(tmp_path / "index", path / "index.sqlite")
    with pytest.raises(errors.CorruptionError, match="commits were lost"):
        ClientStore.open(path, keep_previous=True)
    assert recovery.give_up(path).problems == []
    with ClientStore.open(path, keep_previous=True) as store:
        assert not store.undo()
        assert_is_at(store, 1, {0: 1, 1: 1})


def test_keep_previous_needs_a_writable_folder(path):
    with pytest.raises(errors.RangeError, match=r'keep_previous=True: .*medium="ram"'):
        ClientStore(3, N, keep_previous=True)
    made(path).close()
    for options in ({"medium": "ram"}, {"readonly": True}):
        with pytest.raises(errors.RangeError, match="keep_previous=True"):
            ClientStore.open(path, keep_previous=True, **options)


def test_info_shows_the_previous_commit(path):
    def text():
        return next(
            line for line in invoke("store", "info", path).output.splitlines() if line.lstrip().startswith("undo")
        )

    with made(path) as store:
        assert store.info().previous is None
        play(store, 0)
    assert text().endswith("commit 1, of round 0, back to commit 0, before any round")
    with ClientStore.open(path, keep_previous=True) as store:
        play(store, 1)
        assert store.info().previous == store.previous
        assert (store.previous.commit, store.previous.round, store.previous.rows) == (1, 0, 2)
    assert text().endswith("commit 2, of round 1, back to commit 1, of round 0")
    with ClientStore.open(path, keep_previous=True) as store:
        store.undo()
    assert text().endswith("nothing to roll back")


def test_verify_reads_the_previous_commit(path):
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
    with ClientStore.open(path, keep_previous=True) as store:
        row, vector = store.verify()
        assert f"the row of number 1 of the previous commit (slot {slot}) is damaged: block 1 of 3 changed" in row
        assert "the vector 'x' of the previous commit is damaged" in vector
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
def test_a_damaged_previous_commit(path, change):
    with made(path) as store:
        play(store, 0)
        play(store, 1)
    with closing(sqlite3.connect(path / "index.sqlite")) as connection, connection:
        connection.execute(CHANGES[change])
    for options in ({"keep_previous": True}, {"readonly": True}):
        with pytest.raises(errors.CorruptionError, match=r"index.sqlite: damaged: previous:"):
            ClientStore.open(path, **options)


@pytest.mark.parametrize("failure", [full, broken, KeyboardInterrupt])
def test_every_call_of_an_undo_fails_in_turn(path, tmp_path, monkeypatch, failure):
    """Memory and folder are both as before the undo, or both as after it."""
    with made(tmp_path / "start", n=300) as store:
        play(store, 0)
        store.forget("a")
        store.add("new")
        play(store, 1, [1, 2, "new"])
    states = {0: {0: 0, 1: 0}, 1: {0: 0, 1: 1, 2: 1, "new": 1}}
    clients = {0: [0, 1, 2, "a"], 1: [0, 1, 2, "new"]}
    for store, _, _ in each_call(tmp_path / "start", monkeypatch, failure, keep_previous=True):
        try:
            store.undo()
        except (errors.StoreError, KeyboardInterrupt):
            monkeypatch.undo()
            if store._session.broken is not None:
                died(store)
                store = ClientStore.open(path, keep_previous=True)
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


def test_a_failed_undo_has_no_effect_later(path, monkeypatch):
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
    with ClientStore.open(path, keep_previous=True) as store:
        assert store.registry.explicit() == before
        assert_is_at(store, 2, {0: 2, 1: 1, 2: 1, "new": 1})


@pytest.mark.parametrize("failure", [full, broken])
def test_after_a_failed_commit_the_one_before_can_be_undone(path, tmp_path, monkeypatch, failure):
    with made(tmp_path / "start", n=300) as store:
        play(store, 0)
        play(store, 1)
    for store, _, _ in each_call(tmp_path / "start", monkeypatch, failure, keep_previous=True):
        try:
            play(store, 2)
        except errors.StoreError:
            monkeypatch.undo()
            if store._session.broken is not None:
                died(store)
                store = ClientStore.open(path, keep_previous=True)
            assert (store.round, store.previous.round) == (1, 0)
            assert store.undo()
            assert_is_at(store, 0, {0: 0, 1: 0})
            play(store, 1)
            play(store, 2)
        monkeypatch.undo()
        assert_is_at(store, 2, {0: 2, 1: 2})
        assert store.undo()
        assert_is_at(store, 1, {0: 1, 1: 1})
        died(store)


@pytest.mark.parametrize("keep_previous", [False, True])
def test_a_removal_after_a_failed_checkpoint_is_in_the_next_commit(path, monkeypatch, keep_previous):
    with ClientStore([0, 1, "a"], N, medium="mmap", path=path, keep_previous=keep_previous) as store:
        play(store, 0, ["a", 1])
        store.forget("a")
        fail_at(monkeypatch, 1, full, ["commit"])
        with pytest.raises(errors.StoreError, match="the disk is full"):
            store.checkpoint()
        monkeypatch.undo()
        play(store, 1, [1])
        died(store)
    with ClientStore.open(path, keep_previous=keep_previous) as store:
        assert_is_at(store, 1, {1: 1})
        if keep_previous:
            assert store.undo()
            assert_is_at(store, 0, {1: 0, "a": 0})


FEW = 20
CLIENTS = [0, 1, 2, "a", "b"]
NAMES = {"x": 20, "y": 20, "wide": 50}
"""Vectors, and their elements."""


@dataclass(frozen=True)
class Commit:
    """The content of a store at a commit; values are the keys of ``content``."""

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
        options = {"codec": codec, "durability": durability, "keep_previous": True}
        self.store = ClientStore(clients, FEW, medium="mmap", path=self.path, **options)
        self.committed = Commit(Registry(clients))
        self.previous, self.unsynced = None, False
        self.held = []

    def teardown(self):
        if hasattr(self, "folder"):
            for reader, _ in self.readers:
                reader.close()
            self.store._session._finalizer()
            shutil.rmtree(self.folder)

    @property
    def ahead(self):
        """Whether clients were added or removed since the last commit."""
        return self.store.is_ahead

    def present(self):
        """The last commit with the clients that were added and removed since."""
        registry = copy.copy(self.store.registry)
        return replace(
            self.committed,
            registry=registry,
            rows={client: key for client, key in self.committed.rows.items() if client not in self.departed},
        )

    departed = frozenset()

    def published_now(self):
        """Everything is durable in the folder."""
        if self.unsynced or self.ahead:
            self.change(self.present(), synced=True)
            self.departed = frozenset()

    def change(self, after, *, synced):
        """A transaction; with checkpoints, the previous commit is that of the last one."""
        if not self.unsynced:
            self.previous = self.committed
        if synced and not self.store.keep_previous:
            self.previous = None
        self.committed, self.unsynced = after, not synced

    @rule(chosen=st.sets(st.integers(0, 9)), vectors=st.none() | st.sets(st.sampled_from(list(NAMES))))
    def commit(self, chosen, vectors):
        self.key += 1
        clients = [client for i, client in enumerate(self.store.registry) if i in chosen]
        for client in clients:
            write(self.store, client, content(FEW, str(client), self.key))
        named = None
        if vectors is not None:
            # Vectors that are passed back stay where they are.
            kept = {name for name in vectors if name in self.committed.vectors and self.key % 2}
            fresh = {name: content(NAMES[name], name, self.key) for name in vectors - kept}
            named = fresh | {name: self.store.vector(name) for name in kept}
        now = self.present()
        rows = now.rows | dict.fromkeys(clients, self.key)
        if named is not None:
            now = replace(now, vectors={n: self.committed.vectors[n] if n in kept else self.key for n in vectors})
        self.store.commit(self.key, named, {"round": self.key})
        self.departed = frozenset()
        self.change(replace(now, rows=rows, round=self.key), synced=self.store.durability != "checkpoint")

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
        if not self.store.keep_previous:
            with pytest.raises(errors.StoreError, match="keep_previous=True"):
                self.store.undo()
            return
        for client in list(self.store.registry)[:2]:
            self.store.stage(client)
        self.departed = frozenset()
        assert self.store.undo() == (self.previous is not None)
        if self.previous is not None:
            self.committed, self.previous, self.unsynced = self.previous, None, False

    @rule()
    def compact(self):
        self.published_now()
        self.previous = None
        self.store.compact()
        self.held.clear()

    @rule(keep_previous=st.booleans(), dies=st.booleans(), durability=st.sampled_from(["round", "checkpoint", "none"]))
    def another_writer(self, keep_previous, dies, durability):
        if dies:
            self.store._session._finalizer()
            self.departed = frozenset()
        else:
            self.published_now()
            self.store.close()
        self.held.clear()
        self.store = ClientStore.open(self.path, durability=durability, keep_previous=keep_previous)
        if self.unsynced:
            self.change(self.committed, synced=True)

    @rule()
    def somebody_reads(self):
        if len(self.readers) == 2:
            self.readers.pop(0)[0].close()
        self.readers.append((ClientStore.open(self.path, readonly=True), self.committed))

    @rule(i=st.integers(0, 1))
    def a_reader_looks_again(self, i):
        if i < len(self.readers):
            reader, _ = self.readers[i]
            reader.refresh()
            self.readers[i] = (reader, self.committed)

    @rule(name=st.sampled_from(list(NAMES)))
    def somebody_holds_a_vector(self, name):
        if name in self.committed.vectors:
            self.held.append((self.store.vector(name), name, self.committed.vectors[name]))

    @precondition(lambda self: self.key % 4 == 0)
    @rule()
    def save(self):
        self.store.save(self.folder / "copy")
        with ClientStore.open(self.folder / "copy", keep_previous=True) as saved:
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
        if not hasattr(self, "store") or self.ahead:
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
