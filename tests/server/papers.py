"""Float64 transcriptions of the methods' papers, independent of the package, and clients to run both on.

Each yields x after every round. lr: eta(t). The server's step is the cohort's mean of eta K_i unless the method
averages models or gamma(t) is given. A client is in a cohort once for each draw.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedcore import Update
from tests.kit import one_by_one

N, n, ROUNDS, K = 12, 257, 100, 5


class Clients:
    """Least squares with a minimiser for each client, and full gradients in float64."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.a = rng.uniform(0.5, 2, size=(N, n))
        self.optimum = rng.normal(size=(N, n))
        self.examples = rng.integers(1, 50, size=N).tolist()

    def gradient(self, i, y):
        return self.a[i] * (y - self.optimum[i])

    def loss(self, i, x):
        return float(np.sum(self.a[i] * (x - self.optimum[i]) ** 2) / 2)

    def train(self, i, x, lr, steps, direction=None):
        """y after the steps, and the mean of the gradients at the y's; plain steps unless there is a direction."""
        y, raw = x.astype(np.float64), 0
        for _ in range(steps):
            gradient = self.gradient(i, y)
            raw = raw + gradient / steps
            y = y - lr * (gradient if direction is None else direction(y, gradient))
        return y, raw

    def warm(self, x, seed):
        """float64[N, n]: the mean of some minibatch gradients of each client at x, its float32 value."""
        noise = np.random.default_rng([seed, 3]).normal(scale=0.1, size=(N, n))
        gradients = np.array([self.gradient(i, x.astype(np.float64)) for i in range(N)])
        return (gradients + noise).astype(np.float32).astype(np.float64)

    def work(self, broadcast, i, steps):
        """A client's update of its broadcast by any method, as arguments of ``Round.add``."""
        y, raw = self.train(i, broadcast.start(i), broadcast.lr, steps, self.direction(broadcast, i))
        control = raw.astype(np.float32) if broadcast.second else None
        loss = self.loss(i, broadcast.x) if broadcast.needs_loss else None
        return dict(value=y.astype(np.float32), control=control, loss=loss)

    def direction(self, broadcast, i, own=0.0):
        """The direction of a client's steps; ``own`` is its part of the offset if it keeps the row itself."""
        offset = broadcast.offset(i)
        constant = own if offset is None else offset + own

        def direction(y, gradient):
            d = broadcast.a * gradient + broadcast.mu * (y - broadcast.x) + constant
            return d + broadcast.b * self.gradient(i, broadcast.x_prev.astype(np.float64)) if broadcast.b else d

        return direction


@dataclass
class Course:
    """The draws and steps of each round, and the changes of clients.

    Attributes:
        active: the cohort of each round.
        steps: K_i, [t][i].
        start: the clients of the start.
        changes: by round, the changes before it in their order: ("arrive" | "exclude" | "include", client).
    """

    active: Sequence[Sequence[int]]
    steps: Sequence[Sequence[int]]
    start: frozenset[int] = frozenset(range(N))
    changes: Mapping[int, Sequence[tuple[str, int]]] = field(default_factory=dict)

    def rounds(self):
        """t, S_t, the steps, the clients just removed, and the number of registered ones."""
        here = set(self.start)
        for t, S in enumerate(self.active):
            for what, i in self.changes.get(t, ()):
                (here.add if what == "arrive" else here.remove)(i)
            yield t, S, self.steps[t], [i for what, i in self.changes.get(t, ()) if what != "arrive"], len(here)


def arbitrary_course(seed, draws=False):
    """Arbitrary cohorts and work; some cohorts are empty, full, or one client.

    Args:
        draws: whether a client may be drawn several times.
    """
    rng = np.random.default_rng(seed)
    active = [np.flatnonzero(rng.random(N) < rng.random()).tolist() for _ in range(ROUNDS)]
    active[3 if seed else 0], active[9], active[20], active[21] = [], list(range(N)), [4], [7]
    if draws:
        active = [sorted(rng.choice(S, size=2 * len(S)).tolist()) if S else [] for S in active]
    return Course(active, rng.integers(1, K + 1, size=(ROUNDS, N)).tolist())


