"""Instructions are equal after the wire, and no other value is sent."""

import pickle
from dataclasses import fields

import numpy as np
import pytest

from fedcore import Server
from fedcore.algorithms.rates import InverseStep
from fedcore.errors import ArrayError, ConfigError, RangeError, UnknownNameError
from fedcore.server import Broadcast
from fedcore.server.broadcast import NUMBERS, VECTORS
from fedcore.server.broadcast import Instructions as Assignment
from tests.sim.outsider import Share

FULL = Assignment(
    round=7,
    lr=0.25,
    a=0.5,
    b=-0.5,
    mu=0.125,
    second_vector="mean gradient",
    local_rule=Share(0.25),
    keeps_row=True,
    plain=True,
    needs_loss=True,
    offset=np.float32([1, 2]),
    x_prev=np.float32([3, 4, 5]),
)
PLAIN = Assignment(round=0, lr=0.1, plain=True)


def test_every_field_is_sent_or_rejected():
    assert {*NUMBERS, *VECTORS, "lr_of_step", "start"} == {field.name for field in fields(Assignment)} | {
        "rule_options",
        "vectors",
    }
    default = Assignment(round=0, lr=0.1)
    for field in fields(Assignment):
        if field.name not in ("lr_of_step", "lr", "round", "start"):
            assert getattr(FULL, field.name) is not getattr(default, field.name)


@pytest.mark.parametrize("assignment", [FULL, PLAIN])
def test_instructions_are_equal_after_the_wire(assignment):
    assert Assignment.read(assignment.numbers(), assignment.vectors()) == assignment
    assert pickle.loads(pickle.dumps(assignment)) == assignment


def test_instructions_differ_if_a_field_differs():
    numbers, vectors = FULL.numbers(), FULL.vectors()
    plain = PLAIN.numbers() | {"local_rule": "tests.sim.outsider:Other"}
    other_value = (
        plain | {name: "other" for name, value in plain.items() if value == ""} | {"round": 7, "b": 0.75, "mu": 0.75}
    )
    others = [(numbers | {name: other_value[name]}, vectors) for name in NUMBERS if name != "vectors"]
    others += [(numbers, vectors | {name: vectors[name] + 1}) for name in VECTORS]
    others += [(numbers | {"vectors": "x_prev"}, {"x_prev": vectors["x_prev"]})]
    for other in others:
        one = Assignment.read(*other)
        assert (one == FULL) == (other[0] == numbers and other[1] is vectors)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("round", "seven"),
        ("lr", np.nan),
        ("mu", "x"),
        ("a", None),
        ("plain", "false"),
        ("keeps_row", 1),
        ("vectors", 3),
    ],
)
def test_a_field_of_another_type_is_rejected(name, value):
    with pytest.raises(ConfigError, match=rf"^{name}\b"):
        Assignment.read(FULL.numbers() | {name: value}, FULL.vectors())


@pytest.mark.parametrize("name", NUMBERS)
def test_a_missing_field_is_rejected(name):
    with pytest.raises(ConfigError, match=f"'{name}'"):
        Assignment.read({key: value for key, value in FULL.numbers().items() if key != name}, FULL.vectors())


def test_an_unknown_field_is_rejected():
    with pytest.raises(ConfigError, match="'clip'"):
        Assignment.read({**FULL.numbers(), "clip": 1.0}, FULL.vectors())
    with pytest.raises(ConfigError, match="'controls'"):
        Assignment.read(FULL.numbers(), FULL.vectors() | {"controls": np.zeros(2, np.float32)})
    with pytest.raises(ConfigError, match="keeps_row"):
        Assignment.read({**FULL.numbers(), "keeps_row": "nowhere"}, FULL.vectors())
    with pytest.raises(UnknownNameError, match=r"^local_rule\b"):
        Assignment.read({**FULL.numbers(), "local_rule": "not.here:Rule"}, FULL.vectors())
    with pytest.raises(ConfigError, match="rule_options"):
        Assignment.read({**FULL.numbers(), "rule_options": "half"}, FULL.vectors())
    with pytest.raises(ArrayError, match=r"^x_prev\b"):
        Assignment.read(FULL.numbers(), {})
    for vectors in ({"x_prev": FULL.x_prev}, {}):
        with pytest.raises(ConfigError, match=r"^instructions\b"):
            Assignment.read({**FULL.numbers(), "b": 0.0}, vectors)


def test_rates_of_steps_are_not_sent():
    rate = InverseStep(mu=0.5, alpha=3.0, E=4)
    one = Server(np.zeros(2, np.float32), "FedAvg", 2, lr=rate).broadcast([0]).of(0)
    assert [one.lr_of_step(k) for k in range(3)] == [rate.of_step(0, k) for k in range(3)]
    assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(RangeError, match=r"^lr\b"):
        one.numbers()


@pytest.mark.parametrize("method", ["FedAvg", "FedAWE", "SCAFFOLD", "SCAFFOLDMVR", "MBSTORM", "LocalDescent", "MimiC"])
def test_instructions_have_the_fields_of_their_broadcast(method):
    broadcast = Server(np.ones(3, np.float32), method, 2, lr=0.5).broadcast([0, 1])
    one = broadcast.of(1)
    shared = {field.name for field in fields(Assignment)} - {"offset", "start"}
    for name in shared:
        assert getattr(one, name) is getattr(broadcast, name) or getattr(one, name) == getattr(broadcast, name)
    assert (one.offset is None) == (not broadcast.has_offset)
    assert (one.start is None) == (not broadcast.has_starts)
    beside = {"ids", "from_row", "has_offset", "bytes", "vectors"}
    assert {field.name for field in fields(Broadcast)} - beside == shared - {"x_prev"}


def test_local_steps_reject_instructions_they_do_not_support():
    PLAIN.require_followed(plain=True)
    Assignment(round=0, lr=0.1).require_followed(plain=False)
    with pytest.raises(RangeError, match=r"^options\b"):
        PLAIN.require_followed(plain=False)
    Assignment(round=0, lr=0.1, second_vector="mean gradient").require_followed(plain=True)
    with pytest.raises(RangeError, match=r"^second_vector\b"):
        Assignment(round=0, lr=0.1, second_vector="my own").require_followed(plain=True)
    with pytest.raises(RangeError, match=r"^keeps_row\b"):
        FULL.require_followed(plain=True)
