"""Every method, through Server.broadcast and add alone, equals a float64 transcription of its paper."""

import numpy as np
import pytest

import fedcore
from fedcore import algorithms

N, n, ROUNDS, K = 12, 257, 100, 5
BETA = 0.3


class Clients:
    """Least squares with minimisers of their own, full gradients in float64."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.a = rng.uniform(0.5, 2, size=(N, n))
        self.optimum = rng.normal(size=(N, n))
        self.examples = rng.integers(1, 50, size=N).tolist()

    def gradient(self, i, y):
        return self.a[i] * (y - self.optimum[i])

    def train(self, i, x, lr, steps, direction=None):
        """y after the steps, and the mean of the gradients at the y's; plain steps unless there is a direction."""
        y, raw = x.astype(np.float64), 0
        for _ in range(steps):
            gradient = self.gradient(i, y)
            raw = raw + gradient / steps
            y = y - lr * (gradient if direction is None else direction(y, gradient))
        return y, raw


# The papers' pseudo-code: each yields x after every round. active: the cohorts; K: the steps [t][i]; lr: eta(t). The
# server's step is the cohort's mean of eta K_i unless the method averages models.


def fedavg(clients, x, lr, active, steps, weigh=lambda n_k: n_k, mu=0.0):
    for t, S in enumerate(active):
        if len(S):
            start = x
            ys = [clients.train(i, x, lr(t), steps[t][i], lambda y, g, start=start: g + mu * (y - start))[0] for i in S]
            w = [weigh(clients.examples[i]) for i in S]
            x = x + sum(w_i / sum(w) * (y - x) for w_i, y in zip(w, ys, strict=True))
        yield x


def mifa(clients, x, lr, active, steps, wait):
    rows, heard, gamma = np.zeros((N, n)), set(), 0.0
    for t, S in enumerate(active):
        for i in S:
            rows[i] = (x - clients.train(i, x, lr(t), steps[t][i])[0]) / (lr(t) * steps[t][i])
            heard.add(i)
        if len(S):
            gamma = np.mean([lr(t) * steps[t][i] for i in S])
        if not wait or len(heard) == N:
            x = x - gamma * rows.sum(axis=0) / N
        yield x


def mimic(clients, x, lr, active, steps, update_units=False):
    c = np.zeros((N, n))
    for t, S in enumerate(active):
        if len(S):
            unit = {i: 1 if update_units else lr(t) * steps[t][i] for i in S}
            h = {i: (x - clients.train(i, x, lr(t), steps[t][i])[0]) / unit[i] for i in S}
            v = sum(h[i] + c[i] for i in S) / len(S)
            for i in S:
                c[i] = v - h[i]
            x = x - np.mean(list(unit.values())) * v
        yield x


def momentum(clients, x, lr, active, steps, beta, controls=False, vr=False):
    """Algorithms 1-4 of Cheng et al.; beta = 1 is FedAvg with a mean of gradients, and with controls SCAFFOLD."""
    c_i, c, g, x_prev = np.zeros((N, n)), np.zeros(n), np.zeros(n), x
    for t, S in enumerate(active):
        if len(S):
            h, c_new = [], c_i.copy()
            for i in S:
                correction = c - c_i[i] if controls else 0

                def direction(y, gradient, i=i, correction=correction, g=g, x_prev=x_prev):
                    if vr:
                        return gradient + beta * correction + (1 - beta) * (g - clients.gradient(i, x_prev))
                    return beta * (gradient + correction) + (1 - beta) * g

                y, raw = clients.train(i, x, lr(t), steps[t][i], direction)
                h.append((x - y) / (lr(t) * steps[t][i]))
                c_new[i] = raw
            c = c + (c_new - c_i)[S].sum(axis=0) / N
            c_i = c_new
            g = sum(h) / len(S)
            x_prev, x = x, x - np.mean([lr(t) * steps[t][i] for i in S]) * g
        yield x


def mb_storm(clients, x, lr, active, steps, beta):
    """Patel et al. 2022: one gradient of each client at both points, a step of the server's alone."""
    v, x_prev = np.zeros(n), x
    for t, S in enumerate(active):
        if len(S):
            now, before = (np.mean([clients.gradient(i, at) for i in S], axis=0) for at in (x, x_prev))
            v = now + (1 - beta) * (v - before)
            x_prev, x = x, x - lr(t) * v
        yield x


def flexible(clients, x, lr, active, steps, scheme):
    p = np.array(clients.examples) / sum(clients.examples)
    for t, S in enumerate(active):
        complete = [i for i in S if steps[t][i] == K]
        change = 0
        for i in complete if scheme == "A" else S:
            weight = {"A": N * p[i] / max(len(complete), 1), "B": p[i], "C": K / steps[t][i] * p[i]}[scheme]
            change = change + weight * (clients.train(i, x, lr(t), steps[t][i])[0] - x)
        x = x + change
        yield x


