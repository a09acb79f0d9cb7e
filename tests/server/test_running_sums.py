"""Running sums follow the rows as stored, for any number of rounds and every codec.

``FEDCORE_ROUNDS`` sets the rounds of the long runs; their bounds were measured at 20,000.
"""

import os

import numpy as np
import pytest

from fedcore import ClientStore, Server, Update, algorithms

ROUNDS = int(os.environ.get("FEDCORE_ROUNDS", "1200"))
N, n = 10, 130
CODECS = ["f32", "bf16", "int8"]


def made(method, codec, *, history=64, **options):
    known = {"MIFA": algorithms.MIFA(wait=False), "MimiC": algorithms.MimiC(history=history)}
    algorithm = known.get(method, method)
    return Server(np.zeros(n, np.float32), algorithm, storage=ClientStore(N, n, codec=codec), lr=0.1, **options)


def recomputed(server):
    """The sum of the rows or corrections, in float64."""
    parts = [server.correction(i) if server.algorithm.keeps_history else server.store.read(i) for i in range(N)]
    return np.sum(parts, axis=0, dtype=np.float64)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("method", ["MIFA", "SCAFFOLD", "MimiC"])
@pytest.mark.sample(1)
def test_a_sum_is_that_of_the_rows_after_4000_exchanges(method, codec):
    server = made(method, codec, server_lr=1e-3, history=4)
    rng, exchanges, largest = np.random.default_rng(0), 0, 0.0
    while exchanges < 4_000:
        cohort = rng.permutation(N)[: rng.integers(4, N + 1)].tolist()
        hs = rng.normal(size=(len(cohort), n)).astype(np.float32) * np.float32(10) ** rng.integers(-3, 4)
        server.round([Update(i, value=h, kind="gradient", steps=1) for i, h in zip(cohort, hs, strict=True)])
        exchanges += len(cohort)
        largest = max(largest, N * float(np.abs(hs).max()))
    # Each exchange rounds a few float64 sums once: some 4,000 times 2^-53 of the largest that they can be.
    np.testing.assert_allclose(server._backend.snapshot.total, recomputed(server), rtol=0, atol=4e3 * 2**-53 * largest)


@pytest.fixture(scope="module")
def problem():
    """f_i(x) = |a_i (x - o_i)|^2 / 2 with different minimisers: a and o, float64[N, n]."""
    rng = np.random.default_rng(3)
    return rng.uniform(0.5, 2, size=(N, n)), rng.normal(size=(N, n))


LAST = 100  # rounds whose errors are averaged: rounding makes each of them another


def run(server, problem, rounds, there):
    """Full gradients of clients that take part in 20 to 90 % of the rounds; returns the final error."""
    a, o = problem
    rng, present, errors = np.random.default_rng(7), np.linspace(0.2, 0.9, N), []
    for left in range(rounds, 0, -1):
        client = np.flatnonzero(rng.random(N) < present)
        x = server.x.astype(np.float64)
        hs = (a * (x - o)).astype(np.float32)
        server.round([Update(i, value=hs[i], kind="gradient", steps=1) for i in client.tolist() if i in there])
        if left <= LAST:
            errors.append(error(server, problem, there))
    return float(np.mean(errors))


def error(server, problem, there):
    """|x - x*| / |x*|, x* the optimum of these clients."""
    a, o = (part[sorted(there)] for part in problem)
    optimum = (a * o).sum(axis=0) / a.sum(axis=0)
    return float(np.linalg.norm(server.x - optimum) / np.linalg.norm(optimum))


@pytest.mark.parametrize(
    "codec", ["int8", *(pytest.param(each, marks=pytest.mark.endurance) for each in ("f32", "bf16"))]
)
def test_mimic_ends_as_near_the_optimum_as_mifa_also_after_a_removal(problem, codec):
    """A sum that ignored the codec's rounding would drift to .55 in 20,000 rounds."""
    everybody, ended = set(range(N)), {}
    for method in ("MIFA", "MimiC"):
        server = made(method, codec)
        there = run(server, problem, ROUNDS, everybody)
        server.remove_client(N - 1)
        ended[method] = there, run(server, problem, ROUNDS // 4, everybody - {N - 1})
        print(codec, method, "with everybody, and after the departure:", *ended[method])
    resolution = 1e-6  # of a float32 x
    for ours, theirs in zip(ended["MimiC"], ended["MIFA"], strict=True):
        assert ours < 1.25 * theirs + resolution
    assert max(ended["MIFA"]) < {"f32": resolution, "bf16": 0.005, "int8": 0.02}[codec]
