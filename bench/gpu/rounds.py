"""Rounds of a server on the GPU against torch and the CPU, and with cold rows: ``python -m bench.gpu.rounds``."""

from functools import cache, partial

import numpy as np

from bench.gpu import rivals
from bench.gpu.arrays import REAL, Placed
from bench.gpu.bandwidth import MODEL
from bench.gpu.lines import line, show
from bench.gpu.stopwatch import TIMES, host_seconds, rivals_seconds
from fedcore import Compute, Server, Storage, Update
from fedcore.arrays import core

N, CLIENTS = (MODEL, 32) if REAL else (4_000, 3)
RATE, STEPS = 0.1, 5
UPLOADS = 16  # the rows that are copied over the bus one after another
METHODS = {"FedAvg": 1, "MIFA": 3, "MimiC": 3}  # the vectors that are read or written per update
TORCH, CPU = 2.5, 20.0  # the target ratios of the best torch time and of the CPU's time to fedcore's


@cache
def models():
    """Return clients' models near zero, the server's first model."""
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
    """Return functions by name that run the round in torch; for MIFA, compare the first result with the server's."""
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
    """Return the line of a server's round, including making and checking the updates, against torch and the CPU."""
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
    """Return the line of a round with rows in host memory, with or without cached rows on the device."""
    sent = [Placed(y, own=not REAL) for y in models()]
    server = on_device(method, "ram", cached_rows=CLIENTS if hot else 0)
    run = round_of(server, [y.array for y in sent])

    def whole():
        server.broadcast(range(CLIENTS))  # cold rows are copied while clients train
        run()

    what = f"a round of {method}, rows in host memory, {'hot' if hot else 'every one cold'}"
    return line(what, host_seconds(whole, 5), 4 * N * CLIENTS * (1 if hot else 2))


def bus():
    """Yield lines of copying rows to the device: by fedcore's copy stream, and from both kinds of host memory."""
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
