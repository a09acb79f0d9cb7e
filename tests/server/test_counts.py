"""Clients that were drawn more than once: a draw counts, not a client."""

import numpy as np
import pytest

from fedcore import Server, Update, algorithms
from fedcore.algorithms import rates
from fedcore.errors import RangeError
from tests.server.further_papers import fedexp, fednova
from tests.server.papers import Clients, N, arbitrary_course, fedavg, follow, mb_storm, momentum, start_of

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
def test_a_client_drawn_twice_weighs_as_two_of_its_kind(name, server_lr):
    drawn, twins = (Server(x0, METHODS[name], clients=3, lr=0.1, server_lr=server_lr) for _ in range(2))
    for _ in range(2):  # the second round has a direction to remember
        drawn.round([Update(0, y, steps=2, count=2), Update(1, other, steps=5)])
        twins.round([Update(0, y, steps=2), Update(1, other, steps=5), Update(2, y, steps=2)])
        np.testing.assert_allclose(drawn.x, twins.x, rtol=1e-6)
        np.testing.assert_allclose(drawn.v, twins.v, rtol=1e-6)


@pytest.mark.parametrize("algorithm", [algorithms.FlexibleFedAvg(), algorithms.MIFA(), algorithms.SCAFFOLD()], ids=repr)
def test_methods_that_hear_a_client_once_say_so(algorithm):
    server = Server(x0, algorithm, clients=dict(enumerate([1, 1])), lr=0.1)
    with server.open_round() as round, pytest.raises(RangeError, match=r"^count\b"):
        round.add(0, y, steps=1, count=2)


@pytest.mark.parametrize("algorithm", [algorithms.FlexibleFedAvg(), algorithms.MimiC(units="update")], ids=repr)
def test_methods_of_model_differences_take_no_server_rate(algorithm):
    with pytest.raises(RangeError, match=r"^server_lr\b"):
        Server(x0, algorithm, clients=dict(enumerate([1, 1])), lr=0.1, server_lr=0.5)


BETA = 0.3
PAPERS = {
    "FedAvg": (algorithms.FedAvg(), fedavg, {}),
    "FedAvg, uniform": (algorithms.FedAvg("uniform"), fedavg, dict(weigh=lambda n_k: 1)),
    "FedProx": (algorithms.FedProx(mu=0.5), fedavg, dict(mu=0.5)),
    "FedAvgM": (algorithms.FedAvgM(BETA), momentum, dict(beta=BETA)),
    "FedAvgMVR": (algorithms.FedAvgMVR(BETA), momentum, dict(beta=BETA, vr=True)),
    "MBSTORM": (algorithms.MBSTORM(BETA), mb_storm, dict(beta=BETA)),
    "LocalDescent": (algorithms.LocalDescent(), fedavg, dict(weigh=lambda n_k: 1)),
    "FedNova": (algorithms.FedNova(), fednova, {}),
    "FedExP": (algorithms.FedExP(), fedexp, {}),
}


@pytest.mark.parametrize("method", PAPERS)
def test_draws_with_replacement_follow_the_paper(method):
    """The paper sums over the draws, the server over the clients, each with its number of draws."""
    algorithm, paper, options = PAPERS[method]
    clients, course, start = Clients(0), arbitrary_course(0, draws=True), start_of(0)
    lr = rates.Exponential(0.1, 0.98)
    server = Server(start, algorithm, N, lr=lr)
    assert follow(server, clients, course, paper(clients, start.astype(np.float64), lr, course, **options)) < 2e-6


def test_every_method_that_takes_counts_is_drawn_for_100_rounds():
    several = {name for name, method in algorithms.REGISTRY.items() if not method().hears_once}
    assert {type(algorithm).__name__ for algorithm, *_ in PAPERS.values()} == several
