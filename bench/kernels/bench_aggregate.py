"""The weighted sum of 32 separate rows of 4 M float32."""

import numpy as np
import pytest
import torch

import fedcore
from bench.probe import read_seconds
from fedcore import kernels

S, N = 32, 4_000_000
LAYERS = [3 * 64 * 49] + 60 * [190_000] + [512 * 1000]  # 62 tensors of 11.9 M elements, as a ResNet-18 has them


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
            "numpy w @ G, stacking counted": lambda: np.dot(weights, np.stack(rows), out=product),
            "torch acc.add_(x, alpha=w)": torch_add,
            "numpy w @ G, stacked before": lambda: np.dot(weights, matrix, out=product),
            "read floor": lambda: read_seconds(rows, fedcore.threads()),
        },
        timed=["read floor"],
        bytes=4 * S * N,
    )
    np.testing.assert_allclose(out, product, rtol=1e-4)
    np.testing.assert_allclose(out, acc.numpy(), rtol=1e-6)


def bench_float64(versus):
    """The price of a float64 sum against the float32 one."""
    rng = np.random.default_rng(0)
    rows = [rng.random(N, dtype=np.float32) for _ in range(S)]
    weights, out = rng.random(S, dtype=np.float32), np.empty(N, np.float32)
    versus(
        f'weighted sum, accumulate="float64", {S} rows x {N / 1e6:g} M; {fedcore.threads()} threads, {fedcore.isa()}',
        lambda: kernels.weighted_sum(rows, weights, out=out, accumulate="float64"),
        {
            "read floor": lambda: read_seconds(rows, fedcore.threads()),
            "float32": lambda: kernels.weighted_sum(rows, weights, out=out),
        },
        timed=["read floor"],
        bytes=4 * S * N,
    )


def bench_segments(versus):
    """Models as frameworks hold them: 62 tensors each, 24 clients."""
    rng = np.random.default_rng(0)
    clients = 24
    models = [[rng.random(n, dtype=np.float32) for n in LAYERS] for _ in range(clients)]
    weights = rng.random(clients, dtype=np.float32)
    outs = [np.empty(n, np.float32) for n in LAYERS]
    tensors = [[torch.from_numpy(layer) for layer in model] for model in models]
    accs = [torch.empty(n) for n in LAYERS]
    large = [model[1 + i] for model in models for i in range(60)][: 60 * clients // 8 * 8]

    def torch_add():
        for s, acc in enumerate(accs):
            acc.zero_()
            for model, weight in zip(tensors, weights.tolist(), strict=True):
                acc.add_(model[s], alpha=weight)

    share = sum(row.nbytes for row in large) / (4 * clients * sum(LAYERS))
    versus(
        f"62 segments x {clients} clients, {sum(LAYERS) / 1e6:.1f} M; {fedcore.threads()} threads, {fedcore.isa()}",
        lambda: kernels.weighted_sum_segments(models, weights, outs),
        {
            "read floor": lambda: read_seconds(large, fedcore.threads()) / share,
            "torch acc.add_ a tensor": torch_add,
        },
        timed=["read floor"],
        bytes=4 * clients * sum(LAYERS),
    )


@pytest.mark.parametrize("method", ["MIFA", "MimiC"])
def bench_exchange(versus, method):
    """A MIFA and a MimiC round: read y and the row, write the row; torch needs three in-place operations a row."""
    rng = np.random.default_rng(0)
    ys, rows = ([rng.random(N, dtype=np.float32) for _ in range(S)] for _ in range(2))
    x, v, acc = rng.random(N, dtype=np.float32), rng.random(N, dtype=np.float32), np.zeros(N)
    ones, none = np.ones(S), [None] * S
    t_ys, t_rows = [torch.from_numpy(y) for y in ys], [torch.from_numpy(row.copy()) for row in rows]
    t_acc = torch.zeros(N)

    def torch_exchange():
        for y, row in zip(t_ys, t_rows, strict=True):
            t_acc.sub_(row)
            t_acc.add_(y)
            row.copy_(y)

    anchors = [v] * S if method == "MimiC" else none
    versus(
        f"{method} exchange, {S} rows x {N / 1e6:g} M, float64 sum; {fedcore.threads()} threads, {fedcore.isa()}",
        lambda: kernels.exchange(acc, [x] * S, ys, ones, ones, rows, anchors, rows, out=acc),
        {
            "torch sub_, add_, copy_ a row": torch_exchange,
            "read floor of as many bytes": lambda: 3 * read_seconds(ys, fedcore.threads()),
        },
        timed=["read floor of as many bytes"],
        bytes=12 * S * N,
    )
