"""Models, clients' examples, and runs of a server over an engine as one hash."""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
from torch import nn

from fedcore import Compute, Server, algorithms
from fedcore.errors import RangeError
from fedcore.sim.data import Dataset
from fedcore.sim.in_process import InProcess
from fedcore.sim.nets import build
from fedcore.sim.participation import Active
from fedcore.sim.ray_engine import Ray

METHODS = sorted(algorithms.REGISTRY.own - {"FedAWE"})  # its clients start from different models
MANY_VECTORS = ["FedAvg", "FedAvgMVR", "MBSTORM", "MimiC", "SCAFFOLD"]
"""Methods that send each kind of vector: offsets for all or for each client, x_prev, and second vectors."""
OTHERS = [method for method in METHODS if method not in MANY_VECTORS]
SHAPES = {"mlp": (64,), "lenet": (1, 28, 28)}
MARK = 7.0
"""The first input of the marked client."""


class Odd(nn.Linear):
    """A linear model that rejects the marked client."""

    def forward(self, inputs):
        if self.training and (inputs[:, 0] == MARK).any():
            raise RangeError("made up: a marked client")
        return super().forward(inputs)


def noise(model, clients, examples):
    """A random data set, and its parts: client i holds i examples more than the first client."""
    random = np.random.default_rng(0)
    sizes = examples + np.arange(clients)
    x = random.random((sizes.sum(), *SHAPES[model]), dtype=np.float32)
    y = random.integers(0, 10, len(x))
    return Dataset("noise", x, y, x[:50], y[:50], classes=10), np.split(np.arange(len(x)), np.cumsum(sizes)[:-1])


class Problem:
    """A model and data, with an engine in this process (``here``) and one on Ray (``there``)."""

    def __init__(self, model, clients, examples, *, module=None, together=None, **ray):
        self.clients = clients
        together = model == "mlp" if together is None else together
        options = {"batch": 8, "epochs": 2, "seed": 3, "together": together}
        data, parts = noise(model, clients, examples)
        self.module = (lambda: build(model, seed=0)) if module is None else module
        self.data, self.parts, self.options = data, parts, options
        self.here = InProcess(self.module(), data, parts, **options)
        self.there = self.ray(**ray)

    def ray(self, **options):
        return Ray(self.module(), self.data, self.parts, **{**self.options, "workers": 2, **options})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.there.close()

    def run(self, engine, method, rounds=4, seen=lambda t, update: None, *, compute=None, x0=None, **options):
        """A hash of a server's models and reports over some rounds of half the clients; ``seen`` gets each update."""
        sizes = dict(enumerate(map(len, self.parts)))
        options = {"lr": 0.05, "compute": replace(compute or Compute(), diagnostics=True)} | options
        with Server(engine.initial if x0 is None else x0, method, sizes, **options) as server:
            return self._hash(server, engine, rounds, seen)

    def _hash(self, server, engine, rounds, seen):
        digest = hashlib.sha256()
        for t in range(rounds):
            ids = np.sort(np.random.default_rng([t, 1]).choice(self.clients, self.clients // 2, replace=False))
            counts = None if server.algorithm.updates_once else 1 + np.arange(len(ids)) % 2
            active = Active(ids, np.linspace(0.3, 1, len(ids)), counts)
            with server.open_round() as round:
                for update in engine.updates(server.broadcast(ids), active):
                    round.add_batch([update])
                    seen(t, update)
            report = round.report
            digest.update(server.x.tobytes() + np.asarray(report.norms).tobytes())
            facts = report.accepted, report.rejected, report.diversity, report.correction_norm, report.steps
            digest.update(repr(facts).encode())
        return digest.hexdigest()


def program(name, *words):
    """Start a program that starts its own Ray."""
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(Path(__file__).parents[4])}
    command = [sys.executable, str(Path(__file__).parent / "programs" / name), *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)


def listening():
    """The addresses on which this process and its children listen."""
    found = set()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            connections = process.net_connections("tcp")
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        found |= {one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN}
    return found


def results(output):
    """The lines that ``machines.py`` printed, without those of Ray."""
    return [line for line in output.splitlines() if " bits, " in line]
