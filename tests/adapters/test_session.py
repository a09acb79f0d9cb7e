"""The parts that the adapters share: the server of a job, and the instructions that a framework can carry."""

from contextlib import nullcontext
from dataclasses import fields

import numpy as np
import pytest
import torch

from fedcore import Limits, Model, Server, Update
from fedcore.adapters import session
from fedcore.algorithms import MIFA, SCAFFOLD, FedAvgM
from fedcore.algorithms.optimizers import Adam
from fedcore.errors import ArrayError, RangeError, RoundError, UnknownNameError
from fedcore.options import ServerOptions
from fedcore.server.broadcast import Instructions
from tests.adapters.orders import ORDERS, PLAIN
from tests.rejections import rejected_arguments

X0 = {"w": np.arange(4, dtype=np.float32)}


def opened(algorithm, clients, storage=None, **how):
    options = ServerOptions.from_mapping(
        {"lr": 0.1, "storage": storage} | {k: how.pop(k) for k in ("limits",) if k in how}
    )
    return session.open_server(X0, algorithm, clients, options, session.ClientWork(**how))


def test_methods_and_optimizers_in_a_configuration_have_options():
    assert session.with_plain_steps({"name": "MIFA", "wait": False}, 0.1) == MIFA(wait=False)
    for name in ("Adam", "adam"):
        assert ServerOptions.from_mapping({"optimizer": {"name": name, "eta": 0.5}}).optimizer == Adam(eta=0.5)
    for table in ({"name": "Adam", "etta": 0.5}, {"eta": 0.5}):
        with pytest.raises(UnknownNameError):
            ServerOptions.from_mapping({"optimizer": table})


def test_clients_are_registered_also_with_an_earlier_server(tmp_path):
    for clients, sizes in ((["a", "b"], {"a": 1, "b": 2}), (["b", "c"], {"a": 1, "b": 5, "c": 3})):
        with opened("FlexibleFedAvg", clients, tmp_path / "rows", sizes=sizes) as server:
            found = dict(zip(server.clients, server.client_sizes.tolist(), strict=True))
    assert found == {"a": 1, "b": 2, "c": 3}


def test_an_earlier_server_accepts_the_steps_that_a_job_asks_for(tmp_path):
    changed = []
    for how in ({"steps": 5}, {"steps": 9}, {"steps": 3}, {"steps": 20, "limits": Limits(max_steps=7)}):
        with opened("MIFA", ["a"], tmp_path / "rows", **how) as server, server.open_round() as round:
            round.add("a", {"w": X0["w"] - 1}, steps=how["steps"])
        changed.append(round.report.changed)
    assert changed == [None, {"limits": {"max_steps": 9}}, None, {"limits": {"max_steps": 7}}]
    assert rejected_arguments(round.report) == [("a", "steps")]


def test_newcomers_are_unknown_ids_of_known_size():
    server = opened("FedAvg", ["a"])
    assert session.newcomers(server, ["b", "a", "c", "b", "\ud800", True, -1, None], None) == ["b", "c"]
    assert session.newcomers(server, ["b", "a", "c"], {"c": 5, "d": 6}) == {"c": 5}


def test_only_rejected_rounds_in_a_row_end_a_run():
    rejected = [("b", "lr=2: must be 1")]
    rounds = session.RejectedRounds(2)
    for accepted, refused in (((), rejected), ((), ()), (("a",), rejected), ((), rejected), ((), ())):
        rounds.note(accepted, refused)
    with pytest.raises(RoundError, match=r"1 x lr=2: must be 1"):
        rounds.note((), rejected)
    with pytest.raises(RangeError, match=r"^abort_after"):
        session.RejectedRounds(0)


@pytest.mark.parametrize(("before", "ends"), [([], False), ([()], True), ([("a",), ()], False), ([(), ("a",)], False)])
def test_a_short_run_that_accepted_nothing_ends_with_an_error(before, ends):
    rounds = session.RejectedRounds(3)
    for accepted in before:
        rounds.note(accepted, [("b", "update: a number is NaN")])
    with pytest.raises(RoundError, match="NaN") if ends else nullcontext():
        rounds.check(ended=True)


@pytest.mark.parametrize("name", ORDERS)
def test_a_method_of_more_than_plain_steps_is_refused(name):
    if name in PLAIN:
        assert session.with_plain_steps(ORDERS[name], 0.1) is ORDERS[name]
    else:
        with pytest.raises(RangeError, match=rf"^algorithm\b.*{type(ORDERS[name]).__name__}"):
            session.with_plain_steps(ORDERS[name], 0.1)


