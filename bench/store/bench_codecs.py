"""The exchange of rows with a codec against float32 rows, in memory; the bytes of a row determine the cost.

Sums, updates and order are equal. Rows have 2 or 1.0625 bytes per element instead of 4, and are rounded stochastically.
"In place" is the kernel's best case. "Free slots" is the way of a store, which keeps the committed rows until the next
commit.

The program compares the processor time of one thread, for a machine with other load. One thread waits less for memory
than all threads do, so smaller rows save less.
"""

import time
from itertools import count

import numpy as np
import pytest

import fedcore
from bench.alone import Work
from bench.rivals.exchange import models_and_rows
from fedcore import ClientStore, kernels
from fedcore import runtime as randomness

S, N = 16, 11_173_962
TARGET = {"f32 rows": 1.25}
PLACES = ("in place", "free slots")


def exchanging(codec, place, ys):
    n = len(ys[0])
    x, ones, none = np.zeros(n, np.float32), np.ones(S), [None] * S
    keys = randomness.keys("row", round=0, clients=range(S))
    store, acc, rounds = ClientStore(S, n, codec=codec), np.zeros(n), count()

    def to_free_slots():
        old, new = [store.row(i) for i in range(S)], [store.stage(i) for i in range(S)]
        kernels.exchange(acc, [x] * S, ys, ones, ones, old, none, new, out=acc, keys=keys)
        store.commit(next(rounds))

    to_free_slots()  # gives every client a row
    if place == "free slots":
        return to_free_slots
    rows = [store.stage(i) for i in range(S)]
    kernels.exchange(acc, [x] * S, ys, ones, ones, none, none, rows, out=acc, keys=keys)
    return lambda: kernels.exchange(acc, [x] * S, ys, ones, ones, rows, none, rows, out=acc, keys=keys)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("codec", ["bf16", "int8"])
def bench_exchange(versus, size, codec, place):
    n = size(N, 1_200_000)
    ys = Work(models_and_rows, S, n).arrays[0]
    per_element = {"bf16": 2, "int8": 1 + 1 / 16}[codec]
    versus(
        f"exchange through {codec}, {place}, {S} rows x {n / 1e6:.2f} M",
        exchanging(codec, place, ys),
        {"f32 rows": exchanging("f32", place, ys)},
        targets=TARGET,
        bytes=int((4 + 2 * per_element) * S * n),
    )


def main():
    fedcore.set_threads(1)
    ys = [np.random.default_rng(i).standard_normal(2_000_000, dtype=np.float32) for i in range(S)]
    for place in PLACES:
        run = {codec: exchanging(codec, place, ys) for codec in ("f32", "bf16", "int8")}
        took = {codec: [] for codec in run}
        for _ in range(40):
            for codec, exchange in run.items():
                began = time.thread_time()
                exchange()
                took[codec].append(time.thread_time() - began)
        for codec in ("bf16", "int8"):
            low, median, high = np.percentile(np.divide(took["f32"], took[codec]), [25, 50, 75])
            print(f"{place}, {codec}: {median:.2f} ({low:.2f}-{high:.2f})")


if __name__ == "__main__":
    main()
