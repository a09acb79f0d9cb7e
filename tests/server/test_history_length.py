"""MimiC keeps one direction for each round that some row refers to, and no more."""

import numpy as np

from fedcore import Server, Update


def test_history_is_as_long_as_the_rows_need():
    server = Server("MimiC", np.zeros(3, np.float32), clients=5, lr=1.0)
    rng = np.random.default_rng(0)
    for _ in range(200):
        cohort = np.flatnonzero(rng.random(5) < 0.4).tolist()
        server.round([Update(i, rng.normal(size=3).astype(np.float32), steps=1) for i in cohort])
        written = {server.store.round_of(i) for i in range(5)} - {None}
        assert len(server._state.now.history) == len(written)
