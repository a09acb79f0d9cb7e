"""Whatever a loss of power leaves of what was not synced, the last durable round is there."""

import copy
import random

import numpy as np
import pytest

from fedcore import ClientStore
from tests.store.contents import content, write
from tests.store.recording import Recorder, put

N = 20
# A round writes these rows (with the round as the key), and these vectors; or something else happens.
STEPS = {
    "round": [
        ("a", "x"),
        ("ab", "x"),
        ("bc", "xy"),
        "forget a",
        ("c", "y"),
        "add d",
        ("cd", "xz"),
        "compact",
        ("b", ""),
        ("d", "x"),
    ],
    "checkpoint": [
        ("a", ""),
        ("ab", ""),
        "checkpoint",
        ("a", "x"),
        ("a", "x"),
        "forget b",
        "checkpoint",
        ("", "x"),
        ("", "x"),
        "add d",
        ("d", ""),
        "compact",
        ("d", ""),
        "checkpoint",
    ],
}
UNDOABLE = {
    "round": [
        ("ab", "x"),
        "undo",
        ("bc", "xy"),
        "forget a",
        ("c", "y"),
        "undo",
        "add d",
        ("ad", "xz"),
        ("d", ""),
        "undo",
        "compact",
        ("b", ""),
        "undo",
        ("d", "x"),
    ],
    "checkpoint": [
        ("ab", "x"),
        "checkpoint",
        ("a", ""),
        "forget b",
        ("c", "y"),
        "checkpoint",
        "undo",
        ("b", "x"),
        "add d",
        ("d", "x"),
        "checkpoint",
        "compact",
        ("d", ""),
        "checkpoint",
        "undo",
    ],
}


class Model:
    """What a store holds now, what the folder was told last, and what it keeps of before."""

    def __init__(self):
        self.now = {"rows": {}, "vectors": {}, "round": 0, "clients": ["a", "b", "c"]}
        self.told, self.previous = copy.deepcopy(self.now), None

    def tell(self, store):
        """All of it is going to be told."""
        if self.now != self.told:
            self.previous = self.told if store.undoable else None
            self.told = copy.deepcopy(self.now)

    def undo(self):
        self.now, self.told, self.previous = copy.deepcopy(self.previous), self.previous, None


def run(store, recorder, model, steps):
    """Do the steps."""
    recorder.upcoming = model
    for round, step in enumerate(steps):
        now = model.now
        match step:
            case (clients, vectors):
                for client in clients:
                    write(store, client, content(N, client, round))
                    now["rows"][client] = round
                if vectors:
                    now["vectors"] = dict.fromkeys(vectors, round)
                now["round"] = round
                if store.durability == "round":
                    model.tell(store)
                named = {name: content(N, name, round) for name in vectors} if vectors else None
                store.commit(round, named, {"round": round})
            case "compact":
                model.tell(store)
                model.previous = None
                store.compact()
            case "checkpoint":
                model.tell(store)
                store.checkpoint()
            case "undo":
                model.undo()
                assert store.undo()
            case _ if step.startswith("forget"):
                store.forget(step[-1])
                now["rows"].pop(step[-1], None)
                now["clients"].remove(step[-1])
            case _:
                store.add(step[-1])
                now["clients"].append(step[-1])


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


@pytest.mark.parametrize(
    ("undoable", "one_of"), [(False, 1), (True, 8), pytest.param(True, 1, marks=pytest.mark.endurance)]
)
@pytest.mark.parametrize("durability", ["round", "checkpoint"])
def test_every_disk_that_a_loss_of_power_can_leave(tmp_path, monkeypatch, durability, undoable, one_of):
    """Each of them, or one of so many, which are drawn from a seed."""
    path = tmp_path / "store"
    with ClientStore(["a", "b", "c"], N, medium="mmap", codec="bf16", path=path) as store:
        store.commit(0, {}, {"round": 0})
    store = ClientStore.open(path, durability=durability, undoable=undoable)
    recorder = Recorder(path, monkeypatch)
    run(store, recorder, Model(), (UNDOABLE if undoable else STEPS)[durability])
    monkeypatch.undo()
    store.close()
    tried = undone = 0
    chance = random.Random(1)
    for files, committed in recorder.crashes():
        if chance.randrange(one_of):
            continue
        put(files, tmp_path / "left")
        tried += 1
        writes, found = tried % (2 if undoable else 4) == 0, committed or Model()
        with ClientStore.open(
            tmp_path / "left", readonly=not writes, durability="none", undoable=writes and undoable
        ) as left:
            assert_holds(left, found.told)
            if writes and found.previous is not None:
                assert left.undo()
                assert_holds(left, found.previous)
                undone += 1
            if writes:  # and it goes on from there
                client = next(iter(left.registry))
                write(left, client, content(N, "on"))
                left.commit(99, {"x": content(N, "on")}, {"round": 99})
                np.testing.assert_array_equal(left.read(client), content(N, "on"))
                assert left.verify() == []
    assert tried > 200 / one_of
    assert (undone > 30 / one_of) == undoable
