"""Rows per second and bytes per row against pfl-research's storages: read, exchange and write a cohort's rows.

Needs ``pip install -c constraints.txt pfl==0.6.0``. fedcore's commit is a transaction with checksums; pfl's storages
have neither. No commit waits for the disk (durability="none").
"""

from itertools import cycle, islice

import numpy as np
import pytest
import torch

from fedcore import ClientStore, kernels
from fedcore import runtime as randomness

pytest.importorskip("pfl")
from bench.rivals.pfl_storage import exchange, stored

USERS, S = 200, 20


@pytest.mark.parametrize("codec", ["f32", "int8"])
@pytest.mark.parametrize("medium", ["ram", "mmap"])
def bench_storage(versus, size, tmp_path_factory, medium, codec):
    n = size(1_000_000, 100_000)
    rng = np.random.default_rng(0)
    sent = [rng.standard_normal(n, dtype=np.float32) for _ in range(S)]
    tensors = [torch.from_numpy(one) for one in sent]
    folder = tmp_path_factory.mktemp("pfl")
    theirs = {"pfl, a dict": stored(None, USERS, n), "pfl, a file a user": stored(folder, USERS, n)}
    if medium == "mmap":
        del theirs["pfl, a dict"]

    def exchanging(storage):
        users, total = cycle(range(USERS)), torch.zeros(n)
        return lambda: exchange(storage, list(islice(users, S)), tensors, total)

    path = tmp_path_factory.mktemp("ours") / "store" if medium == "mmap" else None
    store = ClientStore(USERS, n, medium=medium, codec=codec, path=path, durability="none")
    clients, total, ones, none = cycle(range(USERS)), np.zeros(n), np.ones(S), [None] * S
    keys = randomness.keys("row", round=0, clients=range(S))

    def ours():
        cohort = list(islice(clients, S))
        old, new = [store.row(i) for i in cohort], [store.stage(i) for i in cohort]
        kernels.exchange(total, none, sent, -ones, ones, old, none, new, out=total, keys=keys)
        store.commit(0)

    for _ in range(USERS // S):
        ours()
    file = next(folder.glob("*.state")).stat().st_size
    row = store.info().row_bytes
    versus(
        f"{medium} {codec}: {S} rows x {n / 1e6:.1f} M, {row / 1e6:.3f} MB each; pfl's file {file / 1e6:.3f} MB",
        ours,
        {name: exchanging(storage) for name, storage in theirs.items()},
        bytes=12 * S * n,
    )
