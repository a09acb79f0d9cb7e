"""Micro-benchmarks of a round's calls for ``bench.commits``, which use only public names.

They run with the packages of two commits, so they import no other file of this tree. A call that an older commit lacks
is missing from its figures.
"""

import numpy as np
import pytest

import fedcore
from fedcore import kernels, sampling

N = 1_200_000  # the elements of a vector: 4.8 MB, larger than each core's own caches
COHORT = 8


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    return [rng.standard_normal(N, dtype=np.float32) for _ in range(COHORT)]


def bench_weighted_sum(benchmark, rows):
    benchmark(kernels.weighted_sum, rows, np.ones(COHORT, np.float32), np.empty(N, np.float32))


def bench_combine(benchmark, rows):
    benchmark(kernels.combine, rows[:3], [1.0, 0.5, -0.5], np.empty(N, np.float32))


def bench_squared_norms(benchmark, rows):
    benchmark(kernels.squared_norms, rows)


def bench_direction_step(benchmark, rows):
    y = rows[0].copy()
    benchmark(kernels.direction_step, y, rows[1], lr=1e-6)


def bench_mix(benchmark, rows):
    models, ring = [row[:100_000].copy() for row in rows], np.eye(COHORT) / 2
    ring += np.roll(np.eye(COHORT), 1, axis=0) / 2
    benchmark(kernels.mix, models, ring)


def bench_draw(benchmark):
    benchmark(sampling.without_replacement, 1_000_000, 1_000, seed=0, round=1)


@pytest.mark.parametrize("algorithm", ["FedAvg", "MIFA", "MimiC", "SCAFFOLD"])
def bench_round(benchmark, rows, algorithm):
    server = fedcore.Server(np.zeros(N // 4, np.float32), algorithm, clients=COHORT, lr=0.1)
    updates = [fedcore.Update(client, row[: N // 4], steps=1) for client, row in enumerate(rows)]

    def one_round():
        server.broadcast(range(COHORT))
        server.round(updates)

    benchmark(one_round)


def bench_small_round(benchmark):
    """Time a round whose arithmetic costs almost nothing."""
    server = fedcore.Server(np.zeros(100, np.float32), "MIFA", clients=64, lr=0.1)
    updates = [fedcore.Update(client, np.ones(100, np.float32), steps=1) for client in range(64)]
    benchmark(server.round, updates)
