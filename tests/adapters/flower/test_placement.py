"""Corrections that Flower's clients keep themselves, against those that the server keeps."""

import numpy as np
import pytest
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp

from fedcore.adapters import flower
from fedcore.adapters.flower import Task
from tests.adapters import corrections
from tests.adapters.flower.local_grid import LocalGrid

NODES = [11, 12, 13]


def run(strategy, placement):
    """x of every round, with clients that keep their own corrections or leave them to the server."""
    workers = {
        node: corrections.Client(type(strategy.algorithm), placement, target)
        for node, target in zip(NODES, corrections.TARGETS, strict=True)
    }

    def app(node):
        made = ClientApp()

        @made.train()
        def train(message, context):
            task = Task.of(message)
            y, control = workers[node].work(task.x, task.offset)
            return task.reply(y, steps=corrections.STEPS, examples=1, control=control if task.second else None)

        return made

    grid, xs = LocalGrid({node: (app(node), {}) for node in NODES}), []

    def between(t, arrays):
        if t:
            xs.append(strategy.server.x.copy())
            for node in strategy.reports[-1].accepted:
                workers[node].accepted(strategy.server.v)
        grid.dead = {NODES[i] for i in corrections.AWAY.get(t, [])}

    strategy.start(grid, ArrayRecord([np.zeros(3, np.float32)]), corrections.ROUNDS, evaluate_fn=between)
    assert all(not report.rejected for report in strategy.reports)
    assert {len(report.accepted) for report in strategy.reports} == {1, 2, 3}
    return xs


@pytest.mark.parametrize("method", corrections.METHODS)
def test_corrections_that_the_clients_keep_lead_the_same_way(method):
    how = dict(lr=corrections.LR, fraction_evaluate=0.0, min_available_nodes=3, min_train_nodes=3, poll=0.001)
    strategy = getattr(flower, method.__name__)
    at_server, at_clients = (run(strategy(placement=place, **how), place) for place in ("server", "client"))
    corrections.assert_same_trajectory(at_server, at_clients, run(flower.FedAvg(**how), "server"))
