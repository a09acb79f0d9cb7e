"""A MIFA and a MimiC round over 32 rows: read what the client sent and its row, write the row."""

import numpy as np
import pytest

import fedcore
from bench.alone import Work
from bench.probe import rewrite_seconds
from bench.rivals.exchange import models_and_rows, torch_exchange
from fedcore import kernels

S, N = 32, 11_173_962


@pytest.mark.parametrize("method", ["MIFA", "MimiC"])
def bench_exchange(versus, size, method):
    n = size(N, 1_200_000)
    work = Work(models_and_rows, S, n)
    ys, rows = work.arrays
    x, v = np.random.default_rng(1).random((2, n), dtype=np.float32)
    acc, ones = np.zeros(n), np.ones(S)
    anchors = [v if method == "MimiC" else None] * S
    in_pairs = [array for pair in zip(rows, ys, strict=True) for array in pair]
    versus(
        f"{method} exchange, {S} rows x {n / 1e6:.2f} M, float64 sum",
        lambda: kernels.exchange(acc, [x] * S, ys, ones, ones, rows, anchors, rows, out=acc),
        {
            "rewrite floor": lambda: rewrite_seconds(in_pairs, 2, fedcore.threads()),
            "torch sub_, add_, copy_ a row": work.rival(torch_exchange),
        },
        timed=["rewrite floor"],
        targets={"rewrite floor": 0.80} | ({"torch sub_, add_, copy_ a row": 2.5} if method == "MimiC" else {}),
        bytes=12 * S * n,
    )
