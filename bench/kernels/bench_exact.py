"""Exact sums against float64 sums: a fold, a MIFA exchange, and the passes at the end of a round."""

import numpy as np
import pytest

from bench.alone import Work
from bench.rivals.aggregate import rows_and_weights
from bench.rivals.exchange import models_and_rows
from fedcore import arrays as memory
from fedcore import kernels
from fedcore.arrays import core
from fedcore.kernels import ExactSum

N = 11_173_962


def written(n):
    """Return a sum whose memory was written before."""
    sum = ExactSum.empty(n)
    for word in sum:
        word[:] = 0
    return sum


@pytest.mark.parametrize("k", [8, 16])
def bench_accumulate_exact(versus, size, k):
    n = size(N, 1_200_000)
    ys, weights = rows_and_weights(k, n)
    x, wide, ones = memory.full(n, 0.5), weights.astype(np.float64), np.ones(k)
    acc, out, exact, spare = memory.zeros(n, np.float64), memory.full(n, 0, np.float64), written(n), written(n)
    versus(
        f"exact fold of models, {k} x {n / 1e6:.2f} M",
        lambda: kernels.accumulate(exact, [x] * k, ys, ones, wide, out=spare),
        {"the float64 fold": lambda: kernels.accumulate(acc, [x] * k, ys, ones, wide, out=out)},
        targets={"the float64 fold": 1 / 1.4},
        bytes=(4 * k + 36) * n,
    )


def bench_masked_words(versus, size):
    """Time adding masked messages, four at once, which have twice the bytes of a model and lie in small pages."""
    k, n = 8, size(N, 1_200_000)
    ys, weights = rows_and_weights(k, n)
    words = [np.frombuffer(b"w" * (8 * n), np.int64) for _ in range(k)]
    x, ones, exact, spare, sum = memory.full(n, 0.5), np.ones(k), written(n), written(n), written(n).high
    versus(
        f"masked words, {k} x {n / 1e6:.2f} M",
        lambda: [core.add_words(sum, words[start : start + 4]) for start in range(0, k, 4)],
        {"the exact fold": lambda: kernels.accumulate(exact, [x] * k, ys, ones, weights.astype(np.float64), out=spare)},
        targets={"the exact fold": 0.5},
        bytes=(8 * k + 16 * k // 4) * n,
    )


def bench_exchange_exact(versus, size):
    k, n = 16, size(N, 1_200_000)
    ys, rows = Work(models_and_rows, k, n).arrays
    rows, slots = [memory.copied(row) for row in rows], [memory.full(n, 0) for _ in range(k)]
    given, none = ([memory.full(n, 0.5)] * k, ys, np.ones(k), np.ones(k)), [None] * k
    acc, out, exact, spare = memory.zeros(n, np.float64), memory.full(n, 0, np.float64), written(n), written(n)
    versus(
        f"MIFA exchange, exact sum, {k} rows x {n / 1e6:.2f} M",
        lambda: kernels.exchange(exact, *given, rows, none, slots, out=spare),
        {"the float64 exchange": lambda: kernels.exchange(acc, *given, rows, none, slots, out=out)},
        targets={"the float64 exchange": 1 / 1.2},
        bytes=(12 * k + 36) * n,
    )


def bench_end_of_a_round(versus, size):
    """Time updating a total by a round's sum and reading both, against a float64 combination of the same length."""
    n = size(N, 1_200_000)
    total, sum, out = written(n), written(n), memory.full(n, 0, np.float64)
    plain = memory.zeros(n, np.float64)
    versus(
        f"exact total and readings, {n / 1e6:.2f} M",
        lambda: (kernels.combine_exact([total, sum], [1, 1], total), kernels.read_exact(total, out)),
        {"a float64 combination": lambda: kernels.combine([out, plain], [1, 1], out)},
        bytes=72 * n,
    )
