"""Clients that were drawn several times count once for each draw."""

import numpy as np
import pytest

from fedcore import Server, Update, algorithms
from fedcore.errors import RangeError

x0, y, other = np.float32([1, -2]), np.float32([3, 5]), np.float32([-4, 1])
METHODS = {
    "FedAvg": algorithms.FedAvg(weights="uniform"),
    "FedProx": algorithms.FedProx(weights="uniform"),
    "FedAvgM": algorithms.FedAvgM(),
    "FedAvgMVR": algorithms.FedAvgMVR(),
    "MBSTORM": algorithms.MBSTORM(),
    "LocalDescent": algorithms.LocalDescent(),
    "MimiC, on clients": algorithms.MimiC(placement="client"),
}


@pytest.mark.parametrize("server_lr", [None, 0.3])
@pytest.mark.parametrize("name", METHODS)
def test_a_client_drawn_twice_weighs_as_two_equal_clients(name, server_lr):
    drawn, twins = (Server(x0, METHODS[name], clients=3, lr=0.1, server_lr=server_lr) for _ in range(2))
    for _ in range(2):  # the second round has a direction to remember
        drawn.round([Update(0, y, steps=2, count=2), Update(1, other, steps=5)])
        twins.round([Update(0, y, steps=2), Update(1, other, steps=5), Update(2, y, steps=2)])
        np.testing.assert_allclose(drawn.x, twins.x, rtol=1e-6)
        np.testing.assert_allclose(drawn.v, twins.v, rtol=1e-6)


@pytest.mark.parametrize("algorithm", ["FlexibleFedAvg", "MIFA", "MimiC", "SCAFFOLD"])
def test_methods_that_take_a_client_once_reject_draws(algorithm):
    server = Server(x0, algorithm, clients=dict(enumerate([1, 1])), lr=0.1)
    with server.open_round() as round, pytest.raises(RangeError, match=r"^count\b"):
        round.add(0, y, steps=1, count=2)
