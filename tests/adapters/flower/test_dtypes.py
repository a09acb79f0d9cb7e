"""Models keep their dtypes in messages; the rounding of a narrow dtype is no part of the client's gradient."""

from functools import partial

import ml_dtypes
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from fedcore import Server
from fedcore.adapters.flower import Task
from tests.adapters.flower.federation import make_strategy
from tests.adapters.flower.local_grid import LocalGrid, trains

RNG = np.random.default_rng(0)
WEIGHT = RNG.normal(size=(4, 3)).astype(np.float32)


def run_in(dtype, targets, rounds=5, method="MIFA"):
    """Clients that step half-way to their own targets, in the model's dtype: strategy, result, and the oracle."""

    def work(target, message):
        task = Task.of(message)
        y = {"w": ((task.tensors["w"] + target) / 2).astype(np.float32), "steps": task.tensors["steps"] + 1}
        return task.reply(y, steps=5, examples=1)

    grid = LocalGrid({node: trains(partial(work, target)) for node, target in enumerate(targets, 1)})
    strategy = make_strategy(method)
    start = {"w": Array(WEIGHT.astype(dtype)), "steps": Array(np.array(7, np.int32))}
    result = strategy.start(grid, ArrayRecord(start), rounds)

    oracle = Server(WEIGHT.astype(dtype).astype(np.float32), strategy.algorithm, range(len(targets)), lr=0.1)
    for _ in range(rounds):
        sent = oracle.x.reshape(4, 3).astype(dtype).astype(np.float32)
        with oracle.open_round() as opened:
            for client, target in enumerate(targets):
                y = ((sent + target) / 2).astype(np.float32).astype(dtype).astype(np.float32)
                opened.add(client, value=(y - sent).reshape(-1), kind="delta", steps=5)
    return strategy, result, oracle


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_a_model_in_another_float_dtype(dtype):
    strategy, result, oracle = run_in(dtype, RNG.normal(size=(3, 4, 3)).astype(np.float32))
    # A y on the border of two of the dtype's numbers may be rounded to the other.
    apart = float(ml_dtypes.finfo(dtype).eps) if np.dtype(dtype).itemsize == 2 else 1e-6
    np.testing.assert_allclose(strategy.server.x, oracle.x, rtol=apart, atol=apart)
    assert result.arrays["w"].dtype == np.dtype(dtype).name
    assert result.arrays["steps"].numpy().tolist() == 12
    assert result.arrays["steps"].numpy().dtype == np.int32
    values = result.arrays["w"].numpy()
    values = values.view(dtype) if values.dtype.kind == "V" else values
    np.testing.assert_array_equal(values, strategy.server.tensors()["w"].astype(dtype))


def test_clients_that_do_nothing_leave_a_bfloat16_model_where_it_is():
    """Measured against the unrounded x, the rounding itself would count as steps."""

    def work(step, message):
        task = Task.of(message)
        return task.reply({"w": task.tensors["w"] + (0 if task.round else step)}, steps=1, examples=1)

    grid = LocalGrid({1: trains(partial(work, 0.1)), 2: trains(partial(work, 0.3))})
    strategy, seen = make_strategy("FedAvg"), []
    start = ArrayRecord({"w": Array(WEIGHT.astype(ml_dtypes.bfloat16))})
    strategy.start(grid, start, 4, evaluate_fn=lambda t, arrays: seen.append(strategy.server.x.copy()) if t else None)
    assert (seen[0] != seen[0].astype(ml_dtypes.bfloat16).astype(np.float32)).any()
    for x in seen[1:]:
        np.testing.assert_array_equal(x, seen[0])
