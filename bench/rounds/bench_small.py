"""Rounds of small models, whose cost is mostly not arithmetic."""

import numpy as np
import pytest

from bench.alone import Work
from bench.rivals.aggregate import rows_and_weights, torch_add
from bench.rivals.rounds import torch_round, torch_round_with_rows
from fedcore import Server, Update

ALIKE = "torch doing the same work"


@pytest.mark.parametrize("method", ["FedAvg", "MIFA", "MimiC"])
@pytest.mark.parametrize(("clients", "n"), [(5, 4_810), (32, 10_000)])
def bench_small_round(versus, method, clients, n):
    """Time rounds. fedcore's time includes creating the Update objects; torch's tensors exist before.

    The plain additions do a fifth of the work and are shown for information.
    """
    work = Work(rows_and_weights, clients, n)
    rows, _ = work.arrays
    server = Server(np.zeros(n, np.float32), method, clients=clients, lr=0.1)
    versus(
        f"{method}, a whole Server.round of {clients} NumPy rows x {n:,}, making the updates counted",
        lambda: server.round([Update(client, y, 1) for client, y in enumerate(rows)]),
        {
            ALIKE: work.rival(torch_round if method == "FedAvg" else torch_round_with_rows),
            "bare torch acc.add_(x, alpha=w)": work.rival(torch_add),
        },
        targets={ALIKE: 1.0 if method == "FedAvg" else 1 / 1.5},
        bytes=4 * clients * n,
        calls=100,
    )
