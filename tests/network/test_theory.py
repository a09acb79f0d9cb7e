"""What mixing with neighbours costs, on least squares with different minimisers and full gradients."""

import numpy as np
import pytest

from fedcore import Network, Update
from fedcore.topology import Topology
from tests.network.problem import LeastSquares

NODES, E, LR = 9, 2, 0.05


def distance(W, *, rounds=150, problem=None, lr=LR):
    """How far the output ends from the optimum, and the last report."""
    problem = problem or LeastSquares(NODES, 4, seed=5)
    network = Network([np.zeros(problem.n, np.float32)] * problem.nodes, W, lr=lr)
    for _ in range(rounds):
        report = network.round(
            Update(j, problem.steps(j, network.models[j], E, lr).astype(np.float32), E) for j in range(problem.nodes)
        )
    return np.linalg.norm(network.output() - problem.optimum), report


def test_the_distance_to_the_optimum_falls_with_zeta_to_that_of_the_complete_graph():
    """W between a ring's and the complete graph's: zeta falls in a line, everything else stays."""
    complete, _ = distance(Topology.named("complete", NODES))
    ring, flat = Topology.named("ring", NODES).W, np.full((NODES, NODES), 1 / NODES)
    found = []
    for part in (1.0, 0.5, 0.25, 0.01):
        far, report = distance(part * ring + (1 - part) * flat)
        found.append((report.zeta, far, report.consensus))
    zetas, distances, apart = zip(*found, strict=True)
    assert list(zetas) == sorted(zetas, reverse=True)
    assert list(distances) == sorted(distances, reverse=True)
    assert list(apart) == sorted(apart, reverse=True)
    assert distances[0] > 1.5 * complete
    assert distances[-1] == pytest.approx(complete, rel=1e-2)


def test_graphs_are_ordered_by_zeta():
    graphs = [
        Topology.named("complete", NODES),
        Topology.named("erdos-renyi", NODES, probability=0.7, seed=1),
        Topology.named("torus", NODES),
        Topology.named("ring", NODES),
    ]
    zetas = [graph.zeta for graph in graphs]
    assert zetas == sorted(zetas)
    ends = [distance(graph) for graph in graphs]
    assert [far for far, _ in ends] == sorted(far for far, _ in ends)
    assert [report.consensus for _, report in ends] == sorted(report.consensus for _, report in ends)


def test_a_shared_minimiser_is_reached_on_any_graph():
    problem = LeastSquares(NODES, 4, seed=2)
    minimiser = np.array([1.0, -2.0, 0.5, 3.0])
    problem.g = [H @ minimiser for H in problem.H]
    problem.optimum = minimiser
    far, report = distance(Topology.named("ring", NODES), problem=problem, rounds=400, lr=0.1)
    assert far < 2e-6 * np.linalg.norm(minimiser)
    assert report.consensus < 1e-5


def test_consensus_alone_shrinks_by_zeta():
    """Without steps every round multiplies the disagreement by at most zeta, and in the end by zeta."""
    topology = Topology.named("ring", 9)
    network = Network(list(np.random.default_rng(0).normal(size=(9, 50)).astype(np.float32)), topology, lr=0.1)
    apart = []
    for _ in range(30):
        report = network.round(Update(j, network.models[j], steps=1) for j in range(9))
        apart.append(report.consensus)
    ratios = np.array(apart[1:]) / apart[:-1]
    assert (ratios < topology.zeta + 1e-4).all()
    assert ratios[-1] == pytest.approx(topology.zeta, rel=1e-3)