METHODS = {
    "FedAvg": (algorithms.FedAvg(), fedavg, {}),
    "FedAvg, uniform": (algorithms.FedAvg("uniform"), fedavg, dict(weigh=lambda n_k: 1)),
    "FedProx": (algorithms.FedProx(mu=0.5), fedavg, dict(mu=0.5)),
    "MIFA": (algorithms.MIFA(), mifa, dict(wait=True)),
    "MIFA at once": (algorithms.MIFA(wait=False), mifa, dict(wait=False)),
    "MimiC": (algorithms.MimiC(), mimic, {}),
    "MimiC, update units": (algorithms.MimiC(units="update"), mimic, dict(update_units=True)),
    "SCAFFOLD": (algorithms.SCAFFOLD(), momentum, dict(beta=1, controls=True)),
    "SCAFFOLD, two vectors": (algorithms.SCAFFOLD(control="sent"), momentum, dict(beta=1, controls=True)),
    "FedAvgM": (algorithms.FedAvgM(BETA), momentum, dict(beta=BETA)),
    "SCAFFOLDM": (algorithms.SCAFFOLDM(BETA), momentum, dict(beta=BETA, controls=True)),
    "SCAFFOLDM, two vectors": (
        algorithms.SCAFFOLDM(BETA, control="sent"),
        momentum,
        dict(beta=BETA, controls=True),
    ),
    "FedAvgMVR": (algorithms.FedAvgMVR(BETA), momentum, dict(beta=BETA, vr=True)),
    "SCAFFOLDMVR": (algorithms.SCAFFOLDMVR(BETA), momentum, dict(beta=BETA, controls=True, vr=True)),
    "MBSTORM": (algorithms.MBSTORM(BETA), mb_storm, dict(beta=BETA)),
    "Flexible A": (algorithms.FlexibleFedAvg("A", K), flexible, dict(scheme="A")),
    "Flexible B": (algorithms.FlexibleFedAvg("B", K), flexible, dict(scheme="B")),
    "Flexible C": (algorithms.FlexibleFedAvg("C", K), flexible, dict(scheme="C")),
    "LocalDescent": (algorithms.LocalDescent(), fedavg, dict(weigh=lambda n_k: 1)),
}


def work(clients, broadcast, i, steps):
    """What a client of any method does with its broadcast: y and, where the method asks, the second vector."""
    offset = broadcast.offset(i)

    def direction(y, gradient):
        d = broadcast.a * gradient + broadcast.mu * (y - broadcast.x)
        if broadcast.b:
            d = d + broadcast.b * clients.gradient(i, broadcast.x_prev.astype(np.float64))
        return d if offset is None else d + offset

    y, raw = clients.train(i, broadcast.x, broadcast.lr, steps, direction)
    return y.astype(np.float32), raw.astype(np.float32) if broadcast.second else None


def arbitrary_work(seed):
    """Arbitrary sets, an empty and a full one among them, and arbitrary numbers of steps."""
    rng = np.random.default_rng(seed)
    active = [np.flatnonzero(rng.random(N) < rng.random()) for _ in range(ROUNDS)]
    active[3], active[9] = np.arange(0), np.arange(N)
    return active, rng.integers(1, K + 1, size=(ROUNDS, N)).tolist(), rng.normal(size=n).astype(np.float32)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("method", METHODS)
def test_server_follows_the_paper(method, seed):
    algorithm, paper, options = METHODS[method]
    clients, (active, steps, x0) = Clients(seed), arbitrary_work(seed)
    lr = algorithms.rates.Exponential(0.1, 0.98)
    server = fedcore.Server(algorithm, x0, clients=N, lr=lr, examples=clients.examples)
    worst = 0.0
    for t, x in enumerate(paper(clients, x0.astype(np.float64), lr, active, steps, **options)):
        broadcast = server.broadcast(active[t])
        assert broadcast.round == t
        with server.open_round() as round:
            for i in broadcast.ids:
                done = 1 if broadcast.local_rule == "one minibatch" else steps[t][i]
                y, control = work(clients, broadcast, i, done)
                round.add(i, y, steps=done, examples=clients.examples[i], control=control)
        worst = max(worst, np.linalg.norm(server.x - x) / np.linalg.norm(x))
    assert worst < 2e-6
    assert np.linalg.norm(server.x - x0) > 0.1 * np.linalg.norm(x0)  # it went somewhere


def test_all_methods_are_transcribed():
    assert {type(algorithm).__name__ for algorithm, *_ in METHODS.values()} == set(algorithms.REGISTRY)


def test_mimics_corrections_sum_to_zero_over_5000_rounds():
    rng = np.random.default_rng(0)
    server = fedcore.Server("MimiC", rng.normal(size=n).astype(np.float32), clients=N, lr=0.1)
    clients = Clients(0)
    for t in range(5000):
        cohort = np.flatnonzero(rng.random(N) < 0.3).tolist()
        with server.open_round() as round:
            for i in cohort:
                round.add(i, clients.train(i, server.x, 0.1, 1)[0].astype(np.float32), steps=1)
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
        server.round([fedcore.Update(i, clients.train(i, server.x, 0.1, 1)[0].astype("f"), steps=1) for i in cohort])
    optimum = (clients.a * clients.optimum).sum(axis=0) / clients.a.sum(axis=0)
    assert np.linalg.norm(server.x - optimum) < 1e-5 * np.linalg.norm(optimum)
