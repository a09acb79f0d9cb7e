"""Flower's FedAvg against fedcore's in Flower's simulation, with Ray actors as clients: a server's memory and rounds.

    .venv/bin/pip install "flwr[simulation]"
    .venv/bin/python -m bench.adapters.simulation

Every strategy runs in a separate process, which holds the server and Flower's link state. The benchmark prints by how
much the resident memory of that process rises, without memory shared with Ray's processes. The clients return the model
unchanged. The first round also starts Ray's actors.
"""

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

CLIENTS, ROUNDS, ACTORS = 60, 3, 2
OBJECT_STORE_BYTES = 1 << 30
STRATEGIES = ("Flower's FedAvg", "fedcore's FedAvg")


def anonymous_mib():
    """Return this process's resident memory in MiB, without files and shared memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status: expected RssAnon, got none")


class Peak(threading.Thread):
    """A thread that records the peak of the resident memory, sampled every 5 ms."""

    def __init__(self):
        super().__init__(daemon=True)
        self.mib = self.before = anonymous_mib()

    def run(self):
        while True:
            self.mib = max(self.mib, anonymous_mib())
            time.sleep(0.005)


def simulate(name, clients, rounds):
    """Run a simulation in this process; return the peak of the added memory in MiB, and each round's seconds."""
    from flwr.app import Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    from bench.rivals.aggregate import resnet18
    from bench.rivals.flower import replies
    from fedcore.adapters import flower

    client_app, server_app = ClientApp(), ServerApp()
    [[model]] = replies(1, resnet18())
    peak, began, found = Peak(), [], {}

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        content = {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 10})}
        return Message(RecordDict(content), reply_to=message)

    def timed(strategy):
        configure = strategy.configure_train

        def configure_train(*arguments):
            began.append(time.perf_counter())
            return configure(*arguments)

        strategy.configure_train = configure_train
        return strategy

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        needed = {"fraction_evaluate": 0.0, "min_train_nodes": clients, "min_available_nodes": clients}
        strategy = timed(FedAvg(**needed) if name == STRATEGIES[0] else flower.FedAvg(lr=0.1, **needed))
        peak.start()
        result = strategy.start(grid, model, rounds)
        began.append(time.perf_counter())
        found["same"] = all(
            abs(after - before).max() < 1e-4
            for after, before in zip(result.arrays.to_numpy_ndarrays(), model.to_numpy_ndarrays(), strict=True)
        )

    run_simulation(
        server_app,
        client_app,
        clients,
        backend_config={
            "client_resources": {"num_cpus": 1},
            "init_args": {
                "num_cpus": ACTORS,
                "object_store_memory": OBJECT_STORE_BYTES,
                "include_dashboard": False,
            },
        },
    )
    if not found.get("same"):
        raise RuntimeError(f"{name}: expected the model that all clients sent back, got another one")
    return {"mib": peak.mib - peak.before, "rounds": [b - a for a, b in itertools.pairwise(began)]}


def main():
    """Run the strategies one after the other, and print a line for each."""
    offline = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    clients, rounds = (8, 2) if "--short" in sys.argv else (CLIENTS, ROUNDS)
    for name in STRATEGIES:
        command = [sys.executable, "-W", "ignore", "-m", "bench.adapters.simulation", name, str(clients), str(rounds)]
        done = subprocess.run(command, env=os.environ | offline, stdout=subprocess.PIPE, text=True, check=True)
        results = json.loads(done.stdout.splitlines()[-1])
        seconds = ", ".join(f"{each:.1f}" for each in results["rounds"])
        print(f"{name}: {clients} clients, {results['mib']:,.0f} MiB added, rounds of {seconds} s", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(json.dumps(simulate(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))), flush=True)
    else:
        main()
