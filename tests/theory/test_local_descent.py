"""The theorems of Haddadpour and Mahdavi 2019 as measurements."""

import numpy as np
import pytest

import fedcore
from fedcore import algorithms
from fedcore.rates import InverseStep
from tests.theory.local_descent import E, N, descend, diversity, n
from tests.theory.quadratics import Clients, server_of


def rate_of_eq_19(L, mu, bound):
    """The largest eta with eta (L + 4 kappa L E / (mu (1 - mu eta)^(E - 1))) <= 1 / lambda, by bisection."""
    low, high = 0.0, 1 / L
    for _ in range(100):
        eta = (low + high) / 2
        fits = eta * (L + 4 * (L / mu) * L * E / (mu * (1 - mu * eta) ** (E - 1))) <= 1 / bound
        low, high = (eta, high) if fits else (low, eta)
    return low


def test_lfgd_obeys_eq_20_where_the_clients_share_a_minimiser():
    clients = Clients(N, n, seed=3, shared=True)
    L, mu = clients.a.max(), clients.a.mean(axis=0).min()
    rounds, bound = 400, 1.0
    for _ in range(3):  # lambda is the largest Lambda met with the rate that lambda allows
        eta = rate_of_eq_19(L, mu, bound)
        runs = [descend(clients, eta, rounds, seed) for seed in range(4)]
        bound = max(bound, *(float(met.max()) for _, met in runs))
    mean = np.mean([values for values, _ in runs], axis=0)
    T = E * np.arange(rounds + 1)
    assert (mean <= np.exp(-mu * eta * T) * mean[0] * (1 + 1e-5)).all()
    assert mean[-1] < 0.9 * mean[0]  # it went somewhere
    assert bound < 3


def test_with_different_minimisers_it_stalls_and_lambda_diverges():
    clients = Clients(N, n, seed=3)
    best = clients.value(clients.optimum())
    server = server_of(algorithms.LocalDescent(full_gradient=True), clients, 0.05)
    met = []
    for _ in range(400):
        broadcast = server.broadcast(range(N))
        with server.open_round() as round:
            for i in broadcast.ids:
                round.add(i, clients.work(broadcast, i, E)[0], steps=E)
        met.append(diversity(clients, server.x))
    assert max(met) > 100 * met[0]
    assert clients.value(server.x) - best > 1e-6 * best  # where more rounds lead no further
    values, _ = descend(clients, 0.05, 400, seed=0)
    assert values[-100:].mean() - best > 1e-3 * best  # nor do draws of some of the clients


def stochastic_error(clients, drawn, steps):
    """f - f* of LFSGD with noise of variance 1 in every gradient, K clients drawn uniformly without replacement."""
    rng, mu = np.random.default_rng(0), float(clients.a.min())
    server = server_of(algorithms.LocalDescent(), clients, lr=InverseStep(mu, 36 / E, E))
    for t in range(steps // E):
        broadcast = server.broadcast(fedcore.sampling.without_replacement(N, drawn, seed=0, round=t))
        with server.open_round() as round:
            for i in broadcast.ids:
                y, _ = clients.work(broadcast, i, E, lambda: rng.normal(size=clients.n))
                round.add(i, y, steps=E)
    return clients.value(server.x)


@pytest.mark.parametrize("of", ["drawn clients", "steps"])
def test_lfsgds_error_falls_like_one_over_k_t(of):
    """eta_t = 4 / (mu (t + a)) (Thm 3.2): the slope of log error over log K, or log T, is near -1."""
    clients = Clients(N, 3000, seed=4, shared=True)  # each coordinate is a problem of its own: one run averages many
    if of == "steps":
        sizes = [200, 400, 800, 1600]
        errors = [stochastic_error(clients, 1, steps) for steps in sizes]
    else:
        sizes = [1, 2, 4, 6]
        errors = [stochastic_error(clients, drawn, 400) for drawn in sizes]
    assert np.polyfit(np.log(sizes), np.log(errors), 1)[0] == pytest.approx(-1, abs=0.15)
