"""Weighted sums of rows of many shapes, and of 64 ResNet-18s with separate tensors.

The fold floor reads the same rows and writes one row.
"""

import mmap

import numpy as np
import pytest
import torch

import fedcore
from bench.alone import Alone, Work
from bench.line import Line
from bench.probe import read_floor
from bench.rivals.aggregate import models_and_weights, resnet18, rows_and_weights, torch_add, torch_add_tensors
from fedcore import kernels

S, N = 32, 11_173_962
CLIENTS = 64
FLOOR = "fold floor"


def fold_floor(rows, out, times=1):
    """Return the floor of a sum of these rows; it writes to ``out``."""
    return {FLOOR: read_floor(rows, fedcore.threads(), out, times)}


def rows_as(layout, k, n):
    """Return k rows float32[n]: separate, stacked in one array, or separate on pages of 4 KiB."""
    if layout != "small pages":
        rows = rows_and_weights(k, n)[0]
        return list(np.stack(rows)) if layout == "stacked" else rows
    maps = [mmap.mmap(-1, 4 * n) for _ in range(k)]
    for one in maps:
        one.madvise(mmap.MADV_NOHUGEPAGE)
    rows = [np.frombuffer(one, np.float32) for one in maps]
    for row in rows:
        row[:] = 0.5
    return rows


SHAPES = [
    *((k, n, layout) for k in (2, 8, 32, 100) for n in (2**20, 2**24) for layout in ("apart", "stacked")),
    *((k, n, "apart") for k in (2, 8, 32, 100) for n in (1_048_583, N)),
    *((k, n, "small pages") for k in (8, 32) for n in (2**20, 2**22)),
    (8, 16_384, "apart"),
    (32, 16_384, "apart"),
    (32, 100_000, "apart"),
    (100, 65_536, "stacked"),
]
"""The number, length and layout of rows. The rows are in memory, at the end of the list in the L2 and L3 cache."""


