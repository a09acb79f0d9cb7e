"""pfl's real SimulatedBackend and algorithms, with fedcore's storage and with fedcore's methods."""

import numpy as np
import pytest
import torch

pytest.importorskip("pfl")

from pfl.context import UserContext
from pfl.data.user_state import InMemoryUserStateStorage
from pfl.stats import MappedVectorStatistics

from fedcore import Server, errors
from fedcore.adapters.pfl import ClientStoreUserState, Method
from fedcore.rules import RejectLong
from tests.adapters.orders import OF_STEPS, ORDERS, PLAIN

OPTIMUM = 10 / 11


class Copying(InMemoryUserStateStorage):
    """What pfl's storage would have to be: as it is, option I shares one buffer among all users."""

    def save_state(self, state, user_id, key=None):
        super().save_state(state.apply_elementwise(torch.clone), user_id, key)


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


def test_as_it_is_pfl_s_scaffold_does_not(scaffold):
    for gradients in (True, False):
        w = scaffold(20, ClientStoreUserState(), gradients=gradients, put_right=False)
        assert not abs(w - OPTIMUM) < 0.1


def test_fedavg_is_pfl_s_own(averaging):
    method = Method("FedAvg", ["0", "1"], lr=0.05, steps=10)
    assert averaging(5, method) == pytest.approx(averaging(5), rel=1e-6)
    assert [set(report.accepted) for report in method.reports] == [{"0", "1"}] * 5


def test_fedavg_is_pfl_s_own_over_users_of_20_and_1000_data_points(averaging):
    sizes = {"0": 20, "1": 1000}
    method = Method("FedAvg", ["0", "1"], lr=0.05, steps=lambda user: user.num_datapoints)
    theirs = averaging(3, sizes=sizes)
    assert averaging(3, method, sizes=sizes) == pytest.approx(theirs, rel=1e-6)
    assert theirs != pytest.approx(averaging(3), rel=0.01)


@pytest.mark.parametrize("name", ["MIFA", "MimiC"])
def test_methods_that_pfl_has_not_equal_the_server_by_itself(averaging, name):
    method = Method(name, ["0", "1"], lr=0.05, steps=10)
    w = averaging(12, method, cohort=1)
    server = Server(np.zeros(1, np.float32), name, ["0", "1"], lr=0.05)
    for report in method.reports:
        with server.open_round() as opened:
            for client in report.accepted:
                h, a = {"0": (1.0, 0.0), "1": (10.0, 1.0)}[client]
                y = a + (server.x - a) * (1 - 0.05 * h) ** 10
                opened.add(client, y.astype(np.float32), steps=10)
    assert {client for report in method.reports for client in report.accepted} == {"0", "1"}
    assert w == pytest.approx(float(server.x[0]), abs=1e-5)


def test_a_lying_user_is_refused_by_name_and_the_round_goes_on():
    method = Method("MIFA", ["a", "b", "c"], lr=0.1, steps=lambda user: -1 if user.user_id == "b" else 2)
    for name, value in (("a", 1.0), ("b", 2.0), ("c", float("nan"))):
        stats = MappedVectorStatistics({"w": torch.full((3,), value)})
        method.postprocess_one_user(stats=stats, user_context=UserContext(5, 0, name))
    method.postprocess_server(stats=stats, central_context=None, aggregate_metrics=None)
    [report] = method.reports
    assert report.accepted == ("a",)
    assert {client: reason.split(":")[0] for client, reason in report.rejected} == {"b": "steps", "c": "update"}


@pytest.mark.parametrize("name", ["SCAFFOLD", "FedAvgM"])
def test_methods_whose_steps_pfl_would_not_take_are_refused(name):
    with pytest.raises(errors.RangeError, match=r"^algorithm\b"):
        Method(name, ["0"], lr=0.1, steps=1)


def test_without_the_postprocessor_nothing_is_summed():
    method = Method("FedAvg", ["0", "1"], lr=0.05, steps=10)
    with pytest.raises(errors.RoundError, match="postprocess"):
        method.postprocess_server(stats=None, central_context=None, aggregate_metrics=None)


@pytest.mark.parametrize("name", ORDERS)
def test_a_method_has_plain_steps_or_is_refused_by_name(name):
    if name in PLAIN:
        Method(ORDERS[name], ["0"], lr=0.1, steps=1)
    else:
        with pytest.raises(errors.RangeError, match=r"^algorithm\b"):
            Method(ORDERS[name], ["0"], lr=0.1, steps=1)


def test_a_rate_of_each_step_is_refused_by_name():
    with pytest.raises(errors.RangeError, match=r"^lr\b"):
        Method("FedAvg", ["0"], lr=OF_STEPS, steps=1)


def test_a_user_who_scales_the_update_is_refused_by_name_and_the_others_result_stands(caplog):
    method = Method("MIFA", ["a", "b", "c"], lr=0.1, steps=2, aggregation=[RejectLong(30)])
    server = Server(np.zeros(3, np.float32), "MIFA", ["a", "b", "c"], lr=0.1)
    with server.open_round() as opened:
        for name, value in (("a", 1000.0), ("b", 1.5), ("c", 0.5)):
            stats = MappedVectorStatistics({"w": torch.full((3,), value)})
            method.postprocess_one_user(stats=stats, user_context=UserContext(5, 0, name))
            if name != "a":
                opened.add(name, value=np.full(3, value, np.float32), kind="delta", steps=2)
    method.postprocess_server(stats=stats, central_context=None, aggregate_metrics=None)
    [(user, reason)] = method.reports[0].rejected
    assert (user, "RejectLong" in reason) == ("a", True)
    np.testing.assert_array_equal(method.server.x, server.x)
    [line] = [record.message for record in caplog.records if record.name == "fedcore.adapters.pfl"]
    assert line.startswith("round 0: refused 1 ('a') and heard 2: 1 x update: its length ")
