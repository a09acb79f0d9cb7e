"""With exact sums the order in which Flower's replies arrive shows in nothing; else it does."""

import hashlib

import numpy as np
import pytest

from fedcore import Compute
from tests.adapters.flower.federation import NODES, make_app, make_data, run
from tests.adapters.flower.local_grid import LocalGrid

ROUNDS = 3


class ShuffledGrid(LocalGrid):
    """Replies arrive one or a few at a pull, in an order of chance."""

    def __init__(self, nodes, rng):
        super().__init__(nodes)
        self.rng, self.arrived = rng, []

    def pull_messages(self, message_ids):
        there = [number for number in message_ids if number in self.replies]
        some = self.rng.permutation(len(there))[: int(self.rng.integers(0, len(there) + 1))]
        self.arrived += [there[i] for i in some]
        return super().pull_messages([there[i] for i in some])


def states(method, accumulate, runs):
    dataset, parts = make_data()
    found, orders = set(), set()
    for seed in range(runs):
        nodes = {node: (make_app(i, dataset, parts), {}) for i, node in enumerate(NODES)}
        grid = ShuffledGrid(nodes, np.random.default_rng(seed))
        strategy, _ = run(method, grid, ROUNDS, compute=Compute(accumulator=accumulate))
        assert [len(report.accepted) for report in strategy.reports] == [len(NODES)] * ROUNDS
        server = strategy.server
        rows = [server.store.read(node).tobytes() for node in NODES if server.algorithm.keeps_rows]
        norms = [report.norms.tobytes() for report in strategy.reports]
        found.add(hashlib.sha256(b"".join([server.x.tobytes(), *rows, *norms])).hexdigest())
        orders.add(tuple(grid.arrived))
    assert len(orders) == runs
    return found


@pytest.mark.parametrize("method", ["FedAvg", "MIFA", "MimiC", "SCAFFOLD"])
def test_replies_in_any_order_give_the_same_bits(method):
    assert len(states(method, "exact", 5)) == 1


def test_other_sums_see_the_order():
    assert len(states("FedAvg", "float32", 5)) > 1
