"""One whole round of a small model, where what counts is everything but the arithmetic."""

import numpy as np

from bench.alone import Work
from bench.rivals.aggregate import rows_and_weights, torch_add
from fedcore import Server, Update

S, N = 32, 10_000


def bench_small_round(versus):
    """The making of the 32 Update objects counts as ours; torch's tensors exist before."""
    work = Work(rows_and_weights, S, N)
    rows, _ = work.arrays
    server = Server("FedAvg", np.zeros(N, np.float32), clients=S, lr=0.1)
    versus(
        f"FedAvg, a whole Server.round of {S} NumPy rows x {N:,}, making the updates counted",
        lambda: server.round([Update(client, y, 1) for client, y in enumerate(rows)]),
        {"bare torch acc.add_(x, alpha=w)": work.rival(torch_add)},
        targets={"bare torch acc.add_(x, alpha=w)": 1 / 1.2},
        bytes=4 * S * N,
        calls=100,
    )
