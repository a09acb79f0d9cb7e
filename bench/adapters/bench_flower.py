"""fedcore's FedAvg in Flower against Flower's FedAvg: the aggregation, and a server's memory and rounds."""

import numpy as np
from flwr.app import ConfigRecord

import fedcore
from bench.alone import Alone, Work
from bench.line import Line
from bench.probe import read_floor
from bench.rivals.aggregate import resnet18
from bench.rivals.flower import Fixed, NoOp, flower_fedavg, flower_rounds, model_and_clients, replies
from fedcore import Compute, kernels
from fedcore.adapters import npy
from fedcore.adapters.flower import FedAvg, StreamingGrid

S, CLIENTS = 64, 60
FOLD = 32
"""The replies per pass if all are in memory; every pass also reads and writes the sum."""


def fedcore_fedavg(records):
    """Return a function that sends fedcore's messages and aggregates one reply per node, with Flower's messages."""
    strategy, grid = (
        FedAvg(lr=0.1, compute=Compute(batch_size=FOLD), fraction_evaluate=0.0),
        StreamingGrid(Fixed(records)),
    )
    arrays = records[0]

    def run():
        nonlocal arrays
        messages = strategy.configure_train(1, arrays, ConfigRecord(), grid)
        arrays = strategy.aggregate_train(1, grid.send_and_receive(messages))[0]
        return arrays

    return run


def fold(models):
    """Return the fold of the replies without their reading, the step and the new record; see the fold floor too."""
    x = np.zeros(sum(part.size for part in models[0]), np.float32)
    groups, sums = [models[i : i + FOLD] for i in range(0, len(models), FOLD)], [np.empty_like(x) for _ in range(2)]

    def run():
        for i, group in enumerate(groups):
            acc, ones = sums[1 - i % 2] if i else None, np.ones(len(group))
            kernels.accumulate(acc, [x] * len(group), group, ones, ones, out=sums[i % 2])

    return run


def fedcore_rounds(model, clients):
    """Return a function that creates a server and runs two rounds of fedcore's FedAvg with no-op clients."""
    grid = NoOp(model, clients)
    return lambda: FedAvg(lr=0.1, fraction_evaluate=0.0).start(grid, model, 2)


def bench_aggregation(versus, size):
    """Time the aggregation of S = 64 replies of 62 tensors, up to the record of the new model."""
    sizes = resnet18()
    work = Work(replies, size(S, 8), sizes)
    [records] = work.arrays
    tensors = [[npy.read(array.data) for array in record.values()] for record in records]
    outs = [np.empty_like(row) for row in tensors[0]]
    versus(
        f"Flower: aggregate_train, {len(records)} replies of {len(sizes)} tensors, {sum(sizes) / 1e6:.1f} M",
        fedcore_fedavg(records),
        {
            "fold floor": read_floor(tensors, fedcore.threads(), outs),
            "Flower's FedAvg": work.rival(flower_fedavg),
            "the fold alone": fold(tensors),
        },
        targets={"fold floor": 0.8, "Flower's FedAvg": 8.0, "the fold alone": 0.75},
        bytes=4 * len(records) * sum(sizes),
    )


def bench_server(benchmark, record, size):
    """Measure the resident peak and the seconds of two rounds with 60 no-op clients, in separate processes."""
    clients, sizes = size(CLIENTS, 8), resnet18()
    peaks, seconds = {}, {}
    for name, operation in (("Flower's FedAvg", flower_rounds), ("fedcore", fedcore_rounds)):
        with Alone(model_and_clients, (clients, sizes), operation, fedcore.threads()) as process:
            peaks[name], seconds[name] = process.peak(), process.turn().warm / 2
    benchmark.pedantic(lambda: None, rounds=1, iterations=1)
    mib = {name: peak / 2**20 for name, peak in peaks.items()}
    record(
        Line(
            f"Flower: two rounds, {clients} no-op clients of {sum(sizes) / 1e6:.1f} M: "
            + ", ".join(f"{name} {mib[name]:,.0f} MiB" for name in mib),
            ratios={
                "Flower's FedAvg, resident peak": peaks["Flower's FedAvg"] / peaks["fedcore"],
                "Flower's FedAvg, a round": seconds["Flower's FedAvg"] / seconds["fedcore"],
            },
            targets={"Flower's FedAvg, resident peak": 3.5, "Flower's FedAvg, a round": 1.0},
            seconds=seconds,
        )
    )
