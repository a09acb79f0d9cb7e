"""``fedcore.aggregate`` against NVFlare's and FedLab's averages, and against torch loops over state_dicts."""

import numpy as np
import pytest

import fedcore
from bench.alone import Work
from bench.probe import read_floor
from bench.rivals.state_dicts import fedlab_aggregate, nvflare_helper, state_dicts, torch_loop, usual_loop

CLIENTS, DISTINCT = 64, 32
FLOOR = "fold floor"
RIVALS = {
    "torch, acc.add_ a tensor": (torch_loop, 1.0),
    "torch, sum(x * w)": (usual_loop, 2.0),
    "NVFlare's helper": (nvflare_helper, 1.5),
}


def average(models, weights):
    return list(fedcore.aggregate(models, weights).values())


def bench_state_dicts(versus, size):
    """Average 64 models of 62 tensors and 11.7 M elements; each of 32 models in memory (1.5 GB) counts twice."""
    clients = size(CLIENTS, 8)
    work = Work(state_dicts, clients, min(clients, DISTINCT))
    models, weights = work.arrays
    rows = [[tensor.numpy() for tensor in model.values()] for model in models]
    outs = [np.empty_like(row) for row in rows[0]]
    pytest.importorskip("nvflare")
    versus(
        f"fedcore.aggregate, {clients} clients x 62 tensors",
        lambda: average(models, weights),
        {FLOOR: read_floor(rows, fedcore.threads(), outs)}
        | {name: work.rival(rival) for name, (rival, _) in RIVALS.items()},
        targets={FLOOR: 0.8} | {name: due for name, (_, due) in RIVALS.items()},
        bytes=4 * sum(tensor.numel() for model in models for tensor in model.values()),
        rounds=5,
        agree=1e-4,
    )


def bench_fedlab(versus, size):
    """Average 16 models, since FedLab stacks all models twice and would need 9 GB for 64."""
    pytest.importorskip("fedlab")
    clients = size(16, 4)
    work = Work(state_dicts, clients, clients)
    models, weights = work.arrays
    versus(
        f"fedcore.aggregate, {clients} clients x 62 tensors, FedLab",
        lambda: average(models, weights),
        {"FedLab's aggregator": work.rival(fedlab_aggregate)},
        targets={"FedLab's aggregator": 25.0},
        bytes=4 * sum(tensor.numel() for model in models for tensor in model.values()),
        rounds=5,
        agree=1e-4,
    )
