"""Convergence of networks on least squares with different minimisers and full gradients."""

import numpy as np
import pytest

from fedcore import Network, Update
from fedcore.sim.network.topology import Topology
from tests.sim.network.kit import LeastSquares

NODES, E, LR = 9, 2, 0.05


def distance(W):
    """Return the final distance of the output from the optimum, and the last report."""
    problem = LeastSquares(NODES, 4, seed=5)
    network = Network([np.zeros(4, np.float32)] * NODES, W, lr=LR)
    for _ in range(150):
        report = network.round(problem.updates(network.models, E, LR))
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


Q = np.arange(1.0, NODES + 1) / np.arange(1.0, NODES + 1).sum()


@pytest.mark.parametrize("E", [1, 3])
def test_the_mean_moves_by_the_weighted_steps(E):
    """Eq. 75, whatever the graph, in every round: also where a weight is 0."""
    q = np.where(np.arange(NODES) == 4, 0, Q) / (1 - Q[4])
    problem = LeastSquares(NODES, 4, seed=3)
    network = Network([np.zeros(4, np.float32)] * NODES, Topology.named("ring", NODES), lr=LR, q=q)
    for _ in range(5):
        before = np.array(network.models, np.float64)
        ys = np.array([problem.steps(j, network.models[j], E, LR) for j in range(NODES)])
        network.round(Update(j, y.astype(np.float32), E) for j, y in enumerate(ys))
        moved = np.mean(network.models, axis=0, dtype=np.float64) - before.mean(axis=0)
        np.testing.assert_allclose(moved, q @ (ys - before), rtol=1e-5, atol=1e-6)
