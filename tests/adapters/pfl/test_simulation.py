"""pfl's real SimulatedBackend and algorithms, with fedcore's storage and with fedcore's methods."""

import asyncio

import numpy as np
import pytest
import torch

pytest.importorskip("pfl")

from pfl.aggregate.simulate import SimulatedBackend
from pfl.common_types import Population
from pfl.context import CentralContext, UserContext
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.data.user_state import InMemoryUserStateStorage
from pfl.metrics import Metrics
from pfl.stats import MappedVectorStatistics

from fedcore import errors
from fedcore.adapters.pfl import ClientStoreUserState, Method
from tests.adapters.malformed import HostileDict

OPTIMUM = 10 / 11


class Copying(InMemoryUserStateStorage):
    """pfl's storage with copies: without them option I shares one buffer among all users."""

    def save_state(self, state, user_id, key=None):
        super().save_state(state.apply_elementwise(torch.clone), user_id, key)


@pytest.mark.sample(1)
@pytest.mark.parametrize("medium", ["ram", "mmap"])
@pytest.mark.parametrize("gradients", [True, False])
def test_scaffold_reaches_the_optimum_on_our_storage(scaffold, tmp_path, medium, gradients):
    storage = ClientStoreUserState(None if medium == "ram" else tmp_path)
    assert scaffold(30, storage, gradients=gradients) == pytest.approx(OPTIMUM, abs=1e-2)
    reference = Copying()
    scaffold(30, reference, gradients=gradients)
    for user in ("0", "1"):
        ours, theirs = storage.load_state(user, "local_c"), reference.load_state(user, "local_c")
        torch.testing.assert_close(ours["w"], theirs["w"], rtol=0, atol=0)
    storage.close()


def test_pfl_s_scaffold_without_the_correction_does_not(scaffold):
    for gradients in (True, False):
        assert not abs(scaffold(20, ClientStoreUserState(), gradients=gradients, corrected=False) - OPTIMUM) < 0.1


def test_the_method_must_be_a_postprocessor_too():
    method = Method("FedAvg", ["0", "1"], lr=0.05, steps=10)
    with pytest.raises(errors.RoundError, match="postprocess"):
        method.postprocess_server(stats=None, central_context=None, aggregate_metrics=None)


USERS = ["a", "b", "c"]
DELTAS = {"w": torch.ones(2, 3), "b": torch.ones(4)}


def add(method, user, deltas=DELTAS):
    method.postprocess_one_user(stats=MappedVectorStatistics(deltas), user_context=UserContext(5, 0, user))


def finish(method):
    return method.postprocess_server(stats=None, central_context=None, aggregate_metrics=None)[0]


class Training:
    """A user's training in the backend, which returns these statistics."""

    def __init__(self, statistics):
        self.statistics = statistics

    def simulate_one_user(self, model, user_dataset, central_context):
        return self.statistics[user_dataset.user_id], Metrics()


def gathered(method, statistics, round):
    users = list(statistics)
    data = FederatedDataset(
        lambda user: Dataset(raw_data=[np.zeros((5, 1))], user_id=user), get_user_sampler("minimize_reuse", users)
    )
    backend = SimulatedBackend(data, data, postprocessors=[method], aggregator=method)
    context = CentralContext(round, False, len(users), Population.TRAIN, None, None, None, seed=0)
    gathering = backend.async_gather_results(None, Training(statistics), central_context=context)
    loop = asyncio.new_event_loop()  # pfl's own way closes the loop that its algorithms use
    try:
        return loop.run_until_complete(gathering)[0]
    finally:
        loop.close()


def test_the_backend_continues_with_the_users_that_can_be_read():
    method = Method("MIFA", [*USERS, "x", "y", "z"], lr=0.1, steps=5)
    worst = {"x": HostileDict(), "y": object(), "z": MappedVectorStatistics({"w": torch.ones(7)})}
    assert gathered(method, {user: worst[user] for user in "xy"}, 0).num_parameters == 0
    assert gathered(method, worst | {user: MappedVectorStatistics(DELTAS) for user in USERS}, 1)
    first, second = method.reports
    assert {user for user, _ in first.rejected} == {"x", "y"}
    assert set(second.accepted) == {*USERS}
    assert {user for user, _ in second.rejected} == {*worst}
    assert set(method.server.layout.names) == {*DELTAS}


def test_a_user_that_is_unknown_or_comes_twice_is_rejected():
    method = Method("MIFA", USERS, lr=0.1, steps=5)
    for user in (*USERS, USERS[0], "stranger"):
        add(method, user)
    finish(method)
    assert method.reports[0].accepted == tuple(USERS)
    assert [user for user, _ in method.reports[0].rejected] == [USERS[0], "stranger"]


def test_the_model_has_the_tensors_on_which_two_users_agree():
    method = Method("FedAvg", USERS, lr=0.1, steps=5)
    for both in ([{"lie": torch.ones(3)}, DELTAS], [DELTAS, DELTAS]):
        for user, deltas in zip(USERS, both, strict=False):
            add(method, user, deltas)
        finish(method)
    assert [len(report.accepted) for report in method.reports] == [0, 2]
    assert [len(report.rejected) for report in method.reports] == [2, 0]


NAN = {
    "NaN": lambda: MappedVectorStatistics({name: x * torch.nan for name, x in DELTAS.items()}),
    "an infinity": lambda: MappedVectorStatistics({**DELTAS, "b": torch.tensor([1.0, torch.inf, 1, 1])}),
    "a weight of NaN": lambda: MappedVectorStatistics(DELTAS, weight=torch.tensor(torch.nan)),
    "no weight": lambda: MappedVectorStatistics(DELTAS, weight=0.0),
    "bfloat16": lambda: MappedVectorStatistics({name: (x * torch.nan).bfloat16() for name, x in DELTAS.items()}),
}


@pytest.mark.parametrize("cohort", ["one", "first", "last", "later round"])
@pytest.mark.parametrize("kind", NAN)
def test_a_user_whose_statistics_are_not_finite_changes_nothing(kind, cohort):
    """Also as the first user, whose tensors define the model and whose statistics pfl keeps."""
    good = {user: MappedVectorStatistics({k: x * i for k, x in DELTAS.items()}) for i, user in enumerate("bc", 1)}
    users = {"one": {"a": NAN[kind]()}, "last": good | {"a": NAN[kind]()}}.get(cohort, {"a": NAN[kind]()} | good)
    method = Method("FedAvg", USERS, lr=0.1, steps=5)
    if cohort == "later round":
        gathered(method, {user: MappedVectorStatistics(DELTAS) for user in USERS}, 0)
    found = gathered(method, users, len(method.reports))
    report = method.reports[-1]
    assert [user for user, _ in report.rejected] == ["a"]
    assert report.accepted == tuple(user for user in users if user != "a")
    for name, x in DELTAS.items():
        if cohort == "one":
            assert name not in found or not found[name].any()
        else:
            torch.testing.assert_close(found[name] / found.weight, 1.5 * x)
