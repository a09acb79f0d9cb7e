"""The engine on Ray gives the bits of the one in this process."""

from dataclasses import replace

import numpy as np
import pytest
from torch import nn

from fedcore import Compute, Server, algorithms
from fedcore.algorithms.rates import InverseStep
from fedcore.errors import RangeError, UnknownClientError
from fedcore.simulation.in_process import InProcess
from fedcore.simulation.participation import Active
from fedcore.simulation.ray_engine import Ray
from tests.simulation.engines.ray.problems import noise

METHODS = sorted(algorithms.REGISTRY.own)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("problem", ["together", "one_by_one"])
def test_every_method(problem, method, request):
    problem = request.getfixturevalue(problem)
    assert problem.there.together == (problem.here.together) == (problem.clients == 12)
    np.testing.assert_array_equal(problem.there.initial, problem.here.initial)
    assert problem.run(problem.there, method) == problem.run(problem.here, method)


@pytest.mark.parametrize(("workers", "options"), [(1, {"group": 1, "ahead": 1}), (5, {"group": 2})])
def test_any_number_of_workers_and_any_division(together, workers, options):
    with together.ray(workers=workers, **options) as engine:
        for method in ("FedAvg", "SCAFFOLD"):
            assert together.run(engine, method) == together.run(together.here, method)


def test_a_warm_start_and_rates_that_change_within_a_round(together):
    ends = []
    for engine in (together.here, together.there):
        rate = InverseStep(mu=2.0, alpha=3.0, E=5)
        server = Server(engine.initial, "MIFA", clients=together.clients, lr=rate)
        server.warm_start(engine.gradients(server.broadcast(range(together.clients))))
        server.round(engine.updates(server.broadcast([1, 4, 5])))
        ends.append((server.x.tobytes(), engine.evaluate(server.x), engine.most_steps(server.algorithm.local_rule)))
    assert ends[0] == ends[1]


def test_buffers_and_dropout(ray_session):
    data, parts = noise("mlp", 4, 12)
    made = [
        nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 10))
        for _ in range(2)
    ]
    made[1].load_state_dict(made[0].state_dict())
    given = {"batch": 4, "steps": 3, "seed": 1}
    here = InProcess(made[0], data, parts, **given)
    server = Server(here.initial, "MimiC", clients=4, lr=0.1)
    broadcast = server.broadcast([0, 2, 3])
    due = {update.client: np.array(update.value) for update in here.updates(broadcast)}
    with Ray(made[1], data, parts, workers=1, **given) as there:
        for update in there.updates(broadcast):
            np.testing.assert_array_equal(update.value, due[update.client])


def test_as_they_come_each_comes_once(together):
    server = Server(together.here.initial, "FedAvg", clients=together.clients, lr=0.1)
    broadcast = server.broadcast(range(together.clients))
    due = {update.client: np.array(update.value) for update in together.here.updates(broadcast)}
    together.there.ordered = False
    try:
        came = list(together.there.updates(broadcast))
    finally:
        together.there.ordered = True
    assert sorted(update.client for update in came) == list(broadcast.ids)
    for update in came:
        np.testing.assert_array_equal(update.value, due[update.client])


def test_as_they_come_exact_sums_have_the_same_bits(together):
    """Round after round, through MIFA's rows and their total, whoever was first."""
    ends = []
    for engine, ordered in ((together.here, True), (together.there, False)):
        server = Server(engine.initial, "MIFA", clients=together.clients, lr=0.1, compute=Compute(accumulator="exact"))
        together.there.ordered = ordered
        try:
            for round in range(3):
                server.round(engine.updates(server.broadcast(range(round, together.clients))))
        finally:
            together.there.ordered = True
        ends.append(np.array(server.x))
    np.testing.assert_array_equal(*ends)


def test_an_update_is_read_only_and_kept(together):
    server = Server(together.here.initial, "FedAvg", clients=together.clients, lr=0.1)
    first, *_ = together.there.updates(server.broadcast([0, 1]))
    assert first.keep
    assert not first.value.flags.writeable
    assert list(together.there.updates(server.broadcast([]))) == []


def test_what_one_process_refuses(together):
    server = Server(together.here.initial, "FedAvg", clients=together.clients, lr=0.1)
    with pytest.raises(UnknownClientError, match=r"^ids\b"):
        next(together.there.updates(replace(server.broadcast([0]), ids=(12,))))
    with pytest.raises(RangeError, match=r"^active\b"):
        next(together.there.updates(server.broadcast([0, 1]), Active(np.array([0, 2]))))
    for wrong, message in (
        ({"workers": 0}, r"^workers\b"),
        ({"gpus": -1}, r"^gpus\b"),
        ({"cpus": float("nan")}, r"^cpus\b"),
        ({"ahead": 0}, r"^ahead\b"),
        ({"group": 0}, r"^group\b"),
        ({"batch": 0}, r"^batch\b"),
    ):
        with pytest.raises(RangeError, match=message):
            together.ray(**wrong)
