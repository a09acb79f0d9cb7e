"""Whatever a loss of power leaves of what was not synced, the last durable round is there."""

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


def run(store, recorder, model):
    """Do the steps; the model is what the store holds at each moment if that were committed."""
    for round, step in enumerate(STEPS[store.durability]):
        match step:
            case (clients, vectors):
                for client in clients:
                    write(store, client, content(N, client, round))
                    model["rows"][client] = round
                if vectors:
                    model["vectors"] = dict.fromkeys(vectors, round)
                model["round"] = round
                recorder.upcoming = model
                named = {name: content(N, name, round) for name in vectors} if vectors else None
                store.commit(round, named, {"round": round})
            case "compact":
                store.compact()
            case "checkpoint":
                store.checkpoint()
            case _ if step.startswith("forget"):
                store.forget(step[-1])
                model["rows"].pop(step[-1])
                model["clients"].remove(step[-1])
            case _:
                store.add(step[-1])
                model["clients"].append(step[-1])


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


@pytest.mark.parametrize("durability", ["round", "checkpoint"])
def test_every_disk_that_a_loss_of_power_can_leave(tmp_path, monkeypatch, durability):
    path = tmp_path / "store"
    model = {"rows": {}, "vectors": {}, "round": 0, "clients": ["a", "b", "c"]}
    with ClientStore(["a", "b", "c"], N, medium="mmap", codec="bf16", path=path) as store:
        store.commit(0, {}, {"round": 0})
    store = ClientStore.open(path, durability=durability)
    recorder = Recorder(path, monkeypatch)
    first = {"rows": {}, "vectors": {}, "round": 0, "clients": ["a", "b", "c"]}
    run(store, recorder, model)
    monkeypatch.undo()
    store.close()
    tried = 0
    for files, committed in recorder.crashes():
        put(files, tmp_path / "left")
        tried += 1
        writes = tried % 4 == 0
        with ClientStore.open(tmp_path / "left", readonly=not writes, durability="none") as left:
            assert_holds(left, committed or first)
            if writes:  # and it goes on from there
                client = next(iter(left.registry))
                write(left, client, content(N, "on"))
                left.commit(99, {"x": content(N, "on")}, {"round": 99})
                np.testing.assert_array_equal(left.read(client), content(N, "on"))
                assert left.verify() == []
    assert tried > 200
