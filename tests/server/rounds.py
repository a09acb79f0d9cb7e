"""Servers of every method, and rounds that depend only on the server's state, for tests that stop and resume one.

As a program, ``python -m tests.server.rounds FOLDER ROUNDS`` resumes the server of a folder, and prints each round.
"""

import json
import sys

import numpy as np

from fedcore import Server, Update, algorithms
from fedcore.algorithms import rates
from tests.kit import flat
from tests.outsiders.house.mine import methods

N, n = 6, 70
SIZES = {i: 1 + i for i in range(N)}
METHODS = {name: {} for name in algorithms.REGISTRY} | {
    "FlexibleFedAvg": dict(local_steps=5),
    "MIFA, at once": dict(name="MIFA", wait=False),
    "MimiC, update units": dict(name="MimiC", units="update"),
    "MimiC, short history": dict(name="MimiC", history=2),
    "MimiC, on clients": dict(name="MimiC", placement="client"),
    "SCAFFOLD, two vectors": dict(name="SCAFFOLD", control="sent"),
    "SCAFFOLDM, on clients": dict(name="SCAFFOLDM", placement="client"),
    "Accelerated, an outsider": dict(name=f"{methods.__name__}:Accelerated", lam=0.5),
}


def algorithm_of(method, **options):
    """The algorithm of a name in ``METHODS``, also with other options."""
    arguments = METHODS[method] | options
    return algorithms.named(arguments.pop("name", method), **arguments)


def made(method, x0=None, **options):
    """A server of a method; options are those of ``Server``, of ``flat``, and a MimiC's ``history``."""
    history = {"history": options.pop("history")} if "history" in options else {}
    algorithm = algorithm_of(method, **history)
    options = dict(clients=SIZES, lr=rates.Exponential(0.1, 0.9)) | flat(**options)
    return Server(np.linspace(-1, 1, n, dtype=np.float32) if x0 is None else x0, algorithm, **options)


def steps_of(server, steps):
    """This number of steps, or the most that the method allows."""
    return min(steps, server.algorithm.most_steps or steps)


def updates_of(server):
    """The updates of a server's next round, which depend only on its state and the round."""
    rng = np.random.default_rng(server.round_number)
    cohort = np.flatnonzero(rng.random(N) < 0.6).tolist()
    broadcast = server.broadcast(cohort)
    for i in cohort:
        offset = broadcast.offset(i)
        y = server.x * np.float32(0.9) + rng.normal(size=server.layout.n).astype(np.float32)
        y -= 0 if offset is None else offset
        y -= 0 if broadcast.x_prev is None else np.float32(0.1) * broadcast.x_prev
        control = rng.normal(size=server.layout.n).astype(np.float32) if broadcast.second else None
        yield Update(i, y, steps=steps_of(server, 1 + i % 3), examples=i + 1, control=control)


def go_on(server, rounds):
    """Run rounds with the updates of ``updates_of``."""
    for _ in range(rounds):
        server.round(list(updates_of(server)))


def everything(server, clients=range(N)):
    """The whole state of a server, as bytes."""
    now = server._backend.snapshot
    vectors = {name: np.array(v).tobytes() for name, v in now.vectors(server.algorithm).items()}
    rows = {i: server.store.read(i).tobytes() for i in clients}
    written = {i: server.store.round_of(i) for i in clients}
    return vectors, rows, written, json.dumps(now.numbers())


def go_on_acknowledging(server, rounds, updates_of=updates_of):
    """Run rounds update by update, with those that a journal has; print each accepted update and finished round."""
    while server.round_number < rounds:
        updates = list(updates_of(server))
        with server.open_round() as round:
            before = set(round.clients)
            for update in updates:
                if update.client not in before and round.add(**update._asdict()):
                    print(f"{server.round_number} {update.client}\n", end="", flush=True)  # one write
        print(f"{server.round_number - 1} finished\n", end="", flush=True)


if __name__ == "__main__":
    resumed = Server.load(sys.argv[1])
    print("loaded", flush=True)
    while resumed.round_number < int(sys.argv[2]):
        go_on(resumed, 1)
        print(resumed.round_number, flush=True)
