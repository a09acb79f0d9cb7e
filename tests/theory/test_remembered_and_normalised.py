"""FedVARP, FedStale, FedAU, FedDyn, FedACG, FedNova and FedExP on least squares with full gradients."""

import numpy as np
import pytest

from fedcore import Update, algorithms
from tests.theory.quadratics import Clients, distance, run, server_of

N, n = 8, 20
CHANCES = np.linspace(0.2, 0.9, N).tolist()


def dropouts(t):
    """Client i takes part with its probability, independently; some rounds have no clients."""
    return np.flatnonzero(np.random.default_rng(t).random(N) < CHANCES).tolist()


def all_clients(t):
    return range(N)


def one_step(t, i):
    return 1


def mean_of_models(algorithm, clients, lr, rounds):
    """The mean of the models of the second half of some rounds, and the last weight of each client."""
    server, mean, weights = server_of(algorithm, clients, lr=lr), np.zeros(n), {}
    for t in range(rounds):
        report = run(server, clients, 1, cohort=lambda _, t=t: dropouts(t), steps=one_step)
        weights |= dict(zip(report.accepted, report.weights, strict=True))
        mean += server.x * (t >= rounds // 2) / (rounds // 2)
    return mean, weights


@pytest.fixture(scope="module")
def clients():
    return Clients(N, n, seed=0)


@pytest.mark.parametrize("algorithm", [algorithms.FedVARP(), algorithms.FedStale(1.0, chances=CHANCES)], ids=repr)
def test_fedvarp_and_fedstale_reach_the_optimum_under_uneven_dropouts(clients, algorithm):
    server = server_of(algorithm, clients, lr=0.1)
    run(server, clients, 300, cohort=dropouts, steps=one_step)
    assert distance(server.x, clients.optimum()) < 1e-6


def test_fedstale_is_unbiased_and_fedavg_is_not(clients):
    """With a constant rate and beta < 1 the model moves around the optimum; the mean of the models is the optimum."""
    distances = {}
    for algorithm in (algorithms.FedStale(0.8, chances=CHANCES), algorithms.FedAvg("uniform")):
        mean = mean_of_models(algorithm, clients, 0.04, 800)[0]
        distances[type(algorithm).__name__] = distance(mean, clients.optimum())
    assert distances["FedStale"] < 0.02
    assert distances["FedAvg"] > 0.05


def test_fedaus_weights_tend_to_the_inverse_probabilities(clients):
    """So it is nearly unbiased; the intervals are geometric, with means 1 / p_i."""
    mean, weights = mean_of_models(algorithms.FedAU(), clients, 0.04, 700)
    np.testing.assert_allclose([weights[i] for i in range(N)], 1 / np.array(CHANCES), rtol=0.2)
    assert distance(mean, clients.optimum()) < 0.1


def test_fedawe_has_less_bias_than_fedavg_under_uneven_dropouts(clients):
    ends = {}
    for algorithm in (algorithms.FedAWE(), algorithms.FedAvg("uniform")):
        ends[type(algorithm).__name__] = distance(mean_of_models(algorithm, clients, 0.02, 400)[0], clients.optimum())
    assert ends["FedAWE"] < 0.3 * ends["FedAvg"]


def test_a_shared_minimiser_is_reached_with_any_beta():
    clients = Clients(N, n, seed=0, shared=True)
    server = server_of(algorithms.FedStale(0.5, chances=CHANCES), clients, lr=0.1)
    run(server, clients, 300, cohort=dropouts, steps=one_step)
    assert distance(server.x, clients.optimum()) < 1e-6


def path(algorithm, clients, *, cohort, steps=lambda t, i: 3, rounds=30, **options):
    server, xs = server_of(algorithm, clients, lr=0.05, **options), []
    for t in range(rounds):
        run(server, clients, 1, cohort=lambda _, t=t: cohort(t), steps=steps)
        xs.append(server.x)
    return np.array(xs)


def same(one, other):
    assert np.linalg.norm(one[-1]) > 0.1  # The model has moved.
    return max(distance(x, y) for x, y in zip(one[1:], other[1:], strict=True)) < 2e-6


def test_fedstale_is_between_fedavg_and_fedvarp(clients):
    sometimes = lambda t: dropouts(t) or [0]  # noqa: E731
    varp = path(algorithms.FedVARP(), clients, cohort=sometimes)
    assert same(path(algorithms.FedStale(1.0), clients, cohort=sometimes), varp)
    assert not same(path(algorithms.FedStale(0.5), clients, cohort=sometimes), varp)
    fedavg = path(algorithms.FedAvg("uniform"), clients, cohort=sometimes)
    assert same(path(algorithms.FedStale(0.0), clients, cohort=sometimes), fedavg)


def test_feddyn_s_fixed_point_is_stationary_with_gradients_as_rows(clients):
    alpha = 0.5
    server = server_of(algorithms.FedDyn(alpha), clients, lr=0.1)
    run(server, clients, 400, cohort=lambda t: dropouts(t) or [0], steps=lambda t, i: 10)
    optimum = clients.optimum()
    assert distance(server.x, optimum) < 1e-5
    for i in range(N):
        assert distance(alpha * server.store.read(i), clients.gradient(i, optimum)) < 1e-4


def test_fedacg_without_momentum_is_fedprox(clients):
    fedprox = path(algorithms.FedProx(0.3, weights="uniform"), clients, cohort=all_clients)
    assert same(path(algorithms.FedACG(lam=0.0, beta=0.3), clients, cohort=all_clients), fedprox)


def test_fednova_with_equal_steps_is_fedavg(clients):
    def of(algorithm, steps):
        server, xs = server_of(algorithm, clients, lr=0.05), []
        for t in range(20):
            broadcast = server.broadcast(dropouts(t) or [0])
            ys = {i: clients.work(broadcast, i, steps(i)) for i in broadcast.ids}
            server.round([Update(i, y, steps=steps(i), examples=3 + i) for i, y in ys.items()])
            xs.append(server.x)
        return np.array(xs)

    assert same(of(algorithms.FedNova(), lambda i: 4), of(algorithms.FedAvg(), lambda i: 4))
    assert not same(of(algorithms.FedNova(), lambda i: 1 + i), of(algorithms.FedAvg(), lambda i: 1 + i))


def test_fednova_does_not_prefer_clients_with_more_steps(clients):
    """FedAvg with uneven steps has the limit of an objective that is weighted by the steps."""
    ends = {}
    for algorithm in (algorithms.FedNova(), algorithms.FedAvg()):
        server = server_of(algorithm, clients, lr=0.002)
        run(server, clients, 350, cohort=all_clients, steps=lambda t, i: 1 + 2 * i)
        ends[type(algorithm).__name__] = distance(server.x, clients.optimum())
    assert ends["FedNova"] < 0.1 * ends["FedAvg"]


def test_fedexp_equals_fedavg_for_equal_clients_and_steps_further_otherwise(clients):
    agreeing = Clients(N, n, seed=0, shared=True)
    agreeing.a[:] = 1
    fedexp, fedavg = (
        path(method, agreeing, cohort=all_clients) for method in (algorithms.FedExP(), algorithms.FedAvg("uniform"))
    )
    assert same(fedexp, fedavg)
    server = server_of(algorithms.FedExP(), clients, lr=0.05)
    report = run(server, clients, 30, cohort=all_clients, steps=one_step)
    assert report.gamma > 1.5
