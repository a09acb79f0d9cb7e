"""Convergence of networks on least squares with different minimisers and full gradients."""

import numpy as np
import pytest

from fedcore import Network, Update
from fedcore.sim.network.topology import Topology
from tests.sim.network.kit import LeastSquares

NODES, E, LR = 9, 2, 0.05


def distance(W, *, rounds=150, problem=None, lr=LR):
    """Return the final distance of the output from the optimum, and the last report."""
    problem = problem or LeastSquares(NODES, 4, seed=5)
    network = Network([np.zeros(problem.n, np.float32)] * problem.nodes, W, lr=lr)
    for _ in range(rounds):
        report = network.round(problem.updates(network.models, E, lr))
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


Q = np.arange(1.0, NODES + 1) / np.arange(1.0, NODES + 1).sum()


@pytest.mark.parametrize("graph", ["ring", "complete"])
def test_unequal_weights_reach_their_own_optimum(graph):
    """sum_j q_j f_j, the paper's objective, and not the nodes' mean: the smaller the rate, the nearer."""
    problem, uniform = LeastSquares(NODES, 4, seed=5, q=Q), LeastSquares(NODES, 4, seed=5)
    network, rounds = Network([np.zeros(4, np.float32)] * NODES, Topology.named(graph, NODES), lr=0.1, q=Q), 60
    found = []
    for lr in (0.05,) if graph == "complete" else (0.05, 0.01, 0.002):
        network = Network(network.models, Topology.named(graph, NODES), lr=lr, q=Q)
        for _ in range(rounds := rounds * 4):
            network.round(problem.updates(network.models, 1, lr))
        found.append(np.linalg.norm(network.output() - problem.optimum))
    apart = np.linalg.norm(problem.optimum - uniform.optimum)
    assert found[-1] < 0.02 * apart
    if graph == "complete":
        assert found[0] < 1e-5 * apart  # with one local step, all models are one
    else:
        assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("E", [1, 3])
def test_the_mean_moves_by_the_weighted_steps(E):
    """Eq. 75, whatever the graph, in every round: also where a weight is 0."""
    q = np.where(np.arange(NODES) == 4, 0, Q) / (1 - Q[4])
    problem = LeastSquares(NODES, 4, seed=3, q=q)
    network = Network([np.zeros(4, np.float32)] * NODES, Topology.named("ring", NODES), lr=LR, q=q)
    for _ in range(5):
        before = np.array(network.models, np.float64)
        ys = np.array([problem.steps(j, network.models[j], E, LR) for j in range(NODES)])
        network.round(Update(j, y.astype(np.float32), E) for j, y in enumerate(ys))
        moved = np.mean(network.models, axis=0, dtype=np.float64) - before.mean(axis=0)
        np.testing.assert_allclose(moved, q @ (ys - before), rtol=1e-5, atol=1e-6)


def test_without_steps_the_consensus_distance_shrinks_by_zeta():
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
