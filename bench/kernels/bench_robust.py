"""Robust rules over 10 models of 10 M float32 numbers, over 64 ResNet-18s, and over rows in the caches and in files.

The fold floor reads the same rows and writes one row.
"""

import mmap
import os
import time

import numpy as np
import pytest

import fedcore
from bench.alone import Work
from bench.line import OURS, Line
from bench.probe import read_floor
from bench.rivals.aggregate import rows_and_weights
from bench.rivals.robust import torch_krum, torch_median, torch_trimmed_mean
from fedcore import arrays, kernels
from fedcore.rules import Bulyan, Chain, GeometricMedian, Krum, Median, MultiKrum, TrimmedMean

RULES = {
    "median": (Median(), 10, 10_000_000, 0.5, torch_median),
    "trimmed mean": (TrimmedMean(1), 10, 10_000_000, 0.5, torch_trimmed_mean),
    "Krum": (Krum(1), 10, 10_000_000, 0.33, torch_krum),
    "Multi-Krum": (MultiKrum(1), 10, 10_000_000, 0.33, None),
    "Bulyan": (Bulyan(1), 10, 10_000_000, 0.16, None),
    "median of 64": (Median(), 64, 11_689_512, 0.25, None),
    "median of 64 in the L3": (Median(), 64, 65_536, 0.33, None),
    "geometric median of 64": (GeometricMedian(), 64, 11_689_512, 0.25, None),  # two reads of two floors each
}


@pytest.mark.parametrize("name", RULES)
def bench_robust(versus, size, name):
    rule, k, n, target, peer = RULES[name]
    n = size(n, min(n, 300_000))
    calls = max(1, 2_000_000 // n)
    work = Work(rows_and_weights, k, n)
    rows, _ = work.arrays
    out, spare = np.empty(n, np.float32), np.empty(n, np.float32)
    vectors, chain = ([None] * k, rows, -np.ones(k)), Chain.of(rule)

    def combine():
        combination = chain.combination(k, lambda: kernels.gram_matrix(*vectors), round=0)
        combination.write(*vectors, out)
        return out

    rivals = {"fold floor": read_floor(rows, fedcore.threads(), spare, times=calls)}
    if peer is not None:
        rivals[f"torch, {name}, stacked before"] = work.rival(peer)
    targets = {} if target is None else {"fold floor": target}
    title, bytes = f"{name}, {k} x {n / 1e6:g} M", 4 * (k + 1) * n
    versus(title, combine, rivals, targets=targets, bytes=bytes, calls=calls, rounds=5)


PAGEOUT = 21
"""Linux's MADV_PAGEOUT, which evicts pages of a file from memory."""


def bench_median_of_files(benchmark, record, size, tmp_path):
    """Measure the median of 10 models in files, of which a third may stay in memory, against the disk's reads."""
    k, n = 10, size(10_000_000, 1_000_000)
    memory = arrays.FileMemory(tmp_path, 4 * k * n // 3)
    rows, out = [arrays.empty(n, device=memory) for _ in range(k)], np.empty(n, np.float32)
    for row in rows:
        row[:] = np.random.default_rng(0).standard_normal(n, dtype=np.float32)
    plain = tmp_path / "plain"
    plain.write_bytes(np.concatenate(rows))

    def evict():
        for row in rows:
            file = row
            while not isinstance(file, mmap.mmap):
                file = file.base if isinstance(file, np.ndarray) else file.obj
            file.flush()
            file.madvise(PAGEOUT)
        with open(plain, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read():
        memory = bytearray(8 << 20)
        with open(plain, "rb", buffering=0) as file:
            while file.readinto(memory):
                pass

    def seconds(operation):
        evict()
        began = time.perf_counter()
        operation()
        return time.perf_counter() - began

    def median():
        kernels.trimmed_mean([None] * k, rows, -np.ones(k), (k - 1) // 2, out=out)

    took = np.array([(seconds(read), seconds(median)) for _ in range(7)])
    benchmark.pedantic(lambda: None, rounds=1, iterations=1)
    disk, ours = np.median(took, axis=0).tolist()
    quartiles = np.quantile(took[:, 0] / took[:, 1], [0.25, 0.75]).tolist()
    record(
        Line(
            f"median of files, {k} x {n / 1e6:g} M, a third may stay in memory",
            ratios={"read from disk": float(np.median(took[:, 0] / took[:, 1]))},
            targets={"read from disk": 0.8},
            seconds={"read from disk": disk, OURS: ours},
            quartiles={"read from disk": quartiles},
            bytes=4 * k * n,
        )
    )
