"""The cost of a round of a large model with one server, and with two shards on Ray.

    .venv/bin/python -m bench.cluster.on_ray [--short] [--only N] [METHOD...]

Every line runs in a separate process, one after the other. Clients' vectors exist before a round and do not count: a
server's vectors are in its memory, and shards' slices are Ray objects, as clients' workers return them. Compare the CPU
time, since the wall time includes other load of the machine.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np

from fedcore import Compute, Server, Storage

N, S, SHARDS, CLIENTS = 11_700_000, 16, 2, 32
ROUNDS, WARM = 10, 4
"""The number of rounds, and of first rounds that do not count, since they touch Ray's memory for the first time."""
STORE_BYTES = 3 << 30
WAYS = (
    ("one server", None),
    ("two shards, threads of one process", "threads"),
    ("two shards, slices from the clients' workers", "slices"),
    ("two shards, vectors through the coordinator", "vectors"),
)
HERE = (None, "threads")
"""The ways that run in one process."""


def cohort(t):
    """Return one half of the clients in even rounds and the other half in odd rounds."""
    return [(client + S * t) % CLIENTS for client in range(S)]


def one_process(method, folder, n, rounds, how):
    """Return the CPU seconds and wall seconds of each round, for one server or for shards in threads."""
    import fedcore

    fedcore.set_threads(2)
    # One vector per client of a round, since the caches could hold a few repeated vectors.
    ys = [np.random.default_rng(client).normal(size=n).astype(np.float32) * 1e-3 for client in range(S)]
    x0 = np.zeros(n, np.float32)
    if how == "threads":
        server = Server(x0, method, CLIENTS, lr=0.1, storage=folder, compute=Compute(shards=SHARDS))
    else:
        storage = Storage(folder, keep_previous=folder is not None)
        server = Server(x0, method, CLIENTS, lr=0.1, storage=storage)
    found = []
    for t in range(rounds):
        began, used = time.perf_counter(), time.process_time()
        with server.open_round() as opened:
            for client in cohort(t):
                opened.add(client, value=ys[client % S], kind="delta", steps=2, keep=True)
        found.append([time.process_time() - used, 0, 0, 0, time.perf_counter() - began])
    return found


def shards(method, folder, n, rounds, how):
    """Return the seconds on Ray: the coordinator's, the shards' during and after the updates, and Ray's others."""
    import ray

    from bench.engines.processes import seconds
    from fedcore.cluster import OnRay, Slices

    with OnRay(object_store_memory=STORE_BYTES) as there:
        server = Server(
            np.zeros(n, np.float32),
            method,
            CLIENTS,
            lr=0.1,
            storage=folder,
            compute=Compute(shards=SHARDS, executor=there),
        )
        whole = [slice(0, n)]
        cuts = [slice(span.start, span.stop) for span in server._backend.ranges] if how == "slices" else whole

        @ray.remote(num_cpus=1)
        class Client:
            def __init__(self, seed):
                self.y = np.random.default_rng(seed).normal(size=n).astype(np.float32) * 1e-3

            def send(self, cuts):
                parts = tuple(self.y[cut] for cut in cuts)
                return parts if len(parts) > 1 else parts[0]

            def number(self):
                return os.getpid()

        workers = [Client.remote(seed) for seed in range(2)]
        theirs = set(ray.get([worker.number.remote() for worker in workers]))
        mine = set(ray.get([one.__ray_call__.remote(lambda _: os.getpid()) for one in there._actors]))

        def used():
            """Return the CPU seconds of the shards, and of Ray's other processes except the clients' workers."""
            _, shards, others = seconds(lambda _, number: number in mine)
            return np.array([shards, others - seconds(lambda _, number: number in theirs).workers])

        found = []
        for t in range(rounds):
            sent = [workers[c % 2].send.options(num_returns=len(cuts)).remote(cuts) for c in cohort(t)]
            flat = [one for parts in sent for one in (parts if isinstance(parts, list) else [parts])]
            ray.wait(flat, num_returns=len(flat), fetch_local=False)
            before, marks, walls = used(), [time.process_time()], [time.perf_counter()]
            opened = server.open_round()
            for client, parts in zip(cohort(t), sent, strict=True):
                if how == "slices":
                    opened.add(client, Slices(parts), steps=2, kind="delta")
                else:
                    opened.add(client, value=ray.get(parts), kind="delta", steps=2)
            opened._fold_held()
            marks.append(time.process_time())
            walls.append(time.perf_counter())
            folded = used()  # scans all processes, which does not count
            marks.append(time.process_time())
            walls.append(time.perf_counter())
            assert len(opened.finish().accepted) == S
            marks.append(time.process_time())
            walls.append(time.perf_counter())
            (adding, _), (ending, _), (_, others) = folded - before, used() - folded, used() - before
            found.append([without_middle(marks), adding, ending, others, without_middle(walls)])
            del sent, flat, parts
        server.close()
    return found


def without_middle(marks):
    """Return the time from the first to the last of four marks, without the time between the two in the middle."""
    return marks[1] - marks[0] + marks[3] - marks[2]


def line(method, on_disk, way, short):
    """Return the figures of a way: CPU and wall milliseconds per round."""
    how = dict(WAYS)[way]
    n, rounds = (N // 10, WARM + 2) if short else (N, ROUNDS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run" if on_disk else None
        found = (one_process if how in HERE else shards)(method, path, n, rounds, how)
    counted = 1e3 * np.array(found[WARM:])
    return {"cpu": counted[:, :4].mean(axis=0).tolist(), "wall": float(np.median(counted[:, 4]))}


def main(methods, short, only):
    from bench import machine

    print(machine.head(machine.describe()), flush=True)
    lines = [(method, on_disk, way, how) for method in methods for on_disk in (False, True) for way, how in WAYS]
    for number, (method, on_disk, way, how) in enumerate(lines):
        if only not in (None, number):
            continue
        words = ["one", method, "disk" if on_disk else "memory", way, *(["--short"] if short else [])]
        command = [sys.executable, "-W", "ignore", "-m", "bench.cluster.on_ray", *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
        result = json.loads(done.stdout.splitlines()[-1])
        coordinator, adding, ending, others = result["cpu"]
        cells = (
            f"{coordinator:.0f} | | |"
            if how in HERE
            else f"{coordinator:.0f} | {adding:.0f} + {ending:.0f} | {others:.0f} |"
        )
        print(
            f"| {method}, {'on the disk' if on_disk else 'in memory'} | {way} | {cells} "
            f"{sum(result['cpu']):.0f} | {result['wall']:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    words = [word for word in sys.argv[1:] if word != "--short"]
    short = "--short" in sys.argv
    if words[:1] == ["one"]:
        _, method, where, way = words
        print(json.dumps(line(method, where == "disk", way, short)), flush=True)
    else:
        only = int(words.pop(words.index("--only") + 1)) if "--only" in words else None
        main([word for word in words if word != "--only"] or ["FedAvg", "MIFA"], short, only)
