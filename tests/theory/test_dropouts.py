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
