"""The theorems of Haddadpour and Mahdavi 2019 as measurements."""

import math

import numpy as np
import pytest

import fedcore
from bench.papers.theory import local_sgd
from fedcore import algorithms
from fedcore.algorithms.rates import InverseStep
from fedcore.errors import RangeError
from tests.theory.local_descent import E, N, Q, descend, diversity, hear, n
from tests.theory.quadratics import Clients, run, server_of


def test_lfgd_obeys_eq_20_if_the_clients_share_a_minimiser():
    clients = Clients(N, n, seed=3, shared=True)
    L, mu = float(clients.a.max()), float(clients.a.mean(axis=0).min())
    rounds = 150
    for bound in (1.0, 1.2):  # lambda is an upper bound of the largest Lambda met with the rate that lambda allows
        eta = local_sgd.largest_full_gradient_rate(L, mu, E, bound)
        runs = [descend(clients, eta, rounds, seed) for seed in range(4)]
        highest = max(float(met.max()) for _, met in runs)
    assert 1 < highest < bound
    mean = np.mean([values for values, _ in runs], axis=0)
    T = E * np.arange(rounds + 1)
    assert (mean <= np.exp(-mu * eta * T) * mean[0] * (1 + 1e-5)).all()
    assert mean[-1] < 0.9 * mean[0]  # it went somewhere


def test_with_different_minimisers_it_stalls_and_lambda_diverges():
    clients = Clients(N, n, seed=3)
    best = clients.value(clients.optimum())
    server = server_of(algorithms.LocalDescent(full_gradient=True), clients, 0.05)
    met = []
    for _ in range(400):
        broadcast = server.broadcast(range(N))
        server.round(clients.updates(broadcast, E))
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
        hear(server, clients, drawn_ids, noise=lambda shape: (1, rng.normal(size=shape)))
    return clients.value(server.x)


@pytest.mark.parametrize(("alpha", "kappa", "lam", "K"), [(10.0, 4.0, 1.0, 4), (20.0, 1.0, 1.0, 1)])
def test_the_conditions_of_theorem_4_2_hold_up_to_their_edges(alpha, kappa, lam, K):
    given = dict(alpha=alpha, kappa=kappa, diversity=lam, K=K)
    E = local_sgd.least_steps(alpha, kappa, lam, K)
    L, mu, a = kappa, 1.0, alpha * E + 4
    right = (64 * L**2 * (K + 1) / (mu * K)) * (E - 1) * E * (a + 1) ** (E - 2)
    C1 = right / (4 * (a - 3) ** (E - 1) * L) - K
    assert 0 < C1 < 2 * E
    assert local_sgd.meets_theorem_4_2(E, **given, C1=C1 * (1 - 1e-9))
    assert not local_sgd.meets_theorem_4_2(E, **given, C1=1.01 * C1)
    assert not local_sgd.meets_theorem_4_2(E - 1, **given)
    if kappa == 4:  # with more steps the last condition bounds C1
        assert [local_sgd.meets_theorem_4_2(50, **given, C1=C1) for C1 in (100, 101)] == [True, False]


@pytest.mark.parametrize("alpha", [0.01, 3.0, 20.0, 21.48])
@pytest.mark.parametrize("lam", [1.0, 1.5])
def test_the_least_number_of_steps_is_eq_21(alpha, lam):
    E, K, kappa = local_sgd.least_steps(alpha, 1.0, lam, 1), 1, 1.0
    d = lam * ((K + 1) / K) * 192 * kappa**2 * math.exp(4 / alpha) - alpha**2
    assert E - 1 < 1 + (alpha**2 + 6 * alpha) / d + math.sqrt(5 / d) <= E


def test_alpha_has_a_limit():
    alpha = local_sgd.largest_alpha(1.0, 1.0, 1)
    with pytest.raises(RangeError, match=r"^alpha.*21\.5"):
        local_sgd.least_steps(1.001 * alpha, 1.0, 1.0, 1)
    assert not local_sgd.meets_theorem_4_2(10**6, alpha=1.001 * alpha, kappa=1.0, diversity=1.0, K=1)
    for wrong in ({"alpha": 0.0}, {"kappa": 0.9}, {"diversity": 0.5}, {"K": 0}, {"C1": -1.0}, {"E": 0}):
        with pytest.raises(RangeError, match=f"^{next(iter(wrong))}"):
            local_sgd.meets_theorem_4_2(**dict(E=4, alpha=3.0, kappa=2.0, diversity=1.0, K=1) | wrong)


@pytest.mark.parametrize("falls", [True, False])
def test_lfsgd_obeys_eq_22(falls):
    """E f(x_T) - f* of LFSGD with noise and ``InverseStep``; with the first rate in all steps it exceeds the bound."""
    clients, alpha, K, rng = Clients(N, 200, seed=4, shared=True), 10.0, 2, np.random.default_rng(0)
    L, mu = float(clients.a.max()), float(clients.a.mean(axis=0).min())
    assert local_sgd.meets_theorem_4_2(E, alpha=alpha, kappa=L / mu, diversity=clients.largest_diversity(), K=K)
    rate = InverseStep(mu, alpha, E)
    server, ratios = server_of(algorithms.LocalDescent(), clients, rate if falls else rate(0)), []
    gap = clients.value(server.x)
    for t in range(1, 401):
        draws = fedcore.sampling.with_replacement(Q, K, seed=0, round=t)
        hear(server, clients, draws, noise=lambda shape: (1, rng.normal(size=shape)))
        bound = local_sgd.error_bound(t * E, alpha=alpha, E=E, L=L, mu=mu, K=K, gap=gap, variance=clients.n)
        ratios.append(clients.value(server.x) / bound)
    assert ratios[-1] > 0.05
    assert (max(ratios) < 1) == falls


def test_eq_22_by_its_three_terms():
    T, E, alpha, L, mu, K, gap, variance = 30, 3, 2.0, 4.0, 0.5, 2, 7.0, 1.5
    a, kappa = 10, 8
    expected = a**3 * gap / (T + a) ** 3 + 4 * kappa * variance * T * (T + 2 * a) / (mu * K * (T + a) ** 3)
    expected += 256 * kappa**2 * variance * T * (E - 1) / (mu * K * (T + a) ** 3)
    numbers = dict(alpha=alpha, E=E, L=L, mu=mu, K=K, gap=gap, variance=variance)
    assert local_sgd.error_bound(T, **numbers) == pytest.approx(expected)
    assert local_sgd.error_bound(0, **numbers) == gap


# Each coordinate is a problem of its own: one run averages many.
SHARED = Clients(N, 1500, seed=4, shared=True)


def test_lfsgds_error_falls_like_one_over_t():
    """eta_t = 4 / (mu (t + a)) (Thm 3.2): the slope of log error over log T is near -1."""
    sizes = [100, 200, 400, 800]
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
