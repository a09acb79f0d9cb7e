"""Representations of objects as a line and, in notebooks, as a table; and pickling."""

import copy
import pickle
import traceback

import networkx
import numpy as np
import pytest

from fedcore import ClientStore, Network, Server, Update, algorithms
from fedcore.algorithms import optimizers, rates
from fedcore.errors import FedcoreError, PicklingError
from fedcore.sim import data, participation
from fedcore.sim.experiment import load_preset
from fedcore.sim.network.topology import Topology
from fedcore.store.registry import Registry

X0 = {"w": np.zeros((20, 30), np.float32), "seen": np.array(3)}


def server(**options):
    return Server(X0, "MIFA", 10, lr=rates.Exponential(0.1, 0.9), **options)


def network():
    return Network([np.zeros(3, np.float32)] * 2, np.full((2, 2), 0.5), lr=0.1)


def test_representations_on_one_line():
    made = server()
    opened = made.open_round()
    opened.add(0, made.x + 1, steps=1)
    shown = repr(made)
    assert shown.startswith("Server(algorithm=")
    assert "MIFA" in shown
    assert "server_lr=Constant(value=0.5)" in repr(server(server_lr=0.5))
    assert "round_number=0, n=600, clients=10, lr=Exponential(initial=0.1, decay=0.9), rows=0, storage='ram'" in shown
    assert repr(opened) == "Round(round=0, is_open=True, accepted=1, rejected=0)"
    report = opened.finish()
    assert repr(opened) == f"Round(is_open=False, report={report!r})"
    assert repr(report).startswith("Report(round=0, accepted=(0,), rejected=(), steps=1, norms=float64[1], ")
    assert repr(made.layout) == "Layout(n=600, n_parameters=600, tensors=1, counters=1, constants=0, library='numpy')"
    assert repr(made.clients) == "Clients(count=10, first=(0, 1, 2, 3, 4, 5))"
    assert repr(Registry(["a"])) == "Registry(count=1, first=('a',))"
    assert repr(made.store) == "ReadRows(clients=10, rows=1, n=600, codec='f32', medium='ram', round=0)"
    assert repr(made.broadcast([0, 1])) == (
        "Broadcast(ids=(0, 1), round=1, x=float32[600], lr=0.09, local_rule=Sgd(), keeps_row=False, has_offset=False, "
        "plain=False, bytes=4800)"
    )
    assert "offset" not in repr(made.broadcast([0]).of(0))
    assert repr(Update(0, made.x, 3)) == "Update(client=0, value=float32[600], steps=3)"
    assert repr(network()) == "Network(nodes=2, n=3, round_number=0, zeta=0)"
    assert repr(data.load("digits")).startswith("Dataset(name='digits', train_x=float32[")
    assert repr(load_preset("quickstart")) == "Experiment('quickstart': FedAvg, MIFA, MimiC; 100 rounds, 5 seeds)"


def test_representations_of_patterns():
    among = participation.Schedule(9, arrivals={3: 2})
    pattern = participation.Uniform(9, 2, among=among, seed=5)
    assert repr(pattern) == "Uniform(clients=9, k=2, among=Schedule(clients=9, arrivals={3: 2}, departures={}), seed=5)"
    assert repr(participation.Bernoulli(4, 0.2)) == "Bernoulli(clients=4, p=float64[4])"
    assert repr(pattern.active(0)) == "Active(clients=int64[2])"


@pytest.mark.parametrize(
    "made",
    [
        server,
        lambda: server().open_round(),
        lambda: server().round([Update(1, X0, 1), Update(2, None, 1)]),
        lambda: server().broadcast(range(10)),
        lambda: server().broadcast([1]).of(1),
        lambda: server().layout,
        lambda: server().clients,
        lambda: server().store,
        network,
        lambda: network().open_round(),
        lambda: participation.Always(3),
        lambda: participation.Always(3).active(0),
        lambda: ClientStore(3, 4),
        lambda: data.load("digits"),
        lambda: algorithms.REGISTRY,
        lambda: data.REGISTRY,
        lambda: optimizers.REGISTRY,
    ],
)
def test_representations_as_tables(made):
    owner = made()
    table = owner._repr_html_()
    assert table.startswith(f"<table><caption>{type(owner).__name__}</caption><tr><td>")
    assert table.endswith("</td></tr></table>")
    assert len(repr(owner)) < 500


def test_tables_escape_markup():
    layout = Server({"<b>": np.zeros(2, np.float32)}, "FedAvg", 1, lr=0.1).layout
    assert "<b>" not in layout._repr_html_()
    assert "<td>&lt;b&gt;</td><td>parameter</td><td>float32[2]</td>" in layout._repr_html_()


def test_representations_of_closed_objects(tmp_path):
    made = server(storage=tmp_path / "s")
    assert f"storage='{tmp_path / 's'}'"[:50] in repr(made)
    made.close()
    assert repr(made).startswith("Server(")
    assert repr(made.store).startswith("ReadRows(")


@pytest.mark.parametrize(
    ("made", "instead"),
    [
        (server, r"save\(path\)"),
        (lambda: server().store, r"ClientStore.save\(path\)"),
        (lambda: ClientStore(3, 4), r"ClientStore.save\(path\)"),
        (network, r"save\(path\)"),
        (lambda: server().open_round(), r"report"),
        (lambda: server().broadcast([0]), r"broadcast.of\(client\)"),
    ],
)
def test_pickling_raises_with_advice(made, instead):
    owner = made()
    with pytest.raises(PicklingError, match=rf"^{type(owner).__name__}.*{instead}"):
        pickle.dumps(owner)
    with pytest.raises(TypeError):  # raised by pickle itself
        pickle.dumps([owner])


def test_values_are_pickled():
    sent = server().broadcast([0])
    for value in (sent.of(0), server().layout, participation.Uniform(9, 2), algorithms.MIFA(), Update(0, X0, 1)):
        assert type(pickle.loads(pickle.dumps(value))) is type(value)
    assert pickle.loads(pickle.dumps(sent.of(0))) == sent.of(0)


def test_only_a_server_in_memory_can_be_copied(tmp_path):
    copy.deepcopy(server()).round([Update(0, X0, 1)])  # of one without a round
    made = server()
    made.round([Update(0, made.x + 1, 1)])
    copied = copy.deepcopy(made)
    copied.round([Update(1, made.x + 1, 1)])
    assert (made.round_number, copied.round_number) == (1, 2)
    assert (len(made.store), len(copied.store)) == (1, 2)
    assert not copied.x.flags.writeable
    with server(storage=tmp_path / "s") as held, pytest.raises(PicklingError, match="files"):
        copy.deepcopy(held)


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("Topology", lambda: Topology(networkx.DiGraph())),
        ("Topology", lambda: Topology(networkx.path_graph(3), dtype="f")),
        ("Network", lambda: Network([np.zeros(3, np.float32)] * 2, 3, lr=0.1)),
        ("Server", lambda: Server(np.zeros(3, np.float32), "FedAvg", -1, lr=0.1)),
        ("ClientStore", lambda: ClientStore(3, 0)),
    ],
)
def test_representations_of_objects_with_invalid_arguments(kind, make):
    """As in a debugger, or a traceback with variables."""
    with pytest.raises(FedcoreError) as caught:
        make()
    frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(caught.tb)]
    assert f"{kind}(unknown='its constructor raised an error')" in [repr(half) for half in frames if half is not None]
