"""The cost of durability: the same MIFA rounds in memory, and on a disk with none, checkpoint and round.

The server makes a checkpoint every ten rounds, whose time is included.
"""

import itertools

import numpy as np

from fedcore import ClientStore, Server, Update, algorithms

N, S, CHECKPOINT = 200, 20, 10


def bench_durability(versus, size, tmp_path_factory):
    n = size(1_000_000, 100_000)
    rng = np.random.default_rng(0)
    hs = [rng.standard_normal(n, dtype=np.float32) for _ in range(S)]
    folder = tmp_path_factory.mktemp("durability")

    def rounds(medium, durability="round"):
        path = folder / durability if medium == "mmap" else None
        store = ClientStore(N, n, medium=medium, codec="bf16", path=path, durability=durability)
        server = Server(np.zeros(n, np.float32), algorithms.MIFA(wait=False), storage=store, lr=0.1)
        cohorts = itertools.cycle([range(start, start + S) for start in range(0, N, S)])

        def run():
            updates = [Update(i, value=h, kind="gradient", steps=1) for i, h in zip(next(cohorts), hs, strict=True)]
            server.round(updates)
            if durability == "checkpoint" and server.round_number % CHECKPOINT == 0:
                store.checkpoint()

        for _ in range(N // S):
            run()  # gives every client a row
        return run

    rivals = {durability: rounds("mmap", durability) for durability in ("checkpoint", "none")}
    # bytes: read y, read and write a row through bf16
    versus(
        f'durability="round", {S} rows x {n / 1e6:.1f} M in bf16',
        rounds("mmap"),
        rivals | {"in memory": rounds("ram")},
        bytes=8 * S * n,
        rounds=21,
    )
