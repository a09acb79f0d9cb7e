"""Graphs, their mixing matrices, and zeta."""

import sys

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcore.errors import FedcoreError, MissingDependencyError
from fedcore.sampling import bernoulli
from fedcore.sim.network.topology import NAMES, Topology, ring

EXAMPLES = [
    ("complete", 1, {}),
    ("complete", 7, {}),
    ("ring", 2, {}),
    ("ring", 9, {}),
    ("ring", 10, {}),
    ("star", 6, {}),
    ("torus", 12, {}),
    ("torus", 16, {"rows": 2}),
    ("erdos-renyi", 20, {"probability": 0.4, "seed": 3}),
]


def assert_mixes(topology, tolerance):
    W = topology.W
    np.testing.assert_array_equal(W, W.T)
    np.testing.assert_allclose(W.sum(axis=0), 1, atol=tolerance)
    np.testing.assert_allclose(W.sum(axis=1), 1, atol=tolerance)
    assert (W >= 0).all()
    assert (np.diag(W) > 0).all()
    assert 0 <= topology.zeta < 1


def test_every_name_is_tested():
    assert {name for name, _, _ in EXAMPLES} == set(NAMES)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("name", "nodes", "options"), EXAMPLES)
def test_matrices_are_symmetric_and_doubly_stochastic(name, nodes, options, dtype):
    topology = Topology.named(name, nodes, dtype=dtype, **options)
    assert topology.W.dtype == dtype
    assert topology.W.shape == (nodes, nodes)
    assert len(topology) == nodes
    assert_mixes(topology, 1e-15 * nodes if dtype == "float64" else 1e-7)


@given(st.integers(1, 14), st.floats(0, 1), st.integers(0, 2**32))
def test_any_connected_graph(nodes, probability, seed):
    rng = np.random.default_rng(seed)
    graph = nx.path_graph(nodes)  # connected, whatever else is there
    graph.add_edges_from((i, j) for i in range(nodes) for j in range(nodes) if rng.random() < probability)  # loops too
    assert_mixes(Topology(graph), 1e-14)


def test_metropolis_weights_by_hand():
    """In a star of three, the middle has two neighbours, the others one."""
    np.testing.assert_allclose(
        Topology.named("star", 3).W, [[1 / 3, 1 / 3, 1 / 3], [1 / 3, 2 / 3, 0], [1 / 3, 0, 2 / 3]], rtol=1e-15
    )
    uneven = Topology(nx.Graph([(0, 1), (0, 2), (0, 3), (3, 4)])).W  # with 3, 1, 1, 2 and 1 neighbours
    np.testing.assert_allclose(uneven[3], [1 / 4, 0, 0, 5 / 12, 1 / 3], rtol=1e-14)


@pytest.mark.parametrize("nodes", [1, 2, 3, 8, 30])
def test_the_complete_graph_mixes_to_the_mean(nodes):
    topology = Topology.named("complete", nodes)
    np.testing.assert_allclose(topology.W, 1 / nodes, rtol=1e-13)
    assert topology.zeta < 1e-14


def eigenvalues_of_a_torus():
    k, m = np.meshgrid(np.arange(5), np.arange(6))
    return (1 + 2 * np.cos(2 * np.pi * k / 5) + 2 * np.cos(2 * np.pi * m / 6)).ravel() / 5


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *(("ring", (1 + 2 * np.cos(2 * np.pi * np.arange(p) / p)) / 3) for p in (4, 5, 8, 33)),
        ("torus", eigenvalues_of_a_torus()),
    ],
)
def test_zeta_matches_the_known_eigenvalues_of_a_circulant_matrix(name, values):
    assert Topology.named(name, len(values)).zeta == pytest.approx(np.sort(np.abs(values))[-2], abs=1e-12)


def test_the_nodes_of_a_graph_are_in_its_order():
    graph = nx.Graph([("c", "a"), ("a", "b")])
    topology = Topology(graph, name="three friends")
    assert topology.nodes == ("c", "a", "b")
    assert topology.W[0, 2] == topology.W[2, 0] == 0
    assert repr(topology) == "three friends: zeta 0.6667"
    with pytest.raises(ValueError, match="read-only"):
        topology.W[0, 0] = 1


def test_a_random_graph_depends_only_on_its_arguments():
    """A paper's graph stays the same: pairs are drawn in the order (0, 1), (0, 2), ... from the topology's stream."""
    one, same, other = (Topology.named("erdos-renyi", 20, probability=0.4, seed=seed).W for seed in (3, 3, 4))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)
    drawn = set(bernoulli(15, 0.7, seed=3, round=0, purpose="topology: erdos-renyi").tolist())
    pairs = [(i, j) for i in range(6) for j in range(i + 1, 6)]
    W = Topology.named("erdos-renyi", 6, probability=0.7, seed=3).W
    assert [pair for pair in pairs if W[pair] > 0] == [pair for at, pair in enumerate(pairs) if at in drawn]


def named(*arguments, **options):
    return lambda: Topology.named(*arguments, **options)


OPTIONS = ("rows", 3, "option of ring: 'rows' is unknown"), ("dtype", "float16", "dtype: 'float16' is unknown")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (named("rign", 3), "topology: 'rign' is unknown; did you mean 'ring'"),
        *((named("ring", nodes), f"nodes{told}") for nodes, told in ((0, ""), (3.5, ""), (2**14 + 1, ".*16384"))),
        *((named("ring", 3, **{name: value}), told) for name, value, told in OPTIONS),
        *((named("torus", nodes), f"nodes={nodes}: .*rows and two columns") for nodes in (7, 2)),
        *(
            (named("torus", 12, rows=rows), rf"rows={rows}{told}")
            for rows, told in ((5, r": .*\[2, 3, 4, 6\]"), (12, ""))
        ),
        (named("erdos-renyi", 5), "probability: .*erdos-renyi"),
        *((named("erdos-renyi", 5, probability=p), "probability") for p in (1.5, "x")),
        (named("erdos-renyi", 5, probability=1, seed=-1), "seed"),
        (named("erdos-renyi", 5, probability=0.0), r"graph: erdos-renyi\(nodes=5, probability=0, seed=0\) has 5 "),
        (lambda: Topology(nx.Graph([(0, 1), (2, 3)]), name="two pairs"), "graph: two pairs has 2 "),
        (lambda: Topology(nx.DiGraph([(0, 1)])), "graph: graph is directed"),
        (lambda: Topology(nx.MultiDiGraph([(0, 1)])), "graph: graph is directed"),
        (lambda: Topology(nx.Graph()), "graph: graph has no nodes"),
        (lambda: Topology(np.eye(3)), "graph: expected a networkx graph, got ndarray"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, message):
    with pytest.raises(FedcoreError, match=rf"^{message}"):
        call()


def test_the_largest_graph_and_doubled_edges_are_accepted():
    assert len(ring(2**14)[0]) == 2**14
    doubled = nx.MultiGraph([(0, 1), (0, 1), (1, 2)])
    np.testing.assert_array_equal(Topology(doubled).W, Topology(nx.path_graph(3)).W)


def test_without_networkx_the_error_names_the_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "networkx", None)
    with pytest.raises(MissingDependencyError, match=r"topology: needs networkx; pip install 'fedcore-fl\[sim\]'"):
        Topology.named("ring", 3)
