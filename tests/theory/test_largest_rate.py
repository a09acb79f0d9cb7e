"""The largest rate of nonconvex local SGD: its bound with draws and noise, and larger rates that break it."""

import math

import numpy as np
import pytest

from bench.papers.theory.local_sgd import largest_rate
from fedcore import algorithms, sampling
from fedcore.errors import FedcoreError
from tests.theory.quadratics import Clients, server_of


def run(clients, eta, E, K, rounds, sigma=0.0):
    """The mean of |grad f|^2 over all steps, at the mean of all clients' models, and the decrease of f.

    All clients train from the server's model; the server gets the updates of K clients drawn with replacement.
    """
    server = server_of(algorithms.LocalDescent(), clients, eta)
    rng, squares, first = np.random.default_rng(0), [], clients.value(server.x)
    for t in range(rounds):
        sent = server.broadcast(range(clients.N))
        models = np.tile(sent.x.astype(np.float64), (clients.N, 1))
        for _ in range(E):
            mean = models.mean(axis=0)
            squares.append(np.sum(np.mean([clients.gradient(i, mean) for i in range(clients.N)], axis=0) ** 2))
            gradients = np.array([clients.gradient(i, x) for i, x in enumerate(models)])
            models -= eta * (gradients + sigma * rng.normal(size=models.shape))
        ids, counts = np.unique(sampling.with_replacement([1.0] * clients.N, K, seed=0, round=t), return_counts=True)
        with server.open_round() as round:
            for i, count in zip(ids.tolist(), counts, strict=True):
                round.add(i, models[i].astype(np.float32), steps=E, count=int(count))
    return float(np.mean(squares)), first - clients.value(server.x)


def bound(clients, eta, E, K, rounds, fell, sigma=0.0):
    noise = clients.n * sigma**2
    return 2 * fell / (eta * rounds * E) + eta * noise * (2 / K + 1 / clients.N) + eta**2 * noise * (E - 1)


class Torn:
    """f = -x + y^2 / 2, and two clients with opposite gradients in y: lambda = 1 + S^2, and L = 1."""

    N, n, S = 2, 2, 10.0

    def gradient(self, i, z):
        return np.array([-1.0, z[1] + (self.S if i else -self.S)])

    def value(self, z):
        return float(-z[0] + z[1] ** 2 / 2)


@pytest.mark.parametrize(("E", "K", "larger"), [(10, 1, 8), (10, 8, 8), (1, 1, 8)])
def test_the_draws_break_the_bound_at_a_larger_rate(E, K, larger):
    """Without noise only the draws' part of the condition bounds the clients' differences."""
    eta = largest_rate(1.0, E, 1 + Torn.S**2, K)
    for rate, holds in ((eta, True), (larger * eta, False)):
        met, fell = run(Torn(), rate, E, K, 800)
        assert (met < 0.8 * bound(Torn(), rate, E, K, 800, fell)) == holds


@pytest.mark.parametrize(("E", "K"), [(1, 1), (2, 12), (8, 2)])
def test_the_bound_holds_with_noise(E, K):
    """The clients share a minimiser, so the worst coordinate of their curvatures bounds their diversity."""
    clients, rounds = Clients(6, 40, seed=3, shared=True), 60
    scale = float(clients.a.max())  # This sets L = 1.
    clients.a = clients.a / scale
    diversity = float((np.mean(clients.a**2, axis=0) / np.mean(clients.a, axis=0) ** 2).max())
    eta = largest_rate(1.0, E, diversity, K)
    met, fell = run(clients, eta, E, K, rounds, sigma=1.0)
    assert 0.1 < met / bound(clients, eta, E, K, rounds, fell, sigma=1.0) < 1


def test_the_largest_rate_solves_the_condition():
    for L, E, diversity, K in ((0.3, 1, 1.0, 1), (2.0, 5, 3.0, 4), (1e3, 100, 40.0, 7)):
        step = largest_rate(L, E, diversity, K) * L
        assert step * (1 + 2 * diversity * E / K) + diversity * step**2 * E * (E - 1) == pytest.approx(1)


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
