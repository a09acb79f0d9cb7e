"""A small fold right after a torch operation, whose threads still spin for work and hold the other core."""

import statistics
import time

import numpy as np
import torch

from fedcore import kernels

N = 44_426


def bench_after_torch(benchmark):
    rows = [np.ones(N, np.float32) for _ in range(8)]
    weights, out = np.ones(8, np.float32), np.empty(N, np.float32)
    x = torch.ones(4_000_000)
    alone = []

    def ours():
        kernels.weighted_sum(rows, weights, out=out)

    def after_torch():
        x.add_(1.0)

    for _ in range(200):
        time.sleep(0.005)
        began = time.perf_counter()
        ours()
        alone.append(time.perf_counter() - began)
    benchmark.pedantic(ours, setup=after_torch, rounds=200, iterations=1)
    after = statistics.median(benchmark.stats.stats.data)
    ratio = after / statistics.median(alone)
    benchmark.extra_info["ratios"] = {"after torch / alone": ratio}
    print(
        f"\nweighted sum of 8 x {N}: alone {1e6 * statistics.median(alone):.0f} us, "
        f"right after torch {1e6 * after:.0f} us, ratio {ratio:.2f}"
    )
