"""The limits of the methods of Cheng et al. with all clients, K = 5 full-gradient steps and a constant rate."""

import numpy as np
import pytest

from fedcore import algorithms
from tests.theory.quadratics import Clients, distance, run, server_of

N, n, K, LR, BETA = 8, 20, 5, 0.05, 0.4


@pytest.fixture(scope="module")
def clients():
    return Clients(N, n, seed=2)


def limit(algorithm, clients, lr=LR, rounds=300):
    server = server_of(algorithm, clients, lr)
    run(server, clients, rounds, cohort=lambda t: range(N), steps=lambda t, i: K)
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
def test_the_scaffolds_reach_the_optimum(clients, algorithm):
    assert distance(limit(algorithm, clients), clients.optimum()) < 2e-6


def test_fedavg_does_not_reach_the_optimum(clients):
    assert distance(limit(algorithms.FedAvg("uniform"), clients), clients.optimum()) > 1e-3


def test_fedavg_m_has_the_limit_of_fedavg_with_beta_times_the_rate(clients):
    """The theorem is about eta or beta that shrink with the horizon, not about constants."""
    m = limit(algorithms.FedAvgM(BETA), clients)
    assert distance(m, limit(algorithms.FedAvg("uniform"), clients, lr=BETA * LR, rounds=600)) < 1e-5
    assert distance(m, clients.optimum()) > 1e-4


def test_fedavg_m_vr_has_the_limit_of_fedavg_with_the_same_rate(clients):
    """The limit is neither FedAvg-M's nor the optimum. At a fixed point g = 0, and on least squares a client moves beta
    times as far as FedAvg's client for any matrix: the same mean is zero."""
    vr = limit(algorithms.FedAvgMVR(BETA), clients)
    assert distance(vr, limit(algorithms.FedAvg("uniform"), clients)) < 1e-6
    for other in (clients.optimum(), limit(algorithms.FedAvgM(BETA), clients)):
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
def test_beta_1_is_the_plain_method(clients, momentum, plain):
    rng = np.random.default_rng(0)
    cohorts = [np.flatnonzero(rng.random(N) < 0.5).tolist() for _ in range(20)]
    servers = [server_of(algorithm, clients, LR) for algorithm in (momentum, plain)]
    for server in servers:
        run(server, clients, 20, cohort=cohorts.__getitem__, steps=lambda t, i: 3)
    assert distance(servers[0].x, servers[1].x) < 1e-6
    assert np.linalg.norm(servers[0].x) > 0.1


def test_the_reparameterised_form_has_the_same_models(clients):
    """Eq. 31-33: g / beta, beta eta and beta gamma instead of g, eta and gamma."""
    for form in (algorithms.FedAvgM, algorithms.SCAFFOLDM):
        plain, other = (
            server_of(form(BETA), clients, LR, server_lr=LR * K),
            server_of(form(BETA, reparameterised=True), clients, BETA * LR, server_lr=BETA * LR * K),
        )
        for server in (plain, other):
            run(server, clients, 50, cohort=lambda t: [t % N, (t + 3) % N], steps=lambda t, i: K)
        assert distance(other.x, plain.x) < 1e-5
        assert np.linalg.norm(plain.x) > 0.1
