"""The limits of the methods of Cheng et al. with all clients, K = 5 full-gradient steps and a constant rate."""

from functools import cache

import numpy as np
import pytest

from fedcore import algorithms
from tests.theory.quadratics import Clients, distance, run, server_of

N, n, K, LR, BETA = 8, 20, 5, 0.05, 0.4
CLIENTS = Clients(N, n, seed=2)


@cache
def limit(algorithm, lr=LR, rounds=150):
    server = server_of(algorithm, CLIENTS, lr)
    run(server, CLIENTS, rounds, cohort=lambda t: range(N), steps=lambda t, i: K)
    return server.x


@pytest.mark.parametrize(
    "algorithm",
    [
        algorithms.SCAFFOLD(),
        algorithms.SCAFFOLD(control="sent"),
        algorithms.SCAFFOLDM(BETA),
        algorithms.SCAFFOLDM(BETA, control="sent"),
        algorithms.SCAFFOLDMVR(BETA),
    ],
    ids=["SCAFFOLD", "two vectors", "-M", "-M, two vectors", "-M-VR"],
)
def test_the_scaffolds_reach_the_optimum(algorithm):
    assert distance(limit(algorithm), CLIENTS.optimum()) < 2e-6


def test_fedavg_does_not_reach_the_optimum():
    assert distance(limit(algorithms.FedAvg("uniform")), CLIENTS.optimum()) > 1e-3


def test_fedavg_m_has_the_limit_of_fedavg_with_beta_times_the_rate():
    """The theorem is about eta or beta that shrink with the horizon, not about constants."""
    m = limit(algorithms.FedAvgM(BETA))
    assert distance(m, limit(algorithms.FedAvg("uniform"), lr=BETA * LR, rounds=400)) < 1e-5
    assert distance(m, CLIENTS.optimum()) > 1e-4


def test_fedavg_m_vr_has_the_limit_of_fedavg_with_the_same_rate():
    """The limit is neither FedAvg-M's nor the optimum. At a fixed point g = 0, and on least squares a client moves beta
    times as far as FedAvg's client for any matrix: the same mean is zero."""
    vr = limit(algorithms.FedAvgMVR(BETA))
    assert distance(vr, limit(algorithms.FedAvg("uniform"))) < 1e-6
    for other in (CLIENTS.optimum(), limit(algorithms.FedAvgM(BETA))):
        assert distance(vr, other) > 1e-4


@pytest.mark.parametrize(
    ("momentum", "plain"),
    [
        (algorithms.FedAvgM(1.0), algorithms.FedAvg("uniform")),
        (algorithms.FedAvgMVR(1.0), algorithms.FedAvg("uniform")),
        (algorithms.SCAFFOLDM(1.0), algorithms.SCAFFOLD()),
        (algorithms.SCAFFOLDMVR(1.0), algorithms.SCAFFOLD(control="sent")),
        (algorithms.FedProx(mu=0), algorithms.FedAvg()),
    ],
    ids=["FedAvgM", "FedAvgMVR", "SCAFFOLDM", "SCAFFOLDMVR", "FedProx, mu = 0"],
)
def test_beta_1_is_the_plain_method(momentum, plain):
    rng = np.random.default_rng(0)
    cohorts = [np.flatnonzero(rng.random(N) < 0.5).tolist() for _ in range(20)]
    servers = [server_of(algorithm, CLIENTS, LR) for algorithm in (momentum, plain)]
    for server in servers:
        run(server, CLIENTS, 20, cohort=cohorts.__getitem__, steps=lambda t, i: 3)
    assert distance(servers[0].x, servers[1].x) < 1e-6
    assert np.linalg.norm(servers[0].x) > 0.1
