"""A user's rule, optimizer, store, server, executor and framework, on fedcore's public names alone."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcore import ClientStore, Server
from fedcore.adapters.session import add_reply, newcomers
from fedcore.cluster.workers import Processes
from fedcore.rules import Filter, Scale


@dataclass(frozen=True)
class RejectFast(Filter, Scale):
    """Reject clients that report more steps than ``most``, and halve the updates of those with more than ``usual``."""

    most: int = 50
    usual: int = 3

    def decide(self, group):
        fast = {i: steps for i, steps in enumerate(group.steps) if steps > self.most}
        return {i: f"steps={steps:g}: must be at most {self.most}" for i, steps in fast.items()}

    def weights(self, group):
        return np.where(group.steps > self.usual, 0.5, 1.0)


@dataclass(frozen=True)
class Lion:
    """u = sign(beta1 m + (1 - beta1) v), m' = beta2 m + (1 - beta2) v."""

    elementwise: ClassVar[bool] = True
    eta: float = 0.003
    beta1: float = 0.9
    beta2: float = 0.99

    def rate(self, round):
        return self.eta

    def start(self, n):
        return (np.zeros(n, np.float32),)

    def turn(self, v, moments, x, *, gamma, moments_out, x_out):
        (m,), (m_out,) = moments, moments_out
        x_out[:] = x - np.float32(gamma) * np.sign(self.beta1 * m + (1 - self.beta1) * v)
        m_out[:] = self.beta2 * m + (1 - self.beta2) * v


class LoggedStore:
    """A store that passes everything on to a ``ClientStore``, and lists the rounds that it committed."""

    def __init__(self, store: ClientStore):
        self.store, self.rounds = store, []

    def __getattr__(self, name):
        return getattr(self.store, name)

    def __len__(self):
        return len(self.store)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.store.close()

    def commit(self, round, *args, **options):
        self.store.commit(round, *args, **options)
        self.rounds.append(round)


class WatchedServer(Server):
    """A server that keeps the norm of x after each round of ``round``."""

    def round(self, updates):
        report = super().round(updates)
        self.norms = [*getattr(self, "norms", []), float(np.linalg.norm(np.float64(self.x)))]
        return report


class CountingProcesses(Processes):
    """An executor that counts the calls of its workers."""

    calls = 0

    def submit(self, worker, method, *arguments):
        self.calls += 1
        return super().submit(worker, method, *arguments)


def federation(algorithm, clients, *, rounds, x0, storage=None, **options):
    """A framework: clients are functions of the round and the model, by id, that return an ``Update`` or None."""
    server, reports = Server.open(storage, x0, algorithm, [], **options), []
    while server.round_number < rounds:
        sent, task = server.tensors(), server.round_number
        with server.open_round(newcomers=newcomers(server, clients, None)) as opened:
            for client, work in clients.items():
                if (answer := work(task, sent)) is not None:
                    add_reply(opened, client, lambda a=answer, c=client: a._replace(client=c))
        reports.append(opened.report)
    return server, reports, server.tensors()
