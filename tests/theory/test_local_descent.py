"""The theorems of Haddadpour and Mahdavi 2019 as measurements."""

import numpy as np
import pytest

import fedcore
from bench.papers.theory.local_sgd import largest_full_gradient_rate
from fedcore import algorithms
from fedcore.algorithms.rates import InverseStep
from tests.theory.local_descent import E, N, Q, descend, diversity, hear, n
from tests.theory.quadratics import Clients, run, server_of


def test_lfgd_obeys_eq_20_if_the_clients_share_a_minimiser():
    clients = Clients(N, n, seed=3, shared=True)
    L, mu = float(clients.a.max()), float(clients.a.mean(axis=0).min())
    rounds, bound = 400, 1.0
    for _ in range(3):  # lambda is the largest Lambda met with the rate that lambda allows
        eta = largest_full_gradient_rate(L, mu, E, bound)
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


def test_control_variates_lower_the_diversity():
    """The paper's remark: SCAFFOLD's directions grad f_i - c_i + c are nearly the same, where gradients cancel.

    Near x* gradients stay as long as they are while their mean goes to 0; the directions' differences go with it.
    """
    clients, found = Clients(N, n, seed=3), {}
    for algorithm in (algorithms.FedAvg("uniform"), algorithms.SCAFFOLD()):
        server = server_of(algorithm, clients, 0.1, diagnostics=True)
        found[algorithm] = [(diversity(clients, server.x), run_round(server, clients)) for _ in range(60)]
    (plain, met), (at, corrected) = (np.transpose(pairs) for pairs in found.values())
    np.testing.assert_allclose(met, plain, rtol=0.02)
    assert min(met[40:]) > 1e3 * met[0]
    assert min(at[40:]) > 1e3 * at[0]  # SCAFFOLD gets there too, with gradients as diverse
    assert corrected[0] == pytest.approx(met[0])  # the c_i are 0
    assert max(corrected[1:]) < 1.1


def run_round(server, clients):
    """The diversity of a round of everybody's, one step each."""
    return run(server, clients, 1, cohort=lambda _: range(N), steps=lambda *_: 1).diversity


def stochastic_error(clients, drawn, steps, replacement):
    """f - f* of LFSGD with noise of variance 1 in every gradient, K clients drawn uniformly."""
    rng, mu = np.random.default_rng(0), float(clients.a.min())
    server = server_of(algorithms.LocalDescent(), clients, lr=InverseStep(mu, 36 / E, E))
    for t in range(steps // E):
        if replacement:
            drawn_ids = fedcore.sampling.with_replacement(Q, drawn, seed=0, round=t)
        else:
            drawn_ids = fedcore.sampling.without_replacement(N, drawn, seed=0, round=t)
        hear(server, clients, drawn_ids, noise=lambda: (1, rng.normal(size=clients.n)))
    return clients.value(server.x)


# Each coordinate is a problem of its own: one run averages many.
SHARED = Clients(N, 3000, seed=4, shared=True)


def test_lfsgds_error_falls_like_one_over_t():
    """eta_t = 4 / (mu (t + a)) (Thm 3.2): the slope of log error over log T is near -1."""
    sizes = [200, 400, 800, 1600]
    errors = [stochastic_error(SHARED, 1, steps, replacement=True) for steps in sizes]
    assert np.polyfit(np.log(sizes), np.log(errors), 1)[0] == pytest.approx(-1, abs=0.15)


@pytest.mark.parametrize("replacement", [True, False])
def test_lfsgds_error_over_the_draws(replacement):
    """1 / K where K clients differ; Algorithm 1 draws with replacement, and a client's noise that comes twice is one.

    The variance of a mean of K draws from N clients is then (1 + (K - 1) / N) / K of one client's.
    """
    drawn = np.array([1, 2, 4, 6])
    errors = np.array([stochastic_error(SHARED, K, 400, replacement) for K in drawn])
    expected = (1 + (drawn - 1) / N * replacement) / drawn
    np.testing.assert_allclose(errors / errors[0], expected, rtol=0.12)
