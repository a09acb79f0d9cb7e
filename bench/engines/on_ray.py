"""The cost of the Ray engine without training, and of the same clients in one process, on Ray and in Flower.

    .venv/bin/python -m bench.engines.on_ray overhead [ROW...]
    .venv/bin/python -m bench.engines.on_ray trained [--short]
    .venv/bin/python -m bench.engines.on_ray large [--short]

Each measurement runs in a separate process, since Flower's simulation starts its own Ray. Compare the CPU seconds,
since the wall seconds include other load of the machine.
"""

import itertools
import json
import os
import subprocess
import sys
import time
import warnings
from dataclasses import replace

import numpy as np

WORKERS, STORE_BYTES = 2, 2 << 30
OVERHEAD = (
    (4_810, 64, 64),
    (4_810, 64, 1),
    (4_810, 1_024, 64),
    (44_426, 64, 1),
    (44_426, 64, 8),
    (1_000_000, 32, 1),
    (11_700_000, 16, 1),
)
"""n, S, and the most clients per task."""
MODELS = {"mlp": (30, 48, 5, 12), "lenet": (16, 250, 1, 6)}
"""The number of clients, the examples and epochs of each client, and the rounds; the first round does not count."""
LARGE = (11_700_000, 16, 6)
"""n, the clients, which return the model unchanged, and the rounds; the first round does not count."""
OFFLINE = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def problem(model):
    """Return noise as examples, and each client's indices."""
    from fedcore.sim.data import Dataset

    clients, examples, *_ = MODELS[model]
    shape = (1, 28, 28) if model == "lenet" else (64,)
    random = np.random.default_rng(0)
    x = random.random((clients * examples, *shape), dtype=np.float32)
    y = random.integers(0, 10, len(x))
    return Dataset("noise", x, y, x[:100], y[:100], classes=10), np.split(np.arange(len(x)), clients)


def one_round(server, updates, ids):
    return server.round(updates(server.broadcast(ids)))


def measured(do, rounds, workers):
    """Return the CPU milliseconds per round by process, and the median and least wall milliseconds."""
    from bench.engines.processes import seconds

    walls, before = [], seconds(workers)
    for _ in range(rounds):
        began = time.perf_counter()
        do()
        walls.append(1e3 * (time.perf_counter() - began))
    used = seconds(workers) - before
    return {"cpu": [1e3 * each / rounds for each in used], "wall": [float(np.median(walls)), min(walls)]}


def idle():
    """Return a trainer class that does not train."""
    import fedcore
    from fedcore.sim.ray_engine import Trained, Trainer

    class Idle(Trainer):
        """A worker that returns the model unchanged."""

        def prepare(self, *_):
            fedcore.set_threads(1)
            return os.getpid()

        def train(self, header, x, *_):
            clients = len(header.clients)
            return Trained([np.array(x) for _ in range(clients)], [], [1] * clients, [0.1] * clients)

    return Idle


def overhead(rows):
    """Print a line for each size."""
    import fedcore
    from fedcore.cluster.workers import Session
    from fedcore.sim import ray_engine as engine
    from fedcore.sim.nets import build
    from fedcore.sim.ray_engine import Ray

    engine.Trainer = idle()
    data, _ = problem("mlp")
    with Session(cpus=WORKERS, object_store_memory=STORE_BYTES):
        for n, S, group in [OVERHEAD[row] for row in rows] or OVERHEAD:
            parts = [np.array([0])] * S
            with Ray(build("mlp", seed=0), data, parts, batch=1, steps=1, seed=0, workers=WORKERS, group=group) as work:
                pids = set(work.processes())
                server = fedcore.Server(np.zeros(n, np.float32), "FedAvg", clients=S, lr=0.1)

                def do(server=server, work=work, S=S):
                    one_round(server, work.updates, range(S))

                do()
                do()
                results = measured(do, 9, lambda _, pid, pids=pids: pid in pids)
            ys = [np.zeros(n, np.float32) for _ in range(S)]
            ready = [fedcore.Update(client, y, 1, keep=True) for client, y in enumerate(ys)]
            alone = measured(lambda server=server, ready=ready: server.round(ready), 9, lambda *_: False)["cpu"][0]
            driver, workers, others = results["cpu"]
            added = (sum(results["cpu"]) - alone) / S
            print(
                f"| {n:,} | {S:,} | {group} | {driver:.0f} / {workers:.0f} / {others:.0f} ({alone:.1f}) "
                f"| {results['wall'][0]:.0f} | {added:.2g} |",
                flush=True,
            )


