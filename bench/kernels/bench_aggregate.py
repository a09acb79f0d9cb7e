"""The weighted sum of 32 separate rows of 4 M float32."""

import numpy as np
import torch

import fedcore
from bench.probe import read_seconds
from fedcore import kernels

S, N = 32, 4_000_000


def bench_weighted_sum(versus):
    rng = np.random.default_rng(0)
    rows = [rng.random(N, dtype=np.float32) for _ in range(S)]
    weights = rng.random(S, dtype=np.float32)
    matrix = np.stack(rows)
    tensors = [torch.from_numpy(row) for row in rows]
    out, acc, product = np.empty(N, np.float32), torch.empty(N), np.empty(N, np.float32)

    def torch_add():
        acc.zero_()
        for tensor, weight in zip(tensors, weights.tolist(), strict=True):
            acc.add_(tensor, alpha=weight)

    versus(
        f"weighted sum, {S} rows x {N / 1e6:g} M float32; {fedcore.threads()} threads, {fedcore.isa()}",
        lambda: kernels.weighted_sum(rows, weights, out=out),
        {
            "read floor": lambda: read_seconds(rows, fedcore.threads()),
            "torch acc.add_(x, alpha=w)": torch_add,
            "numpy w @ G, stacked before": lambda: np.dot(weights, matrix, out=product),
            "numpy w @ G, stacking counted": lambda: np.dot(weights, np.stack(rows), out=product),
        },
        timed=["read floor"],
        bytes=4 * S * N,
    )
    np.testing.assert_allclose(out, product, rtol=1e-4)
    np.testing.assert_allclose(out, acc.numpy(), rtol=1e-6)
