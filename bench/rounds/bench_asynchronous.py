"""Buffers of a million registered clients of which 10,000 are at work, and single updates of a large model."""

import numpy as np

import fedcore
from bench.probe import read_floor
from fedcore import RoundPolicy, Server, Update
from fedcore.algorithms import FedAvg

CLIENTS, AT_WORK, N, LARGE = 1_000_000, 10_000, 4_810, 11_173_962
PAST = 20


def server_of(n, clients, buffer):
    """Return a server with ``PAST`` past models."""
    policy = RoundPolicy(buffer=buffer, max_staleness=PAST, discount=0.5)
    server = Server(np.zeros(n, np.float32), FedAvg("uniform"), clients, lr=0.1, policy=policy)
    for _ in range(PAST):
        server.round([Update(0, server.x + 1, 1, round=server.round_number)])
    return server


def bench_push(versus, size):
    """Time a push of 10,000 models of all ages, in buffers of 1,000; making the updates is not counted."""
    clients = size(CLIENTS, 100_000)
    server = server_of(N, clients, 1_000)
    rng = np.random.default_rng(0)
    ys = list(rng.standard_normal((AT_WORK, N), np.float32))
    ids, ages = rng.choice(clients, AT_WORK).tolist(), rng.integers(0, PAST - AT_WORK // 1_000, AT_WORK).tolist()

    def push():
        number = server.round_number
        updates = [Update(client, y, 5, round=number - age) for client, y, age in zip(ids, ys, ages, strict=True)]
        assert [len(report.accepted) for report in server.push(updates)] == [1_000] * (AT_WORK // 1_000)

    floor = {"fold floor": read_floor(ys, fedcore.threads(), np.empty(N, np.float32))}
    versus(f"push of {AT_WORK:,} late models x {N:,}, {clients:,} clients", push, floor, bytes=4 * AT_WORK * N)


def bench_fold(versus, size):
    """Time the fold of one difference of a large model into an open buffer."""
    n = size(LARGE, 1_200_000)
    server = server_of(n, 2, 2**31 - 1)
    y, acc, out = (np.full(n, 1e-3, np.float32) for _ in range(3))
    start = server.round_number - 3

    def fold():
        server.push([Update(0, y, 5, kind="delta", round=start)])

    floor = {"fold floor": read_floor([y, acc], fedcore.threads(), out)}
    versus(f"push of one late difference x {n / 1e6:.2f} M", fold, floor, targets={"fold floor": 0.9}, bytes=12 * n)
