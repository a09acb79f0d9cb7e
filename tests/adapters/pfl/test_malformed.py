"""Statistics that no honest user's training leaves: each is rejected by its user's id, and no other."""

import asyncio

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.common_types import Population
from pfl.context import CentralContext, UserContext
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.metrics import Metrics
from pfl.stats import MappedVectorStatistics

from fedcore import Server
from fedcore.adapters.pfl import Method
from tests.adapters.malformed import HostileDict, assert_only_the_valid_count, malformed

HONEST = ["honest-1", "honest-2", "honest-3"]
LIARS = [f"liar-{i}" for i in range(420)]
USERS = [*LIARS[:5], HONEST[0], *LIARS[5:200], HONEST[1], *LIARS[200:], HONEST[2]]
ROUNDS = 5
SHAPES = {"w": (2, 3), "b": (4,)}


def delta_of(user):
    generator = torch.Generator().manual_seed(HONEST.index(user) if user in HONEST else 9)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def statistics_of(part):
    if type(part) is not dict:
        return part
    made, fields = MappedVectorStatistics({}), {str(key): value for key, value in part.items()}
    made.__dict__.clear()
    made.__dict__.update(fields)
    return made


def statistics(seed):
    valid = {"_data": delta_of("liar"), "_weight": 1.0}
    changed = malformed(valid, len(LIARS), seed)
    made = {user: statistics_of(part) for user, part in zip(LIARS, changed, strict=True)}
    return made | {user: MappedVectorStatistics(delta_of(user)) for user in HONEST}


def assert_as_without_liars(method):
    server = Server({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}, "MIFA", USERS, lr=0.1)
    assert len(method.reports) == ROUNDS
    for report in method.reports:
        assert_only_the_valid_count(report, HONEST, LIARS)
        with server.open_round() as opened:
            for user in report.accepted:
                opened.add(user, value=delta_of(user), kind="delta", steps=5)
    np.testing.assert_array_equal(method.server.x, server.x)


def test_statistics_that_are_none_are_rejected_by_user_and_the_others_result_stands():
    method = Method("MIFA", USERS, lr=0.1, steps=5)
    for round in range(ROUNDS):
        came = statistics(round)
        for user in USERS:
            method.postprocess_one_user(stats=came[user], user_context=UserContext(5, 0, user))
        step, _ = method.postprocess_server(stats=None, central_context=None, aggregate_metrics=None)
        assert {name: tuple(tensor.shape) for name, tensor in step.items()} == SHAPES
    assert_as_without_liars(method)


class Training:
    """What trains a user in the backend; some users' training goes wrong."""

    def __init__(self, came):
        self.came = came

    def simulate_one_user(self, model, user_dataset, central_context):
        return self.came[user_dataset.user_id], Metrics()


def gathered(method, came, round):
    users = [user for user in USERS if user in came]
    data = FederatedDataset(
        lambda user: Dataset(raw_data=[np.zeros((5, 1))], user_id=user), get_user_sampler("minimize_reuse", users)
    )
    backend = SimulatedBackend(data, data, postprocessors=[method], aggregator=method)
    context = CentralContext(round, False, len(users), Population.TRAIN, None, None, None, seed=0)
    gathering = backend.async_gather_results(None, Training(came), central_context=context)
    loop = asyncio.new_event_loop()  # pfl's own way closes the loop that its algorithms use
    try:
        return loop.run_until_complete(gathering)[0]
    finally:
        loop.close()


def test_a_backend_goes_on_with_the_users_that_can_be_read():
    method = Method("MIFA", [*USERS], lr=0.1, steps=5)
    worst = {"liar-0": HostileDict(), "liar-1": object(), "liar-2": MappedVectorStatistics({"w": torch.ones(7)})}
    assert gathered(method, {user: worst[user] for user in ("liar-0", "liar-1")}, 0).num_parameters == 0
    assert gathered(method, worst | {user: MappedVectorStatistics(delta_of(user)) for user in HONEST}, 1)
    nobody, report = method.reports
    assert {user for user, _ in nobody.rejected} == {"liar-0", "liar-1"}
    assert set(report.accepted) == {*HONEST}
    assert {user for user, _ in report.rejected} == {*worst}
    assert set(method.server.layout.names) == {*SHAPES}


def test_a_user_that_nobody_knows_or_that_comes_twice_is_rejected():
    method = Method("MIFA", HONEST, lr=0.1, steps=5)
    for user in HONEST:
        method.postprocess_one_user(stats=MappedVectorStatistics(delta_of(user)), user_context=UserContext(5, 0, user))
    for user in (HONEST[0], "nobody"):
        method.postprocess_one_user(stats=MappedVectorStatistics(delta_of(user)), user_context=UserContext(5, 0, user))
    method.postprocess_server(stats=None, central_context=None, aggregate_metrics=None)
    assert method.reports[0].accepted == tuple(HONEST)
    assert [user for user, _ in method.reports[0].rejected] == [HONEST[0], "nobody"]


def test_where_no_two_users_agree_no_model_is_made_of_the_first_one():
    method, honest = Method("FedAvg", USERS, lr=0.1, steps=5), delta_of(HONEST[0])
    for came in ([{"lie": torch.ones(3)}, honest], [honest, honest]):
        for user, delta in zip(HONEST, came, strict=False):
            method.postprocess_one_user(stats=MappedVectorStatistics(delta), user_context=UserContext(5, 0, user))
        method.postprocess_server(stats=None, central_context=None, aggregate_metrics=None)
    assert [len(report.accepted) for report in method.reports] == [0, 2]
    assert [len(report.rejected) for report in method.reports] == [2, 0]