def trained(model, how, rounds):
    """Train the same clients in one of the ways; return {"cpu", "wall", "x"}, with x = sum_j |x_j| at the end."""
    import torch

    import fedcore
    from fedcore.cluster.workers import Session
    from fedcore.sim.in_process import InProcess
    from fedcore.sim.nets import build
    from fedcore.sim.ray_engine import Ray

    torch.set_num_threads(1)
    fedcore.set_threads(1)
    clients, _, epochs, _ = MODELS[model]
    (data, parts), given = problem(model), {"batch": 16, "epochs": epochs, "seed": 0}
    if how == "Flower":
        return flower(model, rounds)
    if how == "in process":
        work, workers = InProcess(build(model, seed=0), data, parts, **given), set()
    else:
        Session(cpus=WORKERS, object_store_memory=STORE_BYTES)
        work = Ray(build(model, seed=0), data, parts, workers=WORKERS, **given)
        workers = set(work.processes())
    server = fedcore.Server(work.initial, "FedAvg", clients=clients, lr=0.05)
    one_round(server, work.updates, range(clients))
    results = measured(
        lambda: one_round(server, work.updates, range(clients)), rounds - 1, lambda _, pid: pid in workers
    )
    work.close()
    return results | {"x": float(np.abs(server.x).sum())}


def large(how, rounds):
    """Run rounds of clients that return a large model unchanged; return {"cpu", "wall", "x"}."""
    import fedcore
    from fedcore.cluster.workers import Session
    from fedcore.sim import ray_engine as engine
    from fedcore.sim.nets import build
    from fedcore.sim.ray_engine import Ray

    n, clients, _ = LARGE
    fedcore.set_threads(1)
    x0 = np.full(n, 0.5, np.float32)
    if how == "Flower":

        def train(arrays, number, partition):
            return [array.copy() for array in arrays], 1

        return simulated(train, [x0], clients, rounds)
    server = fedcore.Server(x0, "FedAvg", clients=clients, lr=0.1)
    if how == "in process":
        ready = [fedcore.Update(client, x0.copy(), 1, keep=True) for client in range(clients)]
        server.round(ready)
        results = measured(lambda: server.round(ready), rounds - 1, lambda *_: False)
    else:
        engine.Trainer = idle()
        Session(cpus=WORKERS, object_store_memory=STORE_BYTES)
        parts, (data, _) = [np.array([0])] * clients, problem("mlp")
        with Ray(build("mlp", seed=0), data, parts, batch=1, steps=1, seed=0, workers=WORKERS, group=1) as work:
            workers = set(work.processes())
            one_round(server, work.updates, range(clients))
            results = measured(
                lambda: one_round(server, work.updates, range(clients)), rounds - 1, lambda _, pid: pid in workers
            )
    return results | {"x": float(np.abs(server.x).sum())}


