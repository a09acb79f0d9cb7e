"""Exchange through a codec against the same through float32, rows in memory: a row's bytes are what it costs.

The sum, what the clients sent, and the order are the same; only the rows are 2 or 1.0625 bytes an element instead of 4.
In place is what a kernel can do; free slots is what a store does, whose last committed rows stay until the next are.
"""

from itertools import count

import numpy as np
import pytest

from bench.alone import Work
from bench.rivals.exchange import models_and_rows
from fedcore import ClientStore, kernels, randomness

S, N = 16, 11_173_962
TARGET = {"f32 rows": 1.25}


@pytest.mark.parametrize("place", ["in place", "free slots"])
@pytest.mark.parametrize("codec", ["bf16", "int8"])
def bench_exchange(versus, size, codec, place):
    n = size(N, 1_200_000)
    ys = Work(models_and_rows, S, n).arrays[0]
    x, ones, none = np.zeros(n, np.float32), np.ones(S), [None] * S
    keys = randomness.keys("row", round=0, clients=range(S))

    def exchanging(codec):
        store, acc, rounds = ClientStore(S, n, codec=codec), np.zeros(n), count()

        def to_free_slots():
            old, new = [store.row(i) for i in range(S)], [store.stage(i) for i in range(S)]
            kernels.exchange(acc, [x] * S, ys, ones, ones, old, none, new, out=acc, keys=keys)
            store.commit(next(rounds))

        to_free_slots()  # so that every client has a row
        if place == "free slots":
            return to_free_slots
        rows = [store.stage(i) for i in range(S)]
        kernels.exchange(acc, [x] * S, ys, ones, ones, none, none, rows, out=acc, keys=keys)
        return lambda: kernels.exchange(acc, [x] * S, ys, ones, ones, rows, none, rows, out=acc, keys=keys)

    per_element = {"bf16": 2, "int8": 1 + 1 / 16}[codec]
    versus(
        f"exchange through {codec}, {place}, {S} rows x {n / 1e6:.2f} M",
        exchanging(codec),
        {"f32 rows": exchanging("f32")},
        targets=TARGET,
        bytes=int((4 + 2 * per_element) * S * n),
    )
