"""A MIFA and a MimiC round over 32 rows: read each client's update and row, and write the new row.

Rounds write the row to a free slot and the sum to a spare vector, so that a failed round changes neither.
"""

import numpy as np
import pytest

import fedcore
from bench.alone import Work
from bench.probe import write_floor
from bench.rivals.exchange import models_and_rows, torch_exchange
from fedcore import arrays as memory
from fedcore import kernels

S, N = 32, 11_173_962


@pytest.mark.parametrize("method", ["MIFA", "MimiC"])
def bench_exchange(versus, size, method):
    n, work, sent, rows, anchors = problem(size, method)
    rows = [memory.copied(row) for row in rows]  # aligned to cache lines, as in a store
    slots = [memory.full(n, 0) for _ in range(S)]
    acc, spare = memory.zeros(n, np.float64), memory.full(n, 0, np.float64)
    versus(
        f"{method} exchange to free slots, {S} rows x {n / 1e6:.2f} M, float64 sum",
        lambda: kernels.exchange(acc, *sent, rows, anchors, slots, out=spare),
        {
            "write floor": write_floor(in_pairs(rows, sent), slots, 2, fedcore.threads()),
            "torch sub_, add_, copy_ a row": work.rival(torch_exchange),
        },
        targets={"write floor": 0.90} | ({"torch sub_, add_, copy_ a row": 2.5} if method == "MimiC" else {}),
        bytes=12 * S * n,
    )


def problem(size, method):
    """Return the length, the work, the updates (bases, ys, scales and weights), the rows and the anchors."""
    n = size(N, 1_200_000)
    work = Work(models_and_rows, S, n)
    ys, rows = work.arrays
    x, v = np.random.default_rng(1).random((2, n), dtype=np.float32)
    anchors = [v if method == "MimiC" else None] * S
    return n, work, ([x] * S, ys, np.ones(S), np.ones(S)), rows, anchors


def in_pairs(rows, sent):
    """Return the arrays that the exchange reads, client by client."""
    return [array for pair in zip(rows, sent[1], strict=True) for array in pair]