@pytest.mark.parametrize(("k", "n", "layout"), SHAPES)
def bench_shapes(versus, k, n, layout):
    rows, weights = rows_as(layout, k, n), np.full(k, 1 / k, np.float32)
    out, spare = np.empty(n, np.float32), np.empty(n, np.float32)
    calls = max(1, 20_000_000 // (k * n))
    versus(
        f"weighted sum, {k} rows x {n:,}, {layout}",
        lambda: kernels.weighted_sum(rows, weights, out=out),
        fold_floor(rows, spare, calls),
        targets={FLOOR: 0.95 if n >= 2**20 else 0.8} if k >= 8 else None,
        bytes=4 * (k + 1) * n,
        calls=calls,
    )


def bench_weighted_sum(versus, size):
    n = size(N, 1_200_000)
    work = Work(rows_and_weights, S, n)
    rows, weights = work.arrays
    matrix, product = np.stack(rows), np.empty(n, np.float32)
    out = np.empty(n, np.float32)
    versus(
        f"weighted sum, {S} rows x {n / 1e6:.2f} M",
        lambda: kernels.weighted_sum(rows, weights, out=out),
        {
            **fold_floor(rows, product),
            "torch acc.add_(x, alpha=w)": work.rival(torch_add),
            "numpy w @ G, stacked before": lambda: np.dot(weights, matrix, out=product),
            "numpy w @ G, stacking counted": lambda: np.dot(weights, np.stack(rows), out=product),
        },
        targets={
            FLOOR: 0.95,
            "torch acc.add_(x, alpha=w)": 2.0,
            "numpy w @ G, stacked before": 1.0,
            "numpy w @ G, stacking counted": 2.0,
        },
        bytes=4 * S * n,
        agree=1e-4,
    )


def bench_float64(versus, size):
    """Time a float64 sum against a float32 sum."""
    n = size(N, 1_200_000)
    rows, weights = rows_and_weights(S, n)
    out = np.empty(n, np.float32)
    versus(
        f'weighted sum, accumulate="float64", {S} rows x {n / 1e6:.2f} M',
        lambda: kernels.weighted_sum(rows, weights, out=out, accumulate="float64"),
        {
            **fold_floor(rows, np.empty(n, np.float32)),
            "the float32 sum": lambda: kernels.weighted_sum(rows, weights, out=out),
        },
        targets={"the float32 sum": 1 / 1.10},
        bytes=4 * S * n,
    )


def rows_of(dtype, n):
    rng = np.random.default_rng(0)
    rows = [rng.random(n, dtype=np.float32) for _ in range(S)]
    return [torch.from_numpy(row).bfloat16() if dtype == "bfloat16" else row.astype(dtype) for row in rows]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def bench_dtypes(versus, size, dtype):
    """Time rows with as many elements as float32 rows, so the ratio is of elements per second."""
    n = size(N // 2, 1_200_000)
    rows, singles = rows_of(dtype, n), rows_of("float32", n)
    weights, out = np.full(S, 0.5, np.float32), np.empty(n, np.float32)
    versus(
        f"weighted sum of {dtype}, {S} rows x {n / 1e6:.2f} M",
        lambda: kernels.weighted_sum(rows, weights, out),
        {"float32 rows": lambda: kernels.weighted_sum(singles, weights, out)},
        targets={"float32 rows": 1.7} if dtype == "bfloat16" else None,
        bytes=(8 if dtype == "float64" else 2) * S * n,
    )


def bench_norms(versus, size):
    """Time the norms of all rows and of the sum, the finite check and the diversity, in the same pass."""
    n = size(N, 1_200_000)
    rows, weights = rows_and_weights(S, n)
    out = np.empty(n, np.float32)
    versus(
        f"weighted sum with norms and diversity, {S} rows x {n / 1e6:.2f} M",
        lambda: kernels.weighted_sum(rows, weights, out, norms=True),
        {"the plain sum": lambda: kernels.weighted_sum(rows, weights, out)},
        targets={"the plain sum": 1 / 1.10},
        bytes=4 * S * n,
    )


@pytest.mark.parametrize("k", [8, 32])
def bench_fold(versus, size, k):
    """Time the fold of a FedAvg round: differences from x, their norms and the finite check, added to a sum.

    The fold and its floor also read x and the sum.
    """
    n = size(N, 1_200_000)
    ys, weights = rows_and_weights(k, n)
    x, acc, out = np.ones(n, np.float32), np.zeros(n, np.float32), np.empty(n, np.float32)
    ones, wide = np.ones(k), weights.astype(np.float64)
    versus(
        f"fold of models with norms and finite check, {k} x {n / 1e6:.2f} M",
        lambda: kernels.accumulate(acc, [x] * k, ys, ones, wide, out=out),
        {
            **fold_floor([*ys, x, acc], np.empty(n, np.float32)),
            "the plain sum": lambda: kernels.weighted_sum(ys, weights, out=out),
        },
        targets={FLOOR: 0.9},
        bytes=4 * (k + 3) * n,
    )


def bench_segments(versus, size):
    """Time models of 62 tensors, as frameworks store them."""
    clients, sizes = size(CLIENTS, 8), resnet18()
    work = Work(models_and_weights, clients, sizes)
    models, weights = work.arrays
    outs = [np.empty(n, np.float32) for n in sizes]
    versus(
        f"{len(sizes)} segments x {clients} clients of {sum(sizes) / 1e6:.1f} M",
        lambda: kernels.weighted_sum_segments(models, weights, outs),
        {
            **fold_floor(models, [np.empty(n, np.float32) for n in sizes]),
            "torch acc.add_ a tensor": work.rival(torch_add_tensors),
        },
        targets={FLOOR: 0.80},
        bytes=4 * clients * sum(sizes),
        agree=1e-4,
    )


def segments_sum(models, weights):
    return lambda: kernels.weighted_sum_segments(models, weights)


def bench_segments_memory(benchmark, record, size):
    """Measure the peak memory that the sum over segments adds, with its result; the time has no meaning."""
    clients, sizes = size(CLIENTS, 4), resnet18()
    with Alone(models_and_weights, (clients, sizes), segments_sum, fedcore.threads()) as process:
        rise = benchmark.pedantic(process.peak, rounds=1, iterations=1)
    record(
        Line(
            f"{len(sizes)} segments x {clients} clients: memory added, {rise / 2**20:.1f} MiB",
            ratios={"one model": 4 * sum(sizes) / rise},
            targets={"one model": 1 / 1.05},
        )
    )
