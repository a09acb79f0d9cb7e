"""Runs the method of the run's configuration, and writes each round's clients to a file."""

import json
import os
from pathlib import Path

from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp

from fedapp.task import LR, initial_model
from fedcore import Compute, Limits, RoundPolicy
from fedcore.adapters import flower

app = ServerApp()


@app.main()
def main(grid, context):
    out = Path(context.run_config["out"])
    (out / "pid").write_text(str(os.getpid()))
    method = context.run_config["method"]
    secure = {"limits": Limits(max_norm=100.0, max_examples=1000), "policy": RoundPolicy(min_clients=3)}
    options = secure if method.startswith("Secure") else {}
    if buffer := context.run_config["buffer"]:
        options = {"policy": RoundPolicy(buffer=buffer, max_staleness=4, discount=0.5)}
    strategy = getattr(flower, method)(
        lr=LR,
        storage=out / "state",
        compute=Compute(accumulator=context.run_config["accumulate"]),
        fraction_evaluate=0.0,
        min_train_nodes=3,
        min_available_nodes=3 if buffer else 4,
        **options,
    )

    def after_round(number, arrays):
        strategy.min_available_nodes = 3  # four at the start; then one may die
        if strategy.reports:
            report = strategy.reports[-1]
            line = {"round": report.round, "accepted": report.accepted, "known": [*strategy.server.clients]}
            line |= {
                "ages": report.ages.tolist(),
                "failed": [(failure.node, failure.code) for failure in strategy.failures],
                "grid": type(grid).__name__,
            }
            with (out / "rounds.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        (out / f"finished-{number}").touch()

    model = ArrayRecord({name: Array(values) for name, values in initial_model().items()})
    strategy.start(grid, model, context.run_config["rounds"], timeout=600, evaluate_fn=after_round)
    (out / "end").touch()
