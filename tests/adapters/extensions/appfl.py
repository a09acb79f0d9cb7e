"""APPFL: subclasses of its aggregator and scheduler in the real server agent, with its own FedAvg and with fedcore's.

This file is the agent's ``aggregator_path``, ``scheduler_path`` and ``model_path``.
"""

import tempfile

import numpy as np
import torch
from appfl.agent import ServerAgent
from appfl.algorithm.aggregator import FedAvgAggregator
from appfl.algorithm.scheduler import SyncScheduler
from appfl.config import ServerAgentConfig
from omegaconf import OmegaConf

from fedcore.adapters.appfl import Aggregator

CLIENTS, ROUNDS, LR, STEPS = 3, 4, 0.1, 2


class Net(torch.nn.Linear):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(5, 2)


class Theirs(FedAvgAggregator):
    """APPFL's own, with the model that the agent gives only to APPFL's own classes."""

    def __init__(self, aggregator_configs, logger=None):
        super().__init__(Net(), aggregator_configs, logger)


class Changes:
    """The model is changed after each round."""

    def aggregate(self, local_models, **metadata):
        model = super().aggregate(local_models, **metadata)
        changed = {name: 0.5 * tensor + 0.25 for name, tensor in model.items()}
        if hasattr(self, "global_state"):
            self.global_state = {name: tensor.clone() for name, tensor in changed.items()}
        return changed


class Filters:
    """A client does not count, and the others' models are changed."""

    def aggregate(self, local_models, **metadata):
        left = {i: {k: y / 2 for k, y in model.items()} for i, model in local_models.items() if i != "client-1"}
        return super().aggregate(left, **metadata)


class First:
    """The first model is another one."""

    def get_parameters(self, **more):
        model = super().get_parameters(**more)
        if not getattr(self, "is_begun", False):
            self.is_begun = True
            model = {name: tensor + 1 for name, tensor in model.items()}
        return model


class Logs:
    """Reads the models and the clients' metadata."""

    def aggregate(self, local_models, **metadata):
        self.facts = [*getattr(self, "facts", []), len(local_models), *map(float, metadata["loss"].values())]
        return super().aggregate(local_models, **metadata)


BODIES = (Changes, Filters, First, Logs)
for body in BODIES:
    for side, base in (("theirs", Theirs), ("aggregator", Aggregator)):
        globals()[f"{body.__name__}_{side}"] = type(body.__name__, (body, base), {})
Plain_theirs, Plain_aggregator = Theirs, Aggregator


class Waits(SyncScheduler):
    """A user's scheduler, which changes each model before it counts."""

    def schedule(self, client_id, local_model, **more):
        return super().schedule(client_id, {name: y / 2 for name, y in local_model.items()}, **more)


def agent_of(side, body="Plain", scheduler=None, folder=None, train=None, **kwargs):
    kwargs = {"client_weights_mode": "sample_size", **kwargs}
    if side != "theirs":
        kwargs = {"algorithm": "FedAvg", "lr": LR, "steps": STEPS, **kwargs}
        kwargs |= {"model_path": __file__, "model_name": "Net"}
    server = {
        "num_clients": CLIENTS,
        "num_global_epochs": ROUNDS,
        "aggregator_path": __file__,
        "aggregator": f"{body}_{side}",
        "aggregator_kwargs": kwargs,
        "scheduler": "SyncScheduler",
        "scheduler_kwargs": {"num_clients": CLIENTS, "same_init_model": False},
        "logging_output_dirname": folder,
    }
    if scheduler is not None:
        server |= {"scheduler_path": __file__, "scheduler": scheduler}
    clients = {"train_configs": train or {}, "model_configs": {"model_path": __file__, "model_name": "Net"}}
    return ServerAgent(ServerAgentConfig(OmegaConf.create(clients), OmegaConf.create(server)))


def trained(model, client):
    generator = torch.Generator().manual_seed(client)
    inputs, net = torch.randn(32, 5, generator=generator), Net()
    net.load_state_dict(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(inputs), (inputs[:, client % 5] > 0).long()).backward()
        optimizer.step()
    return net.state_dict()


def play(agent, rounds=ROUNDS):
    """The model after the rounds, as the clients get it, and the facts of an override."""
    for client in range(CLIENTS):
        agent.set_sample_size(f"client-{client}", 10 + client)
    model = agent.get_parameters(blocking=True, init_model=False)
    while not agent.training_finished() and rounds:
        rounds -= 1
        replies = {f"client-{i}": trained(model, i) for i in range(CLIENTS)}
        futures = [agent.global_update(name, y, loss=1.0, steps=STEPS) for name, y in replies.items()]
        model = futures[0].result()
    facts = np.array(getattr(agent.aggregator, "facts", []))
    return [np.concatenate([tensor.numpy().ravel() for tensor in model.values()]), facts]


def run(side, **how):
    with tempfile.TemporaryDirectory() as folder:
        return play(agent_of(side, folder=folder, **how))


def lost(side, why, rounds, **how):
    """A run that accepts no reply."""
    with tempfile.TemporaryDirectory() as folder:
        play(agent_of(side, folder=folder, limits={"max_norm": 1e-9}, num_global_epochs=rounds, **how), rounds)


RUNS = {
    "nothing": run,
    "equal weights": lambda side: run(side, client_weights_mode="equal"),
    **{body.__name__: lambda side, name=body.__name__: run(side, body=name) for body in BODIES},
    "scheduler": lambda side: run(side, scheduler="Waits"),
    "send_gradient: false": lambda side: run(side, train={"send_gradient": False}),
}
