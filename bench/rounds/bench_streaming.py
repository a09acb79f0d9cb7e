"""A round of 32 updates of 11.17 M that arrive one at a time, against the batch that has them all."""

import numpy as np
import pytest

from bench.alone import Work
from bench.rivals.aggregate import rows_and_weights, torch_add
from fedcore import Server, Update

S, N = 32, 11_173_962
DUE = {"held": 1 / 1.2, "writable": 1 / 2}


@pytest.mark.parametrize("delivery", ["held", "writable"])
@pytest.mark.parametrize("method", ["FedAvg", "MimiC"])
def bench_streaming(versus, size, method, delivery):
    """Held: the caller promises not to change the arrays (``keep``). Writable: each is folded before ``add`` ends."""
    n = size(N, 1_200_000)
    work = Work(rows_and_weights, S, n)
    ys, _ = work.arrays
    server = Server(method, np.zeros(n, np.float32), clients=S, lr=0.1)

    def streaming():
        with server.open_round() as opened:
            for client, y in enumerate(ys):
                opened.add(client, y, steps=1, keep=delivery == "held")

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
