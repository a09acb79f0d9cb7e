"""The largest rates of nonconvex local SGD: their conditions, and bounds with draws and noise."""

import math

import numpy as np
import pytest

from bench.papers.theory.local_sgd import largest_network_rate, largest_rate, paper_rate
from fedcore import Update, algorithms, sampling
from fedcore.errors import FedcoreError
from tests.theory.quadratics import Clients, server_of


def run(clients, eta, E, K, rounds, sigma=0.0):
    """The mean of |grad f|^2 over all steps, at the mean of all clients' models, and the decrease of f.

    All clients train from the server's model; the server gets the updates of K clients drawn with replacement.
    """
    server = server_of(algorithms.LocalDescent(), clients, eta)
    rng, squares, first, everyone = np.random.default_rng(0), 0.0, clients.value(server.x), np.arange(clients.N)
    for t in range(rounds):
        models = np.tile(server.x.astype(np.float64), (clients.N, 1))
        noise = sigma * rng.normal(size=(E, *models.shape)) if sigma else np.zeros(E)
        for k in range(E):
            squares += np.sum(clients.mean_gradient(models.mean(axis=0)) ** 2)
            models -= eta * (clients.gradient(everyone, models) + noise[k])
        ids, counts = np.unique(sampling.with_replacement([1.0] * clients.N, K, seed=0, round=t), return_counts=True)
        sent = zip(ids.tolist(), counts.tolist(), strict=True)
        server.round([Update(i, models[i].astype(np.float32), E, count=count) for i, count in sent])
    return float(squares / (rounds * E)), first - clients.value(server.x)


def bound(clients, eta, E, K, rounds, fell, sigma=0.0):
    noise = clients.n * sigma**2
    return 2 * fell / (eta * rounds * E) + eta * noise * (2 / K + 1 / clients.N) + eta**2 * noise * (E - 1)


class Torn:
    """f = -x + y^2 / 2, and two clients with opposite gradients in y: lambda = 1 + S^2, and L = 1."""

    N, n, S = 2, 2, 10.0

    def gradient(self, i, z):
        return self.mean_gradient(z) + np.outer(2 * i - 1, [0, self.S])

    def mean_gradient(self, z):
        return np.stack([np.full_like(z[..., 0], -1), z[..., 1]], axis=-1)

    def value(self, z):
        return float(-z[0] + z[1] ** 2 / 2)


@pytest.mark.parametrize(("E", "K", "larger"), [(10, 1, 8), (10, 8, 8), (1, 1, 8)])
def test_the_draws_break_the_bound_at_a_larger_rate(E, K, larger):
    """Without noise only the draws' part of the condition bounds the clients' differences."""
    eta = largest_rate(1.0, E, 1 + Torn.S**2, K)
    for rate, holds in ((eta, True), (larger * eta, False)):
        met, fell = run(Torn(), rate, E, K, 400)
        assert (met < 0.9 * bound(Torn(), rate, E, K, 400, fell)) == holds


@pytest.mark.parametrize(("E", "holds"), [(1, True), (10, False)])
def test_the_papers_rate_has_no_part_for_draws_over_several_steps(E, holds):
    """Eq. 25 with K = 1: a client's whole round follows its own gradient, which differs from the mean in each step."""
    eta = paper_rate(1.0, E, 1 + Torn.S**2, 1)
    met, fell = run(Torn(), eta, E, 1, 400)
    ratio = met / bound(Torn(), eta, E, 1, 400, fell)
    assert 0.5 < ratio < 1 if holds else ratio > 1.4


@pytest.mark.parametrize(("E", "K"), [(1, 1), (2, 12), (8, 2)])
def test_the_bound_holds_with_noise(E, K):
    """The clients share a minimiser, so the worst coordinate of their curvatures bounds their diversity."""
    clients, rounds = Clients(6, 40, seed=3, shared=True), 60
    scale = float(clients.a.max())  # This sets L = 1.
    clients.a = clients.a / scale
    eta = largest_rate(1.0, E, clients.largest_diversity(), K)
    met, fell = run(clients, eta, E, K, rounds, sigma=1.0)
    assert 0.1 < met / bound(clients, eta, E, K, rounds, fell, sigma=1.0) < 1


def test_the_largest_rates_meet_their_conditions_and_larger_rates_do_not():
    def eq_23(eta):
        X = 2 * C1 + E * (E + 1)
        return (-eta / (2 * lam) + (K + 1) * L**2 * eta**3 * X / (2 * K) + L * eta**2 / 2 * (C1 / K + 1)) / eta

    def eq_28(eta):
        mixing = 2 * zeta**2 / (1 + zeta) + 2 * zeta / (1 - zeta) + (E - 1) / E
        left = 2 * L**2 * eta**2 * C1 * E / (1 - zeta**2) + L**2 * eta**2 * E**2 / (1 - zeta) * mixing
        return left + eta * L * (C1 / K + 1) - 1 / lam

    def derived(eta):
        return eta * L * (1 + 2 * lam * E / K) + lam * (eta * L) ** 2 * E * (E - 1) - 1

    for L, E, lam, K, C1, zeta in (
        (0.3, 1, 1.0, 1, 0.0, 0.0),
        (2.0, 5, 1.5, 4, 0.3, 0.5),
        (1e3, 100, 40.0, 7, 12.0, 0.99),
    ):
        for eta, condition in (
            (paper_rate(L, E, lam, K, C1), eq_23),
            (largest_network_rate(L, E, lam, K, zeta, C1), eq_28),
            (largest_rate(L, E, lam, K), derived),
        ):
            assert condition(eta) == pytest.approx(0, abs=1e-12)
            assert condition(1.01 * eta) > 1e-5


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (dict(L=0.0), "L"),
        (dict(L=1e-310), "L: "),
        (dict(L=1e308, diversity=1e300), "L: "),
        (dict(E=0), "E"),
        (dict(E=2**60), "E"),
        (dict(diversity=0.9), "diversity"),
        (dict(diversity=math.inf), "diversity"),
        (dict(K=0), "K"),
    ],
)
def test_wrong_numbers_are_rejected(wrong, words):
    with pytest.raises(FedcoreError, match=words):
        largest_rate(**dict(L=1.0, E=1, diversity=1.0, K=1) | wrong)
    with pytest.raises(FedcoreError, match=words):
        paper_rate(**dict(L=1.0, E=1, diversity=1.0, K=1) | wrong)
    wrong = {{"K": "p"}.get(name, name): value for name, value in wrong.items()}
    with pytest.raises(FedcoreError, match=words.replace("K", "p")):
        largest_network_rate(**dict(L=1.0, E=1, diversity=1.0, p=1, zeta=0.5) | wrong)
