"""Rounds of a server on the GPU beside torch's and the CPU's, and cold rows: ``python -m bench.gpu.rounds``."""

from functools import cache, partial

import numpy as np

from bench.gpu import rivals
from bench.gpu.arrays import REAL, Placed
from bench.gpu.bandwidth import MODEL
from bench.gpu.lines import line, show
from bench.gpu.stopwatch import TIMES, host_seconds, rivals_seconds
from fedcore import Compute, Server, Storage, Update
from fedcore.native import core

N, CLIENTS = (MODEL, 32) if REAL else (4_000, 3)
RATE, STEPS = 0.1, 5
UPLOADS = 16  # rows that cross the bus one after another
METHODS = {"FedAvg": 1, "MIFA": 3, "MimiC": 3}  # vectors that a client's update moves
TORCH, CPU = 2.5, 20.0  # how many times ours the best torch formulation's time is due to be, and the CPU's


@cache
def models():
    """What clients send: near zero, where the server begins."""
    rng = np.random.default_rng(3)
    return [(0.01 * rng.normal(size=N)).astype(np.float32) for _ in range(CLIENTS)]


def round_of(server, sent):
    updates = [Update(client, y, steps=STEPS) for client, y in enumerate(sent)]
    return lambda: server.round(updates)


def server_of(method, **options):
    return Server(np.zeros(N, np.float32), method, CLIENTS, lr=RATE, **options)


def on_device(method, medium="cuda", **storage):
    return server_of(method, compute=Compute(device="cuda"), storage=Storage(medium=medium, **storage))


def by_torch(method, sent):
    """By name, functions that run the round by torch; the first result is held to the server's."""
    import torch

    def zeros():
        return torch.zeros(N, device="cuda")

    v = zeros() if method == "MimiC" else None
    scale, gamma = 1 / (RATE * STEPS), RATE * STEPS
    made = rivals.Round(zeros(), zeros(), [zeros() for _ in sent], v, scale, gamma, CLIENTS)
    if method == "MIFA":
        made.one_by_one(sent)
        server = on_device(method)
        round_of(server, sent)()
        np.testing.assert_allclose(server.x.to_host(), made.x.cpu().numpy(), rtol=1e-3, atol=1e-5)
    return made.ways(sent)


def rounds(method):
    """A line: a whole round of a server, its updates made and checked, against torch and the CPU."""
    here = models()
    sent = [Placed(y, own=not REAL) for y in here]
    there, others = [y.array for y in sent], {}
    if REAL:
        ways = {} if method == "FedAvg" else by_torch(method, there)
        others = rivals_seconds(ways, host_seconds)
        others["the CPU"] = host_seconds(round_of(server_of(method), here), 3)
    ours = host_seconds(round_of(on_device(method), there), TIMES)
    targets = {"the CPU": CPU} | {name: TORCH for name in others if name.startswith("torch")}
    moved = 4 * N * CLIENTS * METHODS[method]
    return line(f"a round of {method}, {CLIENTS} clients of {N:,}", ours, moved, rivals=others, targets=targets)


def from_host_memory(method, hot):
    """A line: a round whose rows lie in host memory, to which it writes them, with or without copies on the device."""
    sent = [Placed(y, own=not REAL) for y in models()]
    server = on_device(method, "ram", cached_rows=CLIENTS if hot else 0)
    run = round_of(server, [y.array for y in sent])

    def whole():
        server.broadcast(range(CLIENTS))  # cold rows come while clients train
        run()

    what = f"a round of {method}, rows in host memory, {'hot' if hot else 'every one cold'}"
    return line(what, host_seconds(whole, 5), 4 * N * CLIENTS * (1 if hot else 2))


def bus():
    """Lines: rows to the device, through fedcore's copy stream and out of memory of either kind."""
    pageable, to, stream = np.ones(N, np.float32), core.DeviceArray(N, "float32"), core.CopyStream()
    sources, floor = {"pageable": pageable}, None
    if REAL:
        import torch

        pinned, there = torch.ones(N).pin_memory(), torch.empty(N, device="cuda")
        sources["pinned"] = pinned

        def copies():
            for _ in range(UPLOADS):
                there.copy_(pinned, non_blocking=True)

        floor = 4 * N * UPLOADS / host_seconds(copies, 5)

    def upload(source):
        for _ in range(UPLOADS):
            stream.upload(source, to)
        stream.wait()

    for name, source in sources.items():
        due = 0.85 if name == "pinned" else None
        took = host_seconds(partial(upload, source), 5)
        yield line(f"{UPLOADS} rows to the device, {name}", took, 4 * N * UPLOADS, floor=floor, due=due)


def main():
    for method in METHODS:
        show(rounds(method))
    for hot in (True, False):
        show(from_host_memory("MIFA", hot))
    for one in bus():
        show(one)


if __name__ == "__main__":
    main()
