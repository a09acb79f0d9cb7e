"""The engine on Ray has the bits of the engine in this process."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from torch import nn

from fedcore import Compute, Server, algorithms
from fedcore.algorithms.rates import InverseStep
from fedcore.errors import RangeError, UnknownClientError
from fedcore.sim.in_process import InProcess
from fedcore.sim.participation import Active
from fedcore.sim.ray_engine import Ray
from tests.sim.engines.ray.problems import MANY_VECTORS, OTHERS, noise


def make_server(problem, method="FedAvg", **options):
    return Server(problem.here.initial, method, clients=problem.clients, **{"lr": 0.1} | options)


@pytest.fixture
def unordered(together, monkeypatch):
    monkeypatch.setattr(together.there, "ordered", False)
    return together.there


THREE_WORKERS = pytest.param(3, {"group": 2}, marks=pytest.mark.endurance)
CASES = [*product(["together", "one_by_one"], MANY_VECTORS)]
CASES += [pytest.param("together", method, marks=pytest.mark.endurance) for method in OTHERS]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("problem", "method"), CASES)
def test_every_method_has_the_same_bits(problem, method, request):
    problem = request.getfixturevalue(problem)
    assert problem.there.together == problem.here.together == (problem.clients == 12)
    np.testing.assert_array_equal(problem.there.initial, problem.here.initial)
    assert problem.run(problem.there, method, 3) == problem.run(problem.here, method, 3)


@pytest.mark.parametrize(("workers", "options"), [(1, {"group": 1, "ahead": 1}), THREE_WORKERS])
def test_the_bits_do_not_depend_on_workers_and_groups(together, workers, options):
    with together.ray(workers=workers, **options) as engine:
        assert together.run(engine, "SCAFFOLD", 2) == together.run(together.here, "SCAFFOLD", 2)


def test_losses_have_the_same_bits_and_own_starts_are_rejected(together):
    fair = algorithms.QFedAvg(q=1.0)
    assert together.run(together.there, fair, 2) == together.run(together.here, fair, 2)
    with pytest.raises(RangeError, match=r"^algorithm\b"):
        together.run(together.there, "FedAWE", 1)


def test_warm_starts_and_rates_that_change_within_a_round_have_the_same_bits(together):
    ends = []
    for engine in (together.here, together.there):
        server = make_server(together, "MIFA", lr=InverseStep(mu=2.0, alpha=3.0, E=5))
        server.warm_start(engine.gradients(server.broadcast(range(together.clients))))
        server.round(engine.updates(server.broadcast([1, 4, 5])))
        ends.append((server.x.tobytes(), engine.evaluate(server.x), engine.most_steps(server.algorithm.local_rule)))
    assert ends[0] == ends[1]


def test_buffers_and_dropout_have_the_same_bits(ray_session):
    data, parts = noise("mlp", 4, 12)
    modules = [
        nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 10))
        for _ in range(2)
    ]
    modules[1].load_state_dict(modules[0].state_dict())
    options = {"batch": 4, "steps": 3, "seed": 1}
    here = InProcess(modules[0], data, parts, **options)
    broadcast = Server(here.initial, "MimiC", clients=4, lr=0.1).broadcast([0, 2, 3])
    values = {update.client: np.array(update.value) for update in here.updates(broadcast)}
    with Ray(modules[1], data, parts, workers=1, **options) as there:
        for update in there.updates(broadcast):
            np.testing.assert_array_equal(update.value, values[update.client])


def test_in_completion_order_each_update_comes_once(together, unordered):
    broadcast = make_server(together).broadcast(range(together.clients))
    values = {update.client: np.array(update.value) for update in together.here.updates(broadcast)}
    updates = list(unordered.updates(broadcast))
    assert sorted(update.client for update in updates) == list(broadcast.ids)
    for update in updates:
        np.testing.assert_array_equal(update.value, values[update.client])


def test_in_completion_order_exact_sums_have_the_same_bits(together, unordered):
    """MIFA's rows and their total, over some rounds."""
    ends = []
    for engine in (together.here, unordered):
        server = make_server(together, "MIFA", compute=Compute(accumulator="exact"))
        for round in range(3):
            server.round(engine.updates(server.broadcast(range(round, together.clients))))
        ends.append(np.array(server.x))
    np.testing.assert_array_equal(*ends)


def test_an_update_is_read_only_and_kept(together):
    server = make_server(together)
    first, *_ = together.there.updates(server.broadcast([0, 1]))
    assert first.keep
    assert not first.value.flags.writeable
    assert list(together.there.updates(server.broadcast([]))) == []


def test_wrong_arguments_are_rejected(together):
    server = make_server(together)
    with pytest.raises(UnknownClientError, match=r"^ids\b"):
        next(together.there.updates(replace(server.broadcast([0]), ids=(12,))))
    with pytest.raises(RangeError, match=r"^active\b"):
        next(together.there.updates(server.broadcast([0, 1]), Active(np.array([0, 2]))))
    for name, value in {"workers": 0, "gpus": -1, "cpus": float("nan"), "ahead": 0, "group": 0, "batch": 0}.items():
        with pytest.raises(RangeError, match=rf"^{name}\b"):
            together.ray(**{name: value})
