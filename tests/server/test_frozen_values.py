"""Values of a server are immutable."""

from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest

from fedcore import Compute, Layout, Model, Server, Storage, Update
from fedcore.cluster.manifest import Manifest
from fedcore.options import Limits
from fedcore.server.broadcast import WholeVectors
from fedcore.server.report import Report
from fedcore.server.step import History, Population
from fedcore.server.update import SentSlices, Slices


def server():
    return Server(np.zeros(2, np.float32), "FedAvg", clients=2, lr=0.1, compute=Compute(accumulator="exact"))


VALUES = {
    "Broadcast": lambda: server().broadcast([0]),
    "History": History,
    "Limits": Limits,
    "Manifest": lambda: Manifest("", Layout.of(np.zeros(2)), (), None),
    "PartialSum": lambda: server().open_round().partial_sum(),
    "Population": Population,
    "Report": lambda: Report(0),
    "SentSlices": lambda: SentSlices((), (), None, None),
    "Settings": lambda: server().settings,
    "Slices": lambda: Slices(()),
    "WholeVectors": lambda: WholeVectors(np.zeros(2, np.float32), None, None),
}


@pytest.mark.parametrize("name", VALUES)
def test_no_field_can_be_set(name):
    value = VALUES[name]()
    assert type(value).__name__ == name
    for field in fields(value):
        with pytest.raises(FrozenInstanceError):
            setattr(value, field.name, None)


@pytest.mark.parametrize("kind", ["one part", "groups", "shards", "files"])
def test_no_array_that_a_server_returns_can_change_it(kind, tmp_path):
    """Each is a copy or read-only."""
    model = {"w": np.ones((4, 9000), np.float32), "bn.running_var": np.ones(3, np.float32), "n": np.array(3)}
    options = {"compute": Compute(shards=2)} if kind == "shards" else {}
    options |= {"storage": Storage(tmp_path / "s")} if kind == "files" else {}
    model = Model(model | {"b": np.ones(5, np.float32)}, {"one": "w"}) if kind == "groups" else model
    server = Server(model, "MimiC", {0: 3, 1: 4}, lr=0.1, **options)
    for steps in (1, 2):
        tensors = server.tensors()
        server.round([Update(i, tensors | {"w": tensors["w"] + i, "n": np.array(9)}, steps, 2) for i in range(2)])
    reads = {
        "x": lambda: server.x,
        "v": lambda: server.v,
        "row": lambda: server.row(0),
        "correction": lambda: server.correction(0),
        "total": server.total,
        "client_sizes": lambda: server.client_sizes,
        "counters": lambda: server.counters["n"],
        "broadcast": lambda: server.broadcast([0]).x,
        "offset": lambda: server.broadcast([0]).offset(0),
        "tensors": lambda: server.tensors()["w"],
        "shown": lambda: server.tensors(copy=False)["w"],
    }
    if kind in ("files", "one part"):
        reads |= {"store": lambda: server.store.row(0), "stored": lambda: server.store.read(0)}
    for name, read in reads.items():
        before = np.array(read())
        if (got := read()).flags.writeable:
            got[...] = 77
        np.testing.assert_array_equal(read(), before, name)
    with pytest.raises(ValueError, match="read-only"):
        server.counters["n"][...] = 1
    server.close()
