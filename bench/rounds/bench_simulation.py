"""Simulated rounds as in ``fedcore run``: the work of clients and server, and the record of each round."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

import fedcore
from bench.alone import Work
from bench.line import Line
from bench.rivals.simulation import LR, pfl_rounds, problem, torch_loop
from fedcore.sim.data import Dataset
from fedcore.sim.experiment.schema import Evaluate
from fedcore.sim.experiment.trial import TrialParts, rounds
from fedcore.sim.in_process import InProcess
from fedcore.sim.nets import build

pytestmark = pytest.mark.one_thread
CORES = fedcore.threads()
PFL, PLAIN = "pfl-research 0.6", "a plain torch loop"
# By model: (clients, examples per client, batch, epochs, rounds per call), and the target ratio to pfl.
CASES = {
    "lenet": ((8, 320, 16, 1, 1), 2.0),
    "cnn-cifar10": ((8, 320, 16, 1, 1), 1.0),
    "mlp": ((30, 48, 16, 5, 5), 5.0),
    "logistic": ((30, 200, 20, 5, 2), 5.0),
}


def simulated(work, threads=1):
    """Return a function that runs the rounds of one call and returns their records."""
    x, y, (model, clients, batch, epochs, count) = work.arrays
    dataset = Dataset("noise", x, y, x[:10], y[:10], classes=10)
    parts = np.split(np.arange(len(x)), clients)
    engine = InProcess(build(model, seed=0), dataset, parts, batch=batch, epochs=epochs, seed=0, threads=threads)
    server = fedcore.Server(engine.initial, "FedAvg", clients=clients, lr=LR)
    trial = TrialParts(server, engine, fedcore.participation.Always(clients))

    def run():
        until = server.round_number + count
        return list(rounds(trial, count=until, evaluate=Evaluate(every=until)))

    return run


@pytest.mark.parametrize("model", CASES)
def bench_simulation(versus, model):
    sizes, due = CASES[model]
    clients, examples, batch, epochs, count = sizes
    work = Work(problem, model, *sizes)
    rivals = {PLAIN: work.rival(torch_loop)}
    if find_spec("pfl"):
        rivals[PFL] = work.rival(pfl_rounds)
    missing = "" if find_spec("pfl") else " (pfl is not installed: pip install pfl==0.6.0)"
    title = f"{model}: {count * clients} client-rounds of {epochs} x {examples} examples, batch {batch}{missing}"
    ours = simulated(work)
    line = versus(title, lambda: ours() and None, rivals, targets={PFL: due}, bytes=None, rounds=7)
    for name, seconds in line.seconds.items():
        print(f"{name}: {count * clients / seconds:,.0f} client-rounds a second")


@pytest.mark.parametrize("model", ["lenet", "cnn-cifar10"])
def bench_all_cores(versus, model):
    """Time a trial on all cores: clients in threads with one torch thread each, against a loop on all torch threads."""
    sizes, _ = CASES[model]
    work, cores = Work(problem, model, *sizes), CORES
    fedcore.set_threads(cores)
    torch.set_num_threads(cores)
    in_threads = simulated(work, cores)

    def ours():
        torch.set_num_threads(1)
        in_threads()
        torch.set_num_threads(cores)

    clients, examples, batch, epochs, count = sizes
    title = f"{model}, {cores} cores: {count * clients} client-rounds of {epochs} x {examples} examples, batch {batch}"
    versus(title, ours, {PLAIN: work.rival(torch_loop)}, targets={PLAIN: 2.0}, bytes=None, rounds=9)


@pytest.mark.parametrize("model", CASES)
def bench_servers_share(benchmark, record, model):
    """Measure the share of a round that is not the clients' local work, without evaluation."""
    sizes, _ = CASES[model]
    run = simulated(Work(problem, model, *sizes))
    run()
    lines = [line for _ in range(6) for line in run()]
    benchmark.pedantic(run, rounds=1)
    server = np.median([sum(line.seconds[part] for part in ("broadcast", "aggregate")) for line in lines])
    local = np.median([line.seconds["local"] for line in lines])
    whole = "the round, without evaluation"
    record(
        Line(
            f"{model}: the server's share of a round is {server / (server + local):.1%}",
            {whole: float((server + local) / server)},
            targets={whole: 50.0},
            seconds={"fedcore": float(server), whole: float(server + local)},
        )
    )
