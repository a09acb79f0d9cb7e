"""Three sites that train a small net, and fedcore's own simulation of them."""

import numpy as np
import torch

from fedcore import Server
from fedcore.adapters.nvflare import Trainer, order, reply
from fedcore.algorithms import REGISTRY, named
from fedcore.algorithms.local_rules import minibatches
from fedcore.sim.data import Dataset
from fedcore.sim.in_process import InProcess

NAMES, ROUNDS = ["site-1", "site-2", "site-3"], 4


RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(60, 4)).astype(np.float32), RNG.integers(0, 3, 60)
PARTS = [np.arange(0, 10), np.arange(10, 35), np.arange(35, 60)]


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


def x0():
    return {name: tensor.numpy().copy() for name, tensor in net().state_dict().items()}


def sites(names=NAMES):
    """Each trains on its part, with the minibatches that fedcore's own engine takes."""

    def site(client):
        trainer = Trainer(net())
        part = PARTS[client]
        inputs, labels = torch.from_numpy(X[part]), torch.from_numpy(Y[part])

        def train(received):
            batch = order(received).local_rule.batch(8)
            batches = minibatches(len(part), batch, steps=3, seed=0, round=received.current_round, client=client)
            return trainer.train(received, inputs, labels, batches)

        return train

    return {name: site(int(name[-1]) - 1) for name in names}


def engine():
    return InProcess(net(), Dataset("mine", X, Y, X, Y, classes=3), PARTS, batch=8, steps=3, seed=0)


def straight(algorithm, rounds, cohorts):
    """fedcore's own simulation of the same participation, of clients that are registered with their first reply."""
    simulated = engine()
    server = Server(net(), algorithm, [], lr=0.1)
    for round in range(rounds):
        new = [client for client in cohorts[round] if client not in server.clients]
        updates = simulated.updates(server.broadcast(cohorts[round], newcomers=new))
        with server.open_round(newcomers=new) as opened:
            for update in updates:
                opened.add_batch([update])
    return server


WITHOUT_SIZES = [name for name in REGISTRY if not (named(name).needs_shares or named(name).own_starts)]


def lie(**change):
    """A client that changes an honest reply."""

    def answer(received):
        honest = {
            "params": {name: array - np.float32(0.1) for name, array in received.params.items()},
            "steps": 3,
            "examples": 10,
        }
        honest |= {key: made(honest["params"]) if callable(made) else made for key, made in change.items()}
        return reply(honest.pop("params"), **honest)

    return answer
