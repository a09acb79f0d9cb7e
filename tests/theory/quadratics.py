"""Least-squares clients in float64, and rounds over the public interface."""

import numpy as np

import fedcore
from fedcore import Update
from tests.kit import flat


class Clients:
    """f_i(y) = (1/2) sum_j a_ij (y_j - o_ij)^2 with different minimisers o_i, or with one shared minimiser."""

    def __init__(self, N, n, seed, *, shared=False):
        rng = np.random.default_rng(seed)
        self.N, self.n = N, n
        self.a = rng.uniform(0.5, 2, size=(N, n))
        self.o = np.broadcast_to(rng.normal(size=n), (N, n)) if shared else rng.normal(size=(N, n))

    def gradient(self, i, y):
        return self.a[i] * (y - self.o[i])

    def optimum(self, p=None):
        """The minimiser of sum_i p_i f_i."""
        p = np.full(self.N, 1 / self.N) if p is None else p
        return (p @ (self.a * self.o)) / (p @ self.a)

    def largest_diversity(self):
        """The largest gradient diversity at any x if the clients share a minimiser: that of the worst coordinate."""
        return float((np.mean(self.a**2, axis=0) / np.mean(self.a, axis=0) ** 2).max())

    def value(self, x):
        """The mean of the f_i."""
        return float(np.mean(np.sum(self.a * (x - self.o) ** 2, axis=1)) / 2)

    def mean_gradient(self, x):
        return np.mean(self.a * (x - self.o), axis=0)

    def train(self, broadcast, ids, steps, noise=None):
        """The local steps of clients by their broadcast: float32[S, n], the models and the mean raw gradients.

        Args:
            steps: one number of steps for all, or one for each client.
            noise: returns a factor and an addend of each minibatch's gradient, for a shape [S, K, n].
        """
        steps = np.broadcast_to(steps, len(ids))[:, None]
        x = np.array([broadcast.start(i) for i in ids], np.float64)
        shape = len(ids), int(steps.max()), self.n
        part, added = (np.broadcast_to(value, shape) for value in ((1, 0) if noise is None else noise(shape)))
        offset = np.array([broadcast.offset(i) for i in ids]) if broadcast.has_offset else 0
        before = self.gradient(ids, broadcast.x_prev.astype(np.float64)) if broadcast.b else 0
        y, raw = x.copy(), 0
        for k in range(shape[1]):
            gradient = part[:, k] * self.gradient(ids, y) + added[:, k]
            direction = broadcast.a * gradient + broadcast.mu * (y - x) + offset
            if broadcast.b:
                direction += broadcast.b * (part[:, k] * before + added[:, k])  # The same minibatch at both points.
            works = k < steps
            raw = raw + works * gradient / steps
            y -= (broadcast.lr_of_step(k) if broadcast.lr_of_step else broadcast.lr) * works * direction
        return y.astype(np.float32), raw.astype(np.float32)

    def work(self, broadcast, i, steps):
        """A client's model after its local steps."""
        return self.train(broadcast, [i], steps)[0][0]

    def updates(self, broadcast, steps, noise=None, counts=None):
        """The updates of a broadcast's clients, with the second vector if the method needs it."""
        ids = list(broadcast.ids)
        if not ids:
            return []
        models, raw = self.train(broadcast, ids, steps, noise)
        controls = raw if broadcast.second else [None] * len(ids)
        steps = np.broadcast_to(steps, len(ids)).tolist()
        counts = [1] * len(ids) if counts is None else counts.tolist()
        sent = zip(ids, models, steps, controls, counts, strict=True)
        return [Update(i, y, k, control=control, count=count) for i, y, k, control, count in sent]


def run(server, clients, rounds, *, cohort, steps, noise=None):
    """Run rounds with the cohorts cohort(t), whose clients do steps(t, i) steps; return the last report."""
    report = None
    for t in range(rounds):
        broadcast = server.broadcast(cohort(t))
        report = server.round(clients.updates(broadcast, [steps(t, i) for i in broadcast.ids], noise))
    return report


def distance(x, y):
    """|x - y| / |y|."""
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


def server_of(algorithm, clients, lr, sizes=None, **options):
    ids = clients.N if sizes is None else dict(enumerate(sizes))
    return fedcore.Server(np.zeros(clients.n, np.float32), algorithm, ids, lr=lr, **flat(**options))
