"""Updates that arrive one by one, against a batch of all updates, and against the kernel."""

import numpy as np
import pytest
import torch

from bench.alone import Work
from bench.rivals.aggregate import rows_and_weights, torch_add
from fedcore import Server, Update, kernels

S, N = 32, 11_173_962
DUE = {"held": 1 / 1.2, "lent": 0.9, "writable": 0.6}


@pytest.mark.parametrize("delivery", ["held", "lent", "writable"])
@pytest.mark.parametrize("method", ["FedAvg", "MimiC"])
def bench_streaming(versus, size, method, delivery):
    """Time the three ways to deliver updates.

    Held: the caller does not change the arrays (``keep``). Lent: the arrays are the server's (``Round.buffer``).
    Writable: the server folds each array before ``add`` returns.
    """
    n = size(N, 1_200_000)
    work = Work(rows_and_weights, S, n)
    ys, _ = work.arrays
    server = Server(np.zeros(n, np.float32), method, clients=S, lr=0.1)
    with server.open_round() as opened:  # writes to the buffers first, so that they do not share the zero page
        for buffer in [opened.buffer() for _ in range(8)]:
            buffer[:] = ys[0]
        del buffer
        opened.abort()

    def streaming():
        with server.open_round() as opened:
            for client, y in enumerate(ys):
                sent = opened.buffer() if delivery == "lent" else y
                opened.add(client, sent, steps=1, keep=delivery == "held")

    rivals = {"the batch, Server.round": lambda: server.round([Update(client, y, 1) for client, y in enumerate(ys)])}
    if method == "FedAvg":
        rivals["torch acc.add_(x, alpha=w)"] = work.rival(torch_add)
    versus(
        f"{method} round, {S} x {n / 1e6:.2f} M, streaming, {delivery}",
        streaming,
        rivals,
        targets={"the batch, Server.round": DUE[delivery]},
        bytes=(4 if method == "FedAvg" else 12) * S * n,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def bench_add(versus, size, dtype):
    """Time ``Round.add`` of models of 40 tensors against its kernel. The broadcast has rounded x."""
    n, k = size(40_000_000, 4_000_000), 8
    model = {f"t{i}": torch.ones(n // 40, dtype=getattr(torch, dtype)) for i in range(40)}
    server = Server(model, "FedAvg", clients=k, lr=0.1)
    server.broadcast([0])
    x, sums, one = np.ones(n, np.float32), np.ones((2, n), np.float32), np.ones(1)

    def add():
        with server.open_round() as opened:
            for client in range(k):
                assert opened.add(client, model, steps=1)
            opened.abort()

    def kernel():
        for i in range(k):
            acc = sums[i % 2] if i else None
            kernels.accumulate(acc, [x], [list(model.values())], one, one, out=sums[1 - i % 2])

    bytes = k * n * (12 if dtype == "float32" else 10)
    versus(f"add of {dtype}", add, {"the kernel": kernel}, targets={"the kernel": 1 / 1.1}, bytes=bytes)