@pytest.mark.parametrize("steps", [0, -1, 1.5, 2**53 + 1, True, "", [3]])
def test_steps_are_a_number_or_a_name(steps):
    session.require_steps(3, MIFA())
    session.require_steps("num-steps", MIFA())
    with pytest.raises(RangeError, match=r"^steps\b"):
        session.require_steps(steps, MIFA())
    with pytest.raises(RangeError, match=r"^steps\b"):
        session.require_steps(3, SCAFFOLD())


def test_the_method_everything_sets_every_field_of_the_instructions():
    server = Server(np.zeros(3, np.float32), ORDERS["everything"], clients=2, lr=0.5)
    server.round([Update(0, np.float32([1, 2, 3]), 1, control=np.ones(3, np.float32), loss=1.0)])
    asked, usual = server.broadcast([0]).of(0), Instructions(round=0, lr=0.1)
    for name in {field.name for field in fields(Instructions)} - {"lr_of_step", "start"}:
        assert np.any(getattr(asked, name) != getattr(usual, name)), name


STATE = {
    "w": np.float32([[0.1, 0.2], [0.3, 70.7]]),
    "bn.running_var": np.float32([1 / 3]),
    "bn.num_batches_tracked": np.int64(3),
    "mask": np.array([True, False]),
}
FORMS = {
    "float32": lambda v: v,
    "float64": lambda v: v.astype(np.float64) if v.dtype == np.float32 else v,
    "float16": lambda v: v.astype(np.float16) if v.dtype == np.float32 else v,
    "torch": lambda v: torch.tensor(v),
    "torch, bfloat16": lambda v: torch.tensor(v).bfloat16() if v.dtype == np.float32 else torch.tensor(v),
    "torch, float16": lambda v: torch.tensor(v).half() if v.dtype == np.float32 else torch.tensor(v),
}


def server_of_state():
    server = Server(STATE, "FedAvg", 2, lr=0.1)
    server.round([Update(0, {**STATE, "w": STATE["w"] / 3, "bn.num_batches_tracked": np.int64(9)}, 1)])
    return server


@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_is_returned_unchanged_rounds_nothing(form):
    server = server_of_state()
    before = server.x
    model = {name: FORMS[form](np.asarray(value)) for name, value in server.tensors().items()}
    assert not session.changes(server, model)
    assert not session.take_model(server, model)
    assert server.x is not None
    assert server.x.tobytes() == before.tobytes()
    assert server.transactions == 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", STATE)
def test_only_the_numbers_that_a_framework_changed_are_taken(form, name):
    server = server_of_state()
    before = server.tensors()
    model = {key: FORMS[form](np.asarray(value)) for key, value in before.items()}
    due = {key: np.array(value) for key, value in before.items()}
    for tensors in (model, due):
        tensors[name].reshape(-1)[-1:] = True if name == "mask" else 8
    assert session.changes(server, model)
    assert session.take_model(server, model)
    assert not session.changes(server, model)
    assert {key: value.tobytes() for key, value in server.tensors().items()} == {
        key: np.asarray(value).tobytes() for key, value in due.items()
    }
    assert server.round([]).replaced


def test_a_model_is_compared_with_the_one_that_was_returned():
    """An adapter that reads 16 bits as float32 passes what it returned in this form."""
    server = server_of_state()
    returned = {k: v.astype(np.float16).astype(v.dtype) if v.dtype == "f4" else v for k, v in server.tensors().items()}
    before = server.x
    assert session.changes(server, returned)
    assert not session.take_model(server, returned, returned)
    changed = {**returned, "w": returned["w"].copy()}
    changed["w"][0, 1] = 5
    assert session.take_model(server, changed, returned)
    assert server.x[[0, 2, 3, 4]].tobytes() == before[[0, 2, 3, 4]].tobytes()
    assert server.x[1] == 5


def test_a_changed_model_that_does_not_fit_is_an_error_at_once():
    server = server_of_state()
    before, model = server.x, server.tensors()
    for wrong in ({**model, "w": model["w"] * np.nan}, {"w": model["w"]}, {**model, "v": model["w"]}):
        with pytest.raises(ArrayError):
            session.take_model(server, wrong)
    assert server.x.tobytes() == before.tobytes()
    fixed = Server(X0, FedAvgM(placement="client"), 2, lr=0.1)
    assert not session.take_model(fixed, {"w": X0["w"].copy()})
    with pytest.raises(RangeError, match=r"^model\b.*w.*FedAvgM.*placement='server'"):
        session.take_model(fixed, {"w": X0["w"] + 1})


def test_a_changed_model_may_lack_groups():
    server = Server(Model({"a": X0["w"], "b": X0["w"]}, partial={"A": "a"}), "FedAvg", 2, lr=0.1)
    assert not session.take_model(server, {"a": X0["w"]})
    assert session.take_model(server, {"a": X0["w"] + 1})
    assert server.x.tolist() == [1, 2, 3, 4, 0, 1, 2, 3]
