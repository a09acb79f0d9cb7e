"""The cost that a commit adds to the exchange of a round with rows in files: checksums, and their index."""

from itertools import count

import numpy as np

from bench.rivals.exchange import models_and_rows
from fedcore import ClientStore, kernels
from fedcore import arrays as memory

S, N = 32, 11_173_962


def bench_commit(versus, size, tmp_path):
    n = size(N, 1_200_000)
    ys = models_and_rows(S, n)[0]
    x, acc, spare = memory.zeros(n), memory.zeros(n, np.float64), memory.full(n, 0, np.float64)
    ones, none, rounds = np.ones(S), [None] * S, count()
    options = dict(medium="mmap", path=tmp_path / "store", durability="none", resident_rows=4 * S)
    with ClientStore(S, n, **options) as store:

        def exchange(sums=None):
            old, new = store.rows_of(range(S)), store.stage_all(range(S))
            kernels.exchange(acc, [x] * S, ys, ones, ones, old, none, new, out=spare, sums=sums)

        def alone():
            exchange()
            store.discard()  # so that all three ways use free slots

        def with_commit():
            sums = store.room_for_checksums(S)
            exchange(sums)
            store.note_checksums(range(S), sums)
            store.commit(next(rounds))

        def sealed_at_the_commit():
            exchange()
            store.commit(next(rounds))

        for _ in range(3):
            with_commit()  # allocates slots for the present and the next rows
        versus(
            f"exchange and commit to files, {S} rows x {n / 1e6:.2f} M",
            with_commit,
            {"the exchange alone": alone, "rows summed at the commit": sealed_at_the_commit},
            targets={"the exchange alone": 1 / 1.05},
            bytes=12 * S * n,
        )
