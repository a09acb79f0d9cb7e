"""Batched against sequential client training, which determined ``MOST_PARAMETERS`` and ``BYTES``."""

import numpy as np
import pytest

import fedcore
from fedcore.sim.data import Dataset
from fedcore.sim.in_process import InProcess
from fedcore.sim.nets import build

pytestmark = pytest.mark.one_thread
STEPS = 10
# (model, shape of an example, batch)
CASES = {
    "lenet": ("lenet", (1, 28, 28), 16, {}),
    "cnn-cifar10": ("cnn-cifar10", (3, 32, 32), 16, {}),
    "logistic": ("logistic", (60,), 20, {}),
    "mlp": ("mlp", (1, 8, 8), 16, {}),
    "784-64-10": ("relu-mnist", (1, 28, 28), 32, {"hidden": [64]}),
    "relu-mnist": ("relu-mnist", (1, 28, 28), 32, {}),
    "mlp-mnist": ("mlp-mnist", (1, 28, 28), 10, {}),
    "mlp-cifar10": ("mlp-cifar10", (3, 32, 32), 32, {}),
}


@pytest.mark.parametrize("clients", [1, 8, 32])
@pytest.mark.parametrize("case", CASES)
def bench_together(versus, case, clients):
    """Time cohorts of several sizes, and of one client, whose bits must not depend on the cohort."""
    model, shape, batch, options = CASES[case]
    rng = np.random.default_rng(0)
    x, y = rng.random((clients * 100, *shape), np.float32), rng.integers(10, size=clients * 100)
    parts = np.split(np.arange(len(x)), clients)
    data = Dataset("noise", x, y, x[:10], y[:10], classes=10)

    def trained(together):
        module = build(model, seed=0, **options)
        engine = InProcess(module, data, parts, batch=batch, steps=STEPS, seed=0, together=together)
        server = fedcore.Server(engine.initial, "FedAvg", clients=clients, lr=0.01)
        return lambda: [None for _ in engine.updates(server.broadcast(range(clients)))]

    n = sum(p.numel() for p in build(model, seed=0, **options).parameters())
    versus(
        f"{case}, {n:,} parameters, batch {batch}: {clients} clients, {STEPS} steps each, together",
        trained(True),
        {"one by one": trained(False)},
        targets={"one by one": 1.0},
        bytes=None,
        rounds=7,
    )
