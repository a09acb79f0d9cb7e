"""Least-squares clients in float64, and rounds over the public interface."""

import numpy as np

import fedcore
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

    def value(self, x):
        """The mean of the f_i."""
        return float(np.mean(np.sum(self.a * (x - self.o) ** 2, axis=1)) / 2)

    def work(self, broadcast, i, steps, noise=None):
        """A client's local steps by its broadcast: y, and the mean raw gradient.

        Args:
            noise: returns a factor and an addend of each minibatch's gradient.
        """
        x, offset = broadcast.x.astype(np.float64), broadcast.offset(i)
        y, raw = x, 0
        for k in range(steps):
            part, xi = (1, 0) if noise is None else noise()  # The same minibatch at both points.
            gradient = part * self.gradient(i, y) + xi
            direction = broadcast.a * gradient + broadcast.mu * (y - x)
            if broadcast.b:
                direction = direction + broadcast.b * (
                    part * self.gradient(i, broadcast.x_prev.astype(np.float64)) + xi
                )
            if offset is not None:
                direction = direction + offset
            raw = raw + gradient / steps
            y = y - (broadcast.lr_of_step(k) if broadcast.lr_of_step else broadcast.lr) * direction
        return y.astype(np.float32), np.asarray(raw, np.float32) if broadcast.second else None


def run(server, clients, rounds, *, cohort, steps, noise=None):
    """Run rounds with the cohorts cohort(t), whose clients do steps(t, i) steps; return the last report."""
    report = None
    for t in range(rounds):
        broadcast = server.broadcast(cohort(t))
        with server.open_round() as round:
            for i in broadcast.ids:
                k = steps(t, i)
                y, control = clients.work(broadcast, i, k, noise)
                round.add(i, y, steps=k, control=control)
        report = round.report
    return report


def distance(x, y):
    """|x - y| / |y|."""
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


def server_of(algorithm, clients, lr, sizes=None, **options):
    ids = clients.N if sizes is None else dict(enumerate(sizes))
    return fedcore.Server(np.zeros(clients.n, np.float32), algorithm, ids, lr=lr, **flat(**options))
