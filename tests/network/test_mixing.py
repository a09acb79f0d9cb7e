import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcore.network.mixing import among, mixing_matrix
from fedcore.topology import Topology


@given(st.integers(2, 12), st.integers(0, 2**32))
def test_what_is_left_is_symmetric_and_doubly_stochastic(nodes, seed):
    rng = np.random.default_rng(seed)
    W = Topology.named("erdos-renyi", nodes, probability=1.0).W if seed % 2 else Topology.named("ring", nodes).W
    heard = np.flatnonzero(rng.random(nodes) < 0.6).tolist()
    left = among(W, heard)
    assert left.shape == (len(heard), len(heard))
    np.testing.assert_array_equal(left, left.T)
    np.testing.assert_allclose(left.sum(axis=1), 1, atol=1e-14)
    assert (left >= 0).all()
    for i, a in enumerate(heard):
        for j, b in enumerate(heard):
            assert i == j or left[i, j] == W[a, b]


def test_nobody_away_leaves_the_matrix_as_it_is():
    W = Topology.named("star", 5).W
    np.testing.assert_array_equal(among(W, range(5)), W)


def test_float32_matrices_pass():
    for nodes in (3, 7, 100):
        W, zeta = mixing_matrix(Topology.named("ring", nodes, dtype="float32").W, nodes)
        assert zeta == pytest.approx(Topology.named("ring", nodes).zeta, abs=1e-6)
        assert W.dtype == np.float64


def test_zeta_sees_negative_eigenvalues():
    """Four nodes in a ring that keep a tenth: the eigenvalues are 1, 0.1, 0.1 and -0.8."""
    W = 0.1 * np.eye(4) + 0.45 * (np.roll(np.eye(4), 1, axis=0) + np.roll(np.eye(4), -1, axis=0))
    assert mixing_matrix(W, 4)[1] == pytest.approx(0.8)