def start_of(seed):
    """x_0, float32[n]."""
    return np.random.default_rng([seed, 1]).normal(size=n).astype(np.float32)


def follow(server, clients, course, paper, work=None, after=None):
    """Run the server through a course; return the largest relative distance of its x from the paper's.

    Args:
        paper: the paper's x after each round.
        work: computes a client's update of its broadcast. Default: ``Clients.work``.
        after: called with the accepted clients when a round is finished.
    """
    x0, worst = server.x, 0.0
    for t, x in enumerate(paper):
        for what, i in course.changes.get(t, ()):
            if what == "arrive":
                server.add_clients({i: clients.examples[i]} if server.algorithm.needs_shares else i)
            else:
                server.remove_client(i, from_objective=what == "exclude")
        counts = Counter(course.active[t])
        broadcast = server.broadcast(sorted(counts))
        assert broadcast.round == t
        updates = []
        for i in broadcast.ids:
            done = broadcast.local_rule.most_steps or course.steps[t][i]
            answer = (work or clients.work)(broadcast, i, done)
            updates.append(Update(i, **answer, steps=done, examples=clients.examples[i], count=counts[i]))
        report = server.round(updates) if t % 2 else one_by_one(server, updates)
        assert sorted(report.accepted) == sorted(counts)
        if after:
            after(broadcast.ids)
        worst = max(worst, float(np.linalg.norm(server.x - x) / np.linalg.norm(x)))
    assert np.linalg.norm(server.x - x0) > 0.1 * np.linalg.norm(x0)  # it went somewhere
    return worst


def fedavg(clients, x, lr, course, weigh=lambda n_k: n_k, mu=0.0, alpha=1.0):
    for t, S, steps, *_ in course.rounds():
        if S:
            start = x
            ys = [clients.train(i, x, lr(t), steps[i], lambda y, g, start=start: g + mu * (y - start))[0] for i in S]
            w = [weigh(clients.examples[i]) for i in S]
            x = x + alpha * sum(w_i / sum(w) * (y - x) for w_i, y in zip(w, ys, strict=True))
        yield x


def mifa(clients, x, lr, course, wait, warm=None):
    rows, K = dict(warm or {}), 0.0
    for t, S, steps, forgotten, registered in course.rounds():
        for i in forgotten:
            rows.pop(i, None)
        for i in S:
            rows[i] = (x - clients.train(i, x, lr(t), steps[i])[0]) / (lr(t) * steps[i])
        if S:
            K = np.mean([steps[i] for i in S])
        if rows and (not wait or len(rows) == registered):
            x = x - lr(t) * K * sum(rows.values()) / registered
        yield x


def mimic(clients, x, lr, course, update_units=False, centred=True):
    """``centred``: v less C / N, which is zero unless a client was removed or drawn twice."""
    c = np.zeros((N, n))
    for t, S, steps, forgotten, registered in course.rounds():
        c[forgotten] = 0
        if S:
            unit = {i: 1 if update_units else lr(t) * steps[i] for i in S}
            h = {i: (x - clients.train(i, x, lr(t), steps[i])[0]) / unit[i] for i in S}
            v = sum(h[i] + c[i] for i in S) / len(S)
            if centred:
                v = v - c.sum(axis=0) / registered
            for i in h:
                c[i] = v - h[i]
            x = x - np.mean([unit[i] for i in S]) * v
        yield x


