"""An undoable store against a model in memory, over any history of commits, undos, crashes, writers and readers."""

import copy
import shutil
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fedcore import ClientStore, errors
from fedcore.clients import Registry
from tests.store.contents import content, write

N = 20
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
            expected = np.zeros(N, np.float32) if key is None else content(N, str(client), key)
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
        self.store = ClientStore(clients, N, medium="mmap", path=self.path, **options)
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
            write(self.store, client, content(N, str(client), self.key))
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
        assert slots.high == len(self.store) + slots.free + (0 if kept is None else len(kept.rows.used))
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
