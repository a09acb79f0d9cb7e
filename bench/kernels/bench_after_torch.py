"""A small sum right after a torch operation, whose threads still spin and occupy the other core."""

import statistics
import time

import numpy as np
import torch

from bench.line import OURS, Line
from bench.machine import OtherPrograms
from bench.turns import seconds
from fedcore import kernels

N = 44_426
ALONE = "alone, right after NumPy did what torch does"


def bench_after_torch(benchmark, record, size):
    """Time the sum; "alone" is after the same work in NumPy, with equal caches but without spinning threads."""
    others = OtherPrograms()
    rows = [np.ones(N, np.float32) for _ in range(8)]
    weights, out = np.ones(8, np.float32), np.empty(N, np.float32)
    array = np.ones(4_000_000, np.float32)
    tensor = torch.ones(4_000_000)
    one = np.float32(1)
    befores = {
        ALONE: lambda: np.add(array, one, out=array),
        "alone, after 5 ms of sleep": lambda: time.sleep(0.005),
        "alone, right after itself": lambda: ours(),
    }
    took = {name: [] for name in befores}

    def ours():
        kernels.weighted_sum(rows, weights, out=out)

    def after_torch():
        for name, before in befores.items():
            before()
            took[name].append(seconds(ours))
        tensor.add_(1.0)

    benchmark.pedantic(ours, setup=after_torch, rounds=size(200, 60), iterations=1)
    after = statistics.median(benchmark.stats.stats.data)
    medians = {name: statistics.median(times) for name, times in took.items()}
    record(
        Line(
            f"weighted sum, 8 rows x {N:,}, right after a torch operation",
            ratios={name: alone / after for name, alone in medians.items()},
            targets={ALONE: 0.5},
            seconds={OURS: after, **medians},
            bytes=32 * N,
            others=others.share(),
        )
    )
