"""A small federation on the digits, in Flower and as fedcore's own simulation of the same participation."""

import copy

import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp

from fedcore import Server
from fedcore.adapters import flower
from fedcore.adapters.flower import examples_reply
from fedcore.adapters.flower.training import train
from fedcore.sim.data import Dataset
from fedcore.sim.in_process import InProcess
from tests.adapters.flower.local_grid import LocalGrid

FEATURES, CLASSES, BATCH, STEPS, SEED = 12, 3, 5, 4, 3
NODES = [2**64 - 5, 2**63 + 11, 17, 2**40, 123456789]
"""Flower's ids are 64-bit; in this order they are not sorted, and two are past the signed range."""
METHODS = {
    "FedAvg": {},
    "FedProx": {"mu": 0.5},
    "SCAFFOLD": {},
    "MIFA": {"wait": False},
    "MimiC": {},
    "FlexibleFedAvg": {"scheme": "C", "local_steps": STEPS},
    "FedAvgM": {},
    "SCAFFOLDM": {},
    "FedAvgMVR": {},
    "MBSTORM": {},
    "SCAFFOLDMVR": {},
    "LocalDescent": {},
}


def make_module():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 7), torch.nn.BatchNorm1d(7), torch.nn.ReLU(), torch.nn.Linear(7, CLASSES)
    )


def make_data(clients=5):
    """Every client another number of examples, of mostly one class."""
    random = np.random.default_rng(0)
    sizes = [20 + 7 * i for i in range(clients)]
    x = random.normal(size=(sum(sizes), FEATURES)).astype(np.float32)
    y = np.concatenate([np.full(size, i % CLASSES) for i, size in enumerate(sizes)]).astype(np.int64)
    x += y[:, None] * 0.5
    ends = np.cumsum(sizes)
    parts = [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return Dataset("made", x, y, x[:1], y[:1], classes=CLASSES), parts


def make_app(client, dataset, parts):
    app = ClientApp()
    x, y = (torch.from_numpy(array[parts[client]]) for array in (dataset.train_x, dataset.train_y))

    @app.train()
    def _(message, context):
        order = {"batch": BATCH, "steps": STEPS, "seed": SEED, "client": client}
        return train(message, make_module(), x, y, metrics={"loss": client}, **order)

    @app.query()
    def _(message, context):
        return examples_reply(message, len(y))

    return app


def make_grid(spoil=None):
    return LocalGrid({node: (make_app(i, *make_data()), {}) for i, node in enumerate(NODES)}, spoil)


def initial_arrays():
    return ArrayRecord(make_module().state_dict())


def make_strategy(method, **options):
    """A strategy that asks all connected nodes, does not evaluate, and does not end a run that accepts nothing."""
    how = {"lr": 0.1, "fraction_evaluate": 0.0, "min_available_nodes": 1, "min_train_nodes": 1, "poll": 0.001}
    how["abort_after"] = None
    name = "FedAvgLocalM" if method == "FedAvgM" else method
    return getattr(flower, name)(**{**how, **METHODS[method], **options})


def run(method, grid, rounds, *, before_round=lambda t: None, timeout=5, **options):
    """The strategy and its result; ``before_round`` gets the number of finished rounds."""
    strategy = make_strategy(method, **options)
    seen = lambda t, arrays: before_round(t)  # noqa: E731  before the first round and after each
    return strategy, strategy.start(grid, initial_arrays(), rounds, timeout=timeout, evaluate_fn=seen)


def make_engine(steps=STEPS):
    return InProcess(make_module(), *make_data(), batch=BATCH, steps=steps, seed=SEED)


def simulate(method, options, participation, *, lr=0.1, steps=STEPS, **settings):
    """fedcore's own run; ``participation`` lists the clients of each round, which are registered with their first."""
    from fedcore.algorithms import named

    engine, algorithm = make_engine(steps), named(method, **options)
    sizes = {i: len(part) for i, part in enumerate(make_data()[1])}
    needs = algorithm.needs_shares
    server = Server(make_module(), algorithm, [], lr=lr, **settings)
    for cohort in participation:
        new = [client for client in cohort if client not in server.clients]
        updates = engine.updates(server.broadcast(cohort, newcomers=new))
        with server.open_round(newcomers={client: sizes[client] for client in new} if needs else new) as round:
            for update in updates:
                round.add_batch([copy.copy(update)])
    return server
