"""The largest rate of nonconvex local SGD: its bound with draws and noise, and what is beyond it."""

import numpy as np
import pytest

import fedcore
from fedcore import algorithms
from fedcore.errors import FedcoreError
from fedcore.theory.local_sgd import largest_rate
from tests.theory.quadratics import Clients, server_of
from tests.theory.test_bounds import gap, gradient_square

N, n, DRAWN = 6, 40, 2


def mean_square(clients, lr, E, rounds, sigma):
    """The mean of |grad f|^2 over the rounds' beginnings, and f's gap at x_0; clients drawn with replacement."""
    rng, met = np.random.default_rng(0), []
    server = server_of(algorithms.LocalDescent(), clients, lr)
    first = gap(clients, server.x)
    for t in range(rounds):
        met.append(gradient_square(clients, server.x))
        drawn = fedcore.sampling.with_replacement([1.0] * clients.N, DRAWN, seed=0, round=t)
        ids, counts = np.unique(drawn, return_counts=True)
        sent = server.broadcast(ids)
        with server.open_round() as round:
            for i, count in zip(sent.ids, counts, strict=True):
                y, _ = clients.work(sent, i, E, lambda: (1, sigma * rng.normal(size=clients.n)))
                round.add(i, y, steps=E, count=int(count))
    return float(np.mean(met)), first


@pytest.mark.parametrize("E", [1, 2, 8])
@pytest.mark.parametrize("sigma", [0.0, 1.0])
def test_the_bound_holds_at_it(E, sigma):
    """Clients share a minimiser: their diversity is that of their curvatures, at most in the worst coordinate."""
    clients, rounds = Clients(N, n, seed=3, shared=True), 60
    diversity = float((np.mean(clients.a**2, axis=0) / np.mean(clients.a, axis=0) ** 2).max())
    L = float(clients.a.max())
    eta = largest_rate(L, E, diversity)
    mean, first = mean_square(clients, eta, E, rounds, sigma)
    noise = n * sigma**2 * (2 * eta * L / DRAWN + (eta * L) ** 2 * (E - 1))
    assert 0.03 * (bound := 2 * first / (eta * rounds * E) + noise) < mean < bound


def test_what_lies_far_beyond_it_diverges():
    clients = Clients(N, n, seed=3, shared=True)
    clients.a[:] = 1.0
    mean, first = mean_square(clients, largest_rate(1.0, 1, 1.0), 1, 20, 0.0)
    assert mean == pytest.approx(2 * first / 20)  # one step, and there
    assert mean_square(clients, 3 * largest_rate(1.0, 1, 1.0), 1, 20, 0.0)[0] > 1e6 * first


def test_it_is_where_the_condition_becomes_false():
    for L, E, diversity in ((0.3, 1, 1.0), (2.0, 5, 3.0), (1e3, 100, 40.0)):
        eta = largest_rate(L, E, diversity)
        assert diversity * (eta * L + (eta * L) ** 2 * E * (E - 1)) == pytest.approx(1)
        assert largest_rate(7 * L, E, diversity) == pytest.approx(eta / 7)


@pytest.mark.parametrize("wrong", [dict(L=0.0), dict(E=0), dict(diversity=0.9), dict(E=2**60)])
def test_wrong_numbers_are_refused(wrong):
    with pytest.raises(FedcoreError, match=next(iter(wrong))):
        largest_rate(**dict(L=1.0, E=1, diversity=1.0) | wrong)
