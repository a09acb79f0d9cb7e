"""Every method inside Flower gives the model of fedcore's own run of the same participation, bit for bit."""

import numpy as np
import pytest

from tests.adapters.flower.federation import METHODS, NODES, initial_arrays, make_app, make_data, run, simulate
from tests.adapters.flower.local_grid import LocalGrid

ROUNDS = 6


@pytest.mark.parametrize("method", METHODS)
def test_with_failing_nodes_and_one_that_joins(method):
    dataset, parts = make_data()
    apps = [(make_app(i, dataset, parts), {}) for i in range(5)]
    grid = LocalGrid(dict(zip(NODES[:4], apps[:4], strict=True)))
    order = sorted(range(4), key=lambda i: NODES[i])
    everybody = sorted(range(5), key=lambda i: NODES[i])
    dead = {0: [0], 1: [2, 3], 2: [], 3: [1], 4: [0, 1, 2, 3, 4], 5: [3]}

    def before_round(t):
        if t == 2:
            grid.nodes[NODES[4]] = apps[4]
        grid.dead = {NODES[i] for i in dead.get(t, [])}

    sizes = {node: len(part) for node, part in zip(NODES, parts, strict=True)} if "Flexible" in method else None
    strategy, result = run(method, grid, ROUNDS, before_round=before_round, client_sizes=sizes)
    there = [order, order, everybody, everybody, everybody, everybody]
    participation = [[i for i in who if i not in dead[t]] for t, who in enumerate(there)]
    expected = simulate(method, METHODS[method], participation)
    # Shares of an objective that failing nodes were to come into, and did not yet: the others' rounding differs.
    tolerance = 1e-6 if method == "FlexibleFedAvg" else 0
    np.testing.assert_allclose(strategy.server.x, expected.x, rtol=tolerance, atol=tolerance)
    assert strategy.server.round_number == ROUNDS
    assert [len(report.heard) for report in strategy.reports] == [3, 2, 5, 4, 0, 4]
    tensors = dict(zip(result.arrays, result.arrays.to_numpy_ndarrays(), strict=True))
    assert list(tensors) == list(initial_arrays())
    np.testing.assert_allclose(tensors["0.weight"], expected.tensors()["0.weight"], rtol=tolerance, atol=tolerance)
    assert tensors["1.num_batches_tracked"].dtype == np.int64
    steps = 1 if method == "MBSTORM" else 4
    assert tensors["1.num_batches_tracked"] == steps * 5  # in the five rounds that heard anybody
