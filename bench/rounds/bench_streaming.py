"""Updates that arrive one by one, against a batch of all updates, and against torch."""

import numpy as np
import pytest
import torch

from bench.rivals import rounds
from bench.rivals.aggregate import resnet18, rows_and_weights, torch_add
from fedcore import Server, Update

S = 32
BATCH, TORCH, BARE = "the batch, Server.round", "torch doing the same work", "torch acc.add_(x, alpha=w)"
DUE = {"held": {BATCH: 1 / 1.2}, "lent": {BATCH: 0.9}, "writable": {BATCH: 0.6}}
NAMED = {"named, held": {BARE: 0.6}, "named": {BARE: 0.6}, "named bfloat16": {TORCH: 1.0}}


def named(vector):
    """Return a vector as ResNet-18's 62 tensors, or ten equal ones for the short form."""
    sizes = resnet18() if len(vector) == sum(resnet18()) else len(vector) // 10
    return {f"t{i}": part for i, part in enumerate(torch.from_numpy(vector).split(sizes))}


@pytest.mark.parametrize(
    ("method", "delivery"),
    [("FedAvg", delivery) for delivery in DUE | NAMED] + [("MimiC", delivery) for delivery in DUE],
)
def bench_streaming(versus, size, method, delivery):
    """Time the ways to deliver updates, and compare x after two rounds; all methods come to the updates' mean.

    Held: the caller does not change the arrays (``keep``). Lent: the arrays are the server's (``Round.buffer``).
    Writable: the server folds each array before ``add`` returns. Named: state_dicts of torch tensors.
    """
    n = size(sum(resnet18()), 1_200_000)
    rows, _ = rows_and_weights(S, n)
    model, ys = np.zeros(n, np.float32), rows
    if delivery in NAMED:
        dtype = torch.bfloat16 if "bfloat16" in delivery else torch.float32
        model, ys = named(model), [{name: t.to(dtype) for name, t in named(row).items()} for row in rows]
    server = Server(model, method, clients=2 * S, lr=0.1)
    with server.open_round() as opened:  # writes to the buffers first, so that they do not share the zero page
        for buffer in [opened.buffer() for _ in range(8)]:
            buffer[:] = rows[0]
        del buffer
        opened.abort()

    def streaming():
        with server.open_round() as opened:
            for client, y in enumerate(ys):
                sent = opened.buffer() if delivery == "lent" else y
                opened.add(client, sent, steps=1, keep="held" in delivery)
        return server.x

    def batch():
        server.round([Update(client, y, 1) for client, y in enumerate(ys)])
        return server.x

    same = rounds.by_tensor(ys) if delivery in NAMED else getattr(rounds, method)(torch, [*map(torch.from_numpy, rows)])
    versus(
        f"{method} round, {S} x {n / 1e6:.2f} M, streaming, {delivery}",
        streaming,
        {BATCH: batch, TORCH: same, BARE: torch_add(rows, np.full(S, 1 / S))},
        targets=(DUE | NAMED)[delivery],
        bytes=(4 if method == "FedAvg" else 12) * S * n,
        agree=None if delivery == "lent" else 1e-2 if "bfloat16" in delivery else 1e-4,  # lent buffers have other rows
    )
