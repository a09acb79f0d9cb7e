"""Arrivals of asynchronous clients, float64 transcriptions of asynchronous methods, and a server to kill.

As a program, ``python -m tests.server.asynchronous FOLDER ROUNDS`` resumes the server of a folder, pushes update after
update, and prints each.
"""

import sys
from typing import NamedTuple

import numpy as np

from fedcore import RoundPolicy, Server, Update
from tests.server.papers import N


class Arrival(NamedTuple):
    """A client's update: its start round and steps."""

    client: int
    start: int
    steps: int


def arrivals(seed, rounds, K, most, *, repeats=True, steps=None):
    """The K arrivals of each round; starts are up to ``most`` rounds old."""
    rng, found = np.random.default_rng([seed, 2]), []
    for t in range(rounds):
        clients = rng.choice(N, size=K, replace=repeats).tolist()
        starts = [max(0, t - int(age)) for age in rng.integers(0, most + 1, K)]
        found.append([Arrival(*one, steps or int(rng.integers(1, 6))) for one in zip(clients, starts, strict=True)])
    return found


def polynomial(a):
    return lambda tau: (1 + tau) ** -a


def hinge(a, b):
    return lambda tau: 1.0 if tau <= b else 1 / (a * (tau - b) + 1)


def fedbuff(clients, x, lr, course, law=lambda tau: 1.0, rate=1.0):
    """x' = x - rate A / K, A = sum of s(tau) (x_start - y)."""
    xs = [x]
    for t, buffer in enumerate(course):
        A = 0.0
        for i, start, steps in buffer:
            A = A + law(t - start) * (xs[start] - clients.train(i, xs[start], lr, steps)[0])
        xs.append(xs[-1] - rate * A / len(buffer))
        yield xs[-1]


def fedasync(clients, x, lr, course, alpha, law=lambda tau: 1.0):
    """x' = (1 - a) x + a y, a = alpha s(tau)."""
    xs = [x]
    for t, [(i, start, steps)] in enumerate(course):
        a = alpha * law(t - start)
        xs.append((1 - a) * xs[-1] + a * clients.train(i, xs[start], lr, steps)[0])
        yield xs[-1]


def ca2fl(clients, x, lr, course):
    """v = mean of all cached d_j + mean over the buffer of (d_i - cached d_i), both with the cache of its start."""
    xs, cache = [x], np.zeros((N, len(x)))
    for buffer in course:
        d = {i: xs[start] - clients.train(i, xs[start], lr, steps)[0] for i, start, steps in buffer}
        xs.append(xs[-1] - cache.mean(axis=0) - np.mean([d[i] - cache[i] for i in d], axis=0))
        for i in d:
            cache[i] = d[i]
        yield xs[-1]


def follow(server, clients, course, paper):
    """Push the arrivals in parts of 1 to 5; return the largest relative distance of x from the paper's."""
    sent, worst, rng = [server.x], 0.0, np.random.default_rng(0)
    for t, (buffer, x) in enumerate(zip(course, paper, strict=True)):
        updates = []
        for i, start, steps in buffer:
            y = clients.train(i, sent[start], 0.1, steps)[0].astype(np.float32)
            updates.append(Update(i, y, steps, examples=i + 1, round=start))
        reports = []
        while updates:
            k = int(rng.integers(1, 6))
            reports += server.push(updates[:k])
            updates = updates[k:]
        [report] = reports
        assert (report.round, report.closed, report.accepted) == (t, "buffer", tuple(i for i, *_ in buffer))
        assert report.ages.tolist() == [t - start for _, start, _ in buffer]
        sent.append(server.x)
        worst = max(worst, float(np.linalg.norm(server.x - x) / np.linalg.norm(x)))
    return worst


POLICY = RoundPolicy(buffer=4, max_staleness=2, discount=0.5)


def nth(server, j):
    """The j-th update that a server of ``POLICY`` gets; it depends only on j and x of its start."""
    rng, start = np.random.default_rng(j), max(0, server.round_number - j % 3)
    y = server._backend.snapshot.past.get(start, server.x) / 2 + rng.normal(size=server.layout.n).astype(np.float32)
    return Update(j * 5 % 3, y, 1 + j % 2, round=start)


def next_of(server):
    return server.policy.buffer * server.round_number + len(server.open_buffer().clients)


def go_on(server, rounds, note=lambda j: None):
    """Push updates one by one until so many rounds are finished."""
    server.push([])  # closes a buffer that was full before a crash
    while server.round_number < rounds:
        j = next_of(server)
        server.push([nth(server, j)])
        note(j)


if __name__ == "__main__":
    resumed = Server.load(sys.argv[1])
    print("loaded", flush=True)
    go_on(resumed, int(sys.argv[2]), lambda j: print(f"{j}\n", end="", flush=True))
