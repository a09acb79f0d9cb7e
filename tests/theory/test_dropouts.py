"""The limit under dropouts: least squares, full gradients, a constant rate (Sun, Mao, Zhang 2023; Gu et al. 2021).

Distances are relative; distances below 1e-6 are at the resolution of a float32 x.
"""

import numpy as np
import pytest

from fedcore import algorithms
from tests.theory.quadratics import Clients, distance, run, server_of

N, n = 8, 20


def unequal_dropouts(t):
    """Client i takes part in a share of the rounds that depends on i; all clients take part in round 0."""
    rng = np.random.default_rng(t)
    return range(N) if t == 0 else np.flatnonzero(rng.random(N) < np.linspace(0.2, 0.9, N)).tolist()


def all_clients(t):
    return range(N)


@pytest.fixture(scope="module")
def clients():
    return Clients(N, n, seed=0)


@pytest.mark.parametrize(
    "algorithm", [algorithms.MIFA(), algorithms.MimiC(), algorithms.MimiC(units="update")], ids=repr
)
def test_with_one_step_mifa_and_mimic_reach_the_optimum(clients, algorithm):
    server = server_of(algorithm, clients, lr=0.1)
    run(server, clients, 300, cohort=unequal_dropouts, steps=lambda t, i: 1)
    assert distance(server.x, clients.optimum()) < 1e-6


def test_with_one_step_fedavg_stalls(clients):
    server = server_of(algorithms.FedAvg("uniform"), clients, lr=0.1)
    run(server, clients, 300, cohort=unequal_dropouts, steps=lambda t, i: 1)
    assert distance(server.x, clients.optimum()) > 0.05


@pytest.mark.parametrize("method", ["MIFA", "MimiC"])
def test_with_more_steps_they_reach_the_limit_of_fedavg_with_all_clients(clients, method):
    full = server_of(algorithms.FedAvg("uniform"), clients, lr=0.05)
    run(full, clients, 200, cohort=all_clients, steps=lambda t, i: 5)
    server = server_of(method, clients, lr=0.05)
    run(server, clients, 300, cohort=unequal_dropouts, steps=lambda t, i: 5)
    assert distance(server.x, full.x) < 2e-6
    assert distance(server.x, clients.optimum()) > 1e-3  # The limit is not the optimum.


def test_mimic_with_corrections_at_the_clients_has_the_same_models(clients):
    """The client sends h_i + c_i and keeps c_i = v - h_i; Algorithm 1's "practical implementation"."""
    at_server = server_of(algorithms.MimiC(), clients, lr=0.05)
    at_clients = server_of(algorithms.MimiC(placement="client"), clients, lr=0.05)
    assert not at_clients.algorithm.keeps_rows
    c = np.zeros((N, n))
    for t in range(200):
        cohort = unequal_dropouts(t)
        run(at_server, clients, 1, cohort=lambda _, cohort=cohort: cohort, steps=lambda t, i: 3)
        broadcast = at_clients.broadcast(cohort)
        h = {i: (broadcast.x - clients.work(broadcast, i, 3).astype(np.float64)) / (0.05 * 3) for i in cohort}
        with at_clients.open_round() as round:
            for i in cohort:
                round.add(i, value=(h[i] + c[i]).astype(np.float32), kind="gradient", steps=3)
        for i in cohort:
            c[i] = at_clients.v - h[i]
        assert distance(at_clients.x, at_server.x) < 1e-4
    assert np.linalg.norm(at_server.x) > 0.1
