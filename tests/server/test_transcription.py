"""MIFA and MimiC through public names equal a float64 transcription of the papers."""

import numpy as np
import pytest

import fedcore

N, n, ROUNDS, K = 12, 257, 50, 5


class Clients:
    """Least squares with minimisers of their own; K full-gradient steps in float64."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.a = rng.uniform(0.5, 2, size=(N, n))
        self.optimum = rng.normal(size=(N, n))

    def train(self, i, x, lr, steps):
        y = x.astype(np.float64)
        for _ in range(steps):
            y = y - lr * self.a[i] * (y - self.optimum[i])
        return y


def mifa(clients, x, rate, active, steps, *, wait):
    rows, heard = np.zeros((N, n)), set()
    gamma = 0.0
    for t, cohort in enumerate(active):
        lr = rate(t)
        for i in cohort:
            rows[i] = (x - clients.train(i, x, lr, steps[t][i])) / (lr * steps[t][i])
            heard.add(i)
        if len(cohort):
            gamma = np.mean([lr * steps[t][i] for i in cohort])
        if not wait or len(heard) == N:
            x = x - gamma * rows.sum(axis=0) / N
        yield x


def mimic(clients, x, rate, active, steps):
    c = np.zeros((N, n))
    for t, cohort in enumerate(active):
        lr = rate(t)
        if len(cohort):
            h = {i: (x - clients.train(i, x, lr, steps[t][i])) / (lr * steps[t][i]) for i in cohort}
            v = sum(h[i] + c[i] for i in cohort) / len(cohort)
            for i in cohort:
                c[i] = v - h[i]
            x = x - np.mean([lr * steps[t][i] for i in cohort]) * v
        yield x


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", ["MIFA", "MIFA at once", "MimiC"])
def test_server_follows_the_paper(method, seed):
    rng = np.random.default_rng(seed)
    clients, x0 = Clients(seed), rng.normal(size=n).astype(np.float32)
    # Arbitrary sets, an empty and a full one among them; arbitrary work.
    active = [np.flatnonzero(rng.random(N) < rng.random()) for _ in range(ROUNDS)]
    active[3], active[9] = np.arange(0), np.arange(N)
    steps = rng.integers(1, K + 1, size=(ROUNDS, N)).tolist()
    rate = fedcore.algorithms.rates.Exponential(0.1, 0.98)
    if method == "MimiC":
        due = mimic(clients, x0.astype(np.float64), rate, active, steps)
        algorithm = fedcore.algorithms.MimiC()
    else:
        due = mifa(clients, x0.astype(np.float64), rate, active, steps, wait=method == "MIFA")
        algorithm = fedcore.algorithms.MIFA(wait=method == "MIFA")
    server = fedcore.Server(algorithm, x0, clients=N, lr=rate)
    worst = 0.0
    for t, x in enumerate(due):
        broadcast = server.broadcast(active[t])
        assert broadcast.round == t
        with server.open_round() as round:
            for i in broadcast.ids:
                y = clients.train(i, broadcast.x, broadcast.lr, steps[t][i]).astype(np.float32)
                round.add(i, y, steps=steps[t][i])
        worst = max(worst, np.linalg.norm(server.x - x) / np.linalg.norm(x))
    assert worst < 2e-6
    assert np.linalg.norm(server.x - x0) > 0.1 * np.linalg.norm(x0)  # it went somewhere


def test_mimics_corrections_sum_to_zero_over_5000_rounds():
    rng = np.random.default_rng(0)
    server = fedcore.Server("MimiC", rng.normal(size=n).astype(np.float32), clients=N, lr=0.1)
    clients = Clients(0)
    for t in range(5000):
        cohort = np.flatnonzero(rng.random(N) < 0.3).tolist()
        with server.open_round() as round:
            for i in cohort:
                round.add(i, clients.train(i, server.x, 0.1, 1).astype(np.float32), steps=1)
        if t % 500 == 499:
            corrections = np.array([server.correction(i) for i in range(N)])
            size = np.abs(corrections).sum(axis=0).max()
            assert size > 1  # there is something to cancel
            assert np.abs(corrections.sum(axis=0)).max() < 1e-6 * size
    # and so the limit is the optimum of all clients, for all that only some are heard
    optimum = (clients.a * clients.optimum).sum(axis=0) / clients.a.sum(axis=0)
    assert np.linalg.norm(server.x - optimum) < 1e-5 * np.linalg.norm(optimum)


def test_rounding_far_from_the_optimum_leaves_mimics_limit_alone():
    """What the centring C / N is for: without it the corrections' sum keeps the rounding of the first, large rounds."""
    rng = np.random.default_rng(1)
    clients = Clients(1)
    server = fedcore.Server("MimiC", np.full(n, 1e4, np.float32), clients=N, lr=0.1)
    for _ in range(6000):
        cohort = np.flatnonzero(rng.random(N) < 0.3).tolist()
        server.round([fedcore.Update(i, clients.train(i, server.x, 0.1, 1).astype("f"), steps=1) for i in cohort])
    optimum = (clients.a * clients.optimum).sum(axis=0) / clients.a.sum(axis=0)
    assert np.linalg.norm(server.x - optimum) < 1e-5 * np.linalg.norm(optimum)