def flower(model, rounds):
    """Run Flower's FedAvg in its simulation with the same minibatches, steps and rates."""
    from fedcore.model import Layout
    from fedcore.sim.nets import build

    clients, _, epochs, _ = MODELS[model]
    kept = {}

    def train(arrays, number, partition):
        import torch

        import fedcore
        from bench.engines.on_ray import problem
        from fedcore import Server
        from fedcore.sim.in_process import InProcess

        if "work" not in kept:  # kept by the actor for all its clients, the best case for Flower
            torch.set_num_threads(1)
            fedcore.set_threads(1)
            module = build(model, seed=0)
            data, parts = problem(model)
            kept["layout"] = Layout.of(module)
            kept["work"] = InProcess(module, data, parts, batch=16, epochs=epochs, seed=0)
        x = np.concatenate([array.ravel() for array in arrays])
        server = Server(x, "FedAvg", clients=clients, lr=0.05)
        broadcast = replace(server.broadcast([partition]), round=number)
        (update,) = kept["work"].updates(broadcast)
        sizes = np.cumsum([array.size for array in arrays])[:-1]
        ys = [part.reshape(array.shape) for part, array in zip(np.split(update.value, sizes), arrays, strict=True)]
        return ys, update.examples

    state = [tensor.detach().numpy() for tensor in build(model, seed=0).parameters()]
    return simulated(train, state, clients, rounds)


def simulated(work, state, clients, rounds):
    """Run rounds of Flower's FedAvg in its simulation.

    Args:
        work: a client's function, from (arrays, round, partition) to (arrays, examples).
        state: the arrays of the first model.
    """
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    from bench.engines.processes import seconds

    client_app, server_app, results = ClientApp(), ServerApp(), {}

    @client_app.train()
    def train(message, context):
        arrays = message.content["arrays"].to_numpy_ndarrays()
        number = message.content["config"]["server-round"] - 1
        ys, examples = work(arrays, number, int(context.node_config["partition-id"]))
        content = {"arrays": ArrayRecord(ys), "metrics": MetricRecord({"num-examples": examples})}
        return Message(RecordDict(content), reply_to=message)

    @server_app.main()
    def main(grid, context):
        marks = []
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
        configure = strategy.configure_train

        def mark(*arguments):
            marks.append((time.perf_counter(), seconds(is_actor)))
            return configure(*arguments)

        strategy.configure_train = mark
        result = strategy.start(grid, ArrayRecord(state), rounds)
        marks.append((time.perf_counter(), seconds(is_actor)))
        walls = [1e3 * (after[0] - before[0]) for before, after in itertools.pairwise(marks[1:])]
        used = marks[-1][1] - marks[1][1]
        results.update(cpu=[1e3 * each / len(walls) for each in used], wall=[float(np.median(walls)), min(walls)])
        results["x"] = float(sum(np.abs(array).sum() for array in result.arrays.to_numpy_ndarrays()))

    def is_actor(name, _):
        return name.startswith("ray::ClientApp")

    init = {"num_cpus": WORKERS, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    resources = {"client_resources": {"num_cpus": 1}, "init_args": init}
    run_simulation(server_app, client_app, clients, backend_config=resources)
    return results


def compare(models, short):
    """Print a line for each model and way; each way runs in a separate process."""
    for model, (clients, rounds) in models.items():
        for how in ("in process", "Ray", "Flower"):
            command = [sys.executable, "-W", "ignore", "-m", "bench.engines.on_ray", "one", model, how]
            command.append(str(3 if short else rounds))
            done = subprocess.run(
                command,
                env=os.environ | OFFLINE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                check=True,
            )
            results = json.loads(done.stdout.splitlines()[-1])
            driver, workers, others = results["cpu"]
            print(
                f"| {model}, {clients} clients | {how} | {driver:.0f} / {workers:.0f} / {others:.0f} "
                f"| {sum(results['cpu']):.0f} | {results['wall'][0]:.0f} ({results['wall'][1]:.0f}) "
                f"| {results['x']:.4f} |",
                flush=True,
            )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    command, *words = sys.argv[1:]
    if command == "one":
        model, how, rounds = words
        results = large(how, int(rounds)) if model == "large" else trained(model, how, int(rounds))
        print(json.dumps(results), flush=True)
    else:
        from bench import machine

        print(machine.head(machine.describe()), flush=True)
        if command == "overhead":
            overhead([int(row) for row in words])
        else:
            sizes = (
                {"large": LARGE[1:]}
                if command == "large"
                else {name: (own[0], own[-1]) for name, own in MODELS.items()}
            )
            compare(sizes, "--short" in words)
