"""Rounds of small models by each way to call them: CPU time on one thread, since most of it is not arithmetic."""

import numpy as np
import pytest
import torch

from bench.probe import read_floor
from bench.rivals import rounds
from bench.rivals.aggregate import rows_and_weights
from fedcore import RoundPolicy, Server, Update
from fedcore.adapters.session import add_reply
from fedcore.algorithms import MIFA

TORCH = "torch doing the same work"
SIZES = [(5, 4_810), (10, 62_006), (32, 10_000), (100, 1_000)]
METHODS = ["FedAvg", "MIFA", "MimiC", "SCAFFOLD"]
TENSORS = 10
DUE, DUE_WITH_ROWS = (1.0, 0.67, 0.4), (0.67, 0.5, 0.3)
"""Torch's time over that of ``round``, and of other ways with many and with few numbers."""


def by_round(server, ys):
    server.round([Update(client, y, 1) for client, y in enumerate(ys)])


def by_add(server, ys):
    with server.open_round() as opened:
        for client, y in enumerate(ys):
            opened.add(client, y, steps=1)


def by_session(server, ys):
    """Add replies as the adapters do."""
    with server.open_round() as opened:
        for client, y in enumerate(ys):
            add_reply(opened, client, lambda client=client, y=y: Update(client, y, 1, keep=True))


def by_push(server, ys):
    number = server.round_number
    for client, y in enumerate(ys):
        server.push([Update(client, y, 1, round=number)])


def by_write(server, ys):
    name = server.layout.slices[0].name
    with server.open_round() as opened:
        for client, y in enumerate(ys):
            incoming = opened.begin(client, steps=1)
            incoming.write(name, y)
            incoming.done()


def named(y):
    return {f"t{i}": part for i, part in enumerate(torch.from_numpy(y).chunk(TENSORS))}


WAYS = {"round": by_round, "add": by_add, "session": by_session, "push": by_push, "write": by_write}
FORMS = {"numpy": np.asarray, "torch": torch.from_numpy, "named": named, "bf16": lambda y: torch.tensor(y).bfloat16()}
CASES = [(way, "numpy", *size, method) for way in ("round", "add") for size in SIZES for method in METHODS]
CASES += [(way, "numpy", 32, 10_000, "FedAvg") for way in ("session", "push", "write")]
CASES += [("add", form, 32, 10_000, "FedAvg") for form in ("torch", "named", "bf16")]


@pytest.mark.cpu
@pytest.mark.parametrize(("way", "form", "clients", "n", "method"), CASES, ids=str)
def bench_small_round(versus, way, form, clients, n, method):
    """Time rounds of half of the clients, and compare x after two of them. fedcore's time includes the Updates."""
    rows, _ = rows_and_weights(clients, n)
    ys = [FORMS[form](row) for row in rows]
    server = Server(
        named(np.zeros(n, np.float32)) if form == "named" else np.zeros(n, np.float32),
        MIFA(wait=False) if method == "MIFA" else method,
        clients=2 * clients,
        lr=0.1,
        policy=RoundPolicy(buffer=clients, max_staleness=1) if way == "push" else RoundPolicy(),
    )

    def ours():
        WAYS[way](server, ys)
        return server.x

    tensors = [torch.from_numpy(row) for row in rows] if form == "numpy" else ys
    rivals = {
        TORCH: rounds.by_tensor(ys) if form == "named" else getattr(rounds, method)(torch, tensors),
        "NumPy doing the same work on vectors": getattr(rounds, method)(np, rows),
        "fold floor": read_floor(rows, 1, np.empty(n, np.float32), times=10),
    }
    if way == "round" and method == "FedAvg":
        rivals["torch, all models stacked"] = rounds.Stacked(torch, tensors)
    which = 0 if way == "round" else 1 if clients * n > 300_000 else 2
    versus(
        f"{method}, {clients} x {n:,} {form} by {way}, CPU time",
        ours,
        rivals,
        targets={TORCH: (DUE if method == "FedAvg" else DUE_WITH_ROWS)[which]},
        bytes=None,
        calls=10,
        rounds=5,
        agree=1e-2 if form == "bf16" else 1e-4,
    )
