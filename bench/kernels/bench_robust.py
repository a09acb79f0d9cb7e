"""Robust rules over 10 models of 10 M float32 numbers and over 64 ResNet-18s.

The fold floor reads the same rows and writes one row.
"""

import numpy as np
import pytest

import fedcore
from bench.alone import Work
from bench.probe import read_floor
from bench.rivals.aggregate import rows_and_weights
from bench.rivals.robust import torch_krum, torch_median, torch_trimmed_mean
from fedcore import kernels
from fedcore.rules import Bulyan, Chain, GeometricMedian, Krum, Median, MultiKrum, TrimmedMean

RULES = {
    "median": (Median(), 10, 10_000_000, 0.5, torch_median),
    "trimmed mean": (TrimmedMean(1), 10, 10_000_000, 0.5, torch_trimmed_mean),
    "Krum": (Krum(1), 10, 10_000_000, 0.33, torch_krum),
    "Multi-Krum": (MultiKrum(1), 10, 10_000_000, 0.33, None),
    "Bulyan": (Bulyan(1), 10, 10_000_000, 0.16, None),
    "median of 64": (Median(), 64, 11_689_512, 0.25, None),
    "geometric median of 64": (GeometricMedian(), 64, 11_689_512, None, None),
}


@pytest.mark.parametrize("name", RULES)
def bench_robust(versus, size, name):
    rule, k, n, target, peer = RULES[name]
    n = size(n, 300_000)
    work = Work(rows_and_weights, k, n)
    rows, _ = work.arrays
    out, spare = np.empty(n, np.float32), np.empty(n, np.float32)
    vectors, chain = ([None] * k, rows, -np.ones(k)), Chain.of(rule)

    def combine():
        combination = chain.combination(k, lambda: kernels.gram_matrix(*vectors), round=0)
        combination.write(*vectors, out)
        return out

    rivals = {"fold floor": read_floor(rows, fedcore.threads(), spare)}
    if peer is not None:
        rivals[f"torch, {name}, stacked before"] = work.rival(peer)
    targets = {} if target is None else {"fold floor": target}
    versus(f"{name}, {k} x {n / 1e6:g} M", combine, rivals, targets=targets, bytes=4 * (k + 1) * n, rounds=5)