def momentum(clients, x, lr, course, beta, controls=False, vr=False, gamma=None, warm=None):
    """Algorithms 1-4 of Cheng et al.; beta = 1 is FedAvg with a mean of gradients, and with controls SCAFFOLD.

    c is the mean of the c_i of all registered clients, as its increments (1/N) sum (c_i+ - c_i) keep it.

    Args:
        warm: c_i^0 by client; c^0 is the mean of all, and g^0 = c^0 with ``vr``.
    """
    c_i, g, x_prev = np.zeros((N, n)), np.zeros(n), x
    for i, gradient in (warm or {}).items():
        c_i[i] = gradient
    if vr and warm:
        g = c_i.sum(axis=0) / (len(course.start) if controls else len(warm))
    for t, S, steps, forgotten, registered in course.rounds():
        c_i[forgotten] = 0
        if S:
            h, c, c_new = [], c_i.sum(axis=0) / registered, c_i.copy()
            for i in S:
                correction = c - c_i[i] if controls else 0

                def direction(y, gradient, i=i, correction=correction, g=g, x_prev=x_prev):
                    if vr:
                        return gradient + beta * correction + (1 - beta) * (g - clients.gradient(i, x_prev))
                    return beta * (gradient + correction) + (1 - beta) * g

                y, c_new[i] = clients.train(i, x, lr(t), steps[i], direction)
                h.append((x - y) / (lr(t) * steps[i]))
            c_i, g = c_new, sum(h) / len(S)
            step = np.mean([lr(t) * steps[i] for i in S]) if gamma is None else gamma(t)
            x_prev, x = x, x - step * g
        yield x


def reparameterised(clients, x, lr, course, beta, gamma=None, controls=False):
    """Eq. 31-33 of Cheng et al.: g^ = g / beta, eta^ = beta eta, gamma^ = beta gamma; lr and gamma are without hats."""
    c_i, g_hat = np.zeros((N, n)), np.zeros(n)
    for t, S, steps, *_ in course.rounds():
        if S:
            eta_hat, c, c_new, moved = beta * lr(t), c_i.mean(axis=0), c_i.copy(), 0
            for i in S:
                constant = (1 - beta) * g_hat + (c - c_i[i] if controls else 0)
                y, c_new[i] = clients.train(i, x, eta_hat, steps[i], lambda _, gradient, o=constant: gradient + o)
                moved = moved + (x - y) / (eta_hat * steps[i])
            c_i, g_hat = c_new, moved / len(S)
            step = np.mean([lr(t) * steps[i] for i in S]) if gamma is None else gamma(t)
            x = x - beta * step * g_hat
        yield x


def mb_storm(clients, x, lr, course, beta, warm=None):
    """Patel et al. 2022: one gradient of each client at both points, and one step of the server."""
    v, x_prev = sum(warm.values()) / len(warm) if warm else np.zeros(n), x
    for t, S, *_ in course.rounds():
        if S:
            now, before = (np.mean([clients.gradient(i, at) for i in S], axis=0) for at in (x, x_prev))
            v = now + (1 - beta) * (v - before)
            x_prev, x = x, x - lr(t) * v
        yield x


def flexible(clients, x, lr, course, scheme, fast=True):
    """Eq. 2 and Sec. 4 of Ruan et al. Rounds count from 1: t0 of an arrival before ``course``'s round t is t.

    A client that was included and returns has its share already: nothing restarts, and nothing is boosted.

    Args:
        lr: eta_0 / t, which restarts at t0 when the objective changes; or eta_0.
    """
    sizes, t0s, t0 = {i: clients.examples[i] for i in course.start}, {}, 0
    for t, S, steps, *_ in course.rounds():
        for what, i in course.changes.get(t, ()):
            if what == "arrive" and i not in sizes:
                sizes[i], t0s[i], t0 = clients.examples[i], t, t
            elif what == "exclude":
                del sizes[i]
                t0 = t
            if what != "arrive":
                t0s.pop(i, None)
        eta = lr(t) if callable(lr) else lr / (t + 1 - t0)
        complete, change = [i for i in S if steps[i] == K], 0
        for i in complete if scheme == "A" else S:
            p = sizes[i] / sum(sizes.values())
            if fast and i in t0s:
                p = p * (1 + 2 / (t + 1 - t0s[i]) ** 2)
            weight = {"A": len(sizes) * p / max(len(complete), 1), "B": p, "C": K / steps[i] * p}[scheme]
            change = change + weight * (clients.train(i, x, eta, steps[i])[0] - x)
        x = x + change
        yield x
