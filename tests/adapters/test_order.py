"""What wires without a channel of their own to the clients take, and what they refuse by name."""

from dataclasses import fields

import pytest

from fedcore.adapters.order import FIELDS, read_fields, require_followed, require_steps, with_plain_steps
from fedcore.algorithms import MIFA, SCAFFOLD
from fedcore.errors import ConfigError, RangeError
from fedcore.server import Broadcast
from tests.adapters.orders import CROSS, ELSEWHERE, OF_STEPS, ORDERS, PLAIN, REFUSED, VECTORS

ORDER = dict.fromkeys(FIELDS, 0) | {"placement": "server", "plain": True, "second_vector": None}


def test_no_field_of_a_broadcast_is_forgotten_here():
    known = CROSS - {"a", "b", "mu"} | VECTORS | REFUSED | set(ELSEWHERE)
    assert {field.name for field in fields(Broadcast)} == known


@pytest.mark.parametrize("name", ORDERS)
def test_a_method_has_plain_steps_or_is_refused_by_name(name):
    assert set(FIELDS) == CROSS
    if name in PLAIN:
        assert with_plain_steps(ORDERS[name], 0.1) is ORDERS[name]
    else:
        with pytest.raises(RangeError, match=f"plain local steps, got {type(ORDERS[name]).__name__}, whose clients"):
            with_plain_steps(ORDERS[name], 0.1)


def test_a_rate_of_each_step_is_refused():
    with pytest.raises(RangeError, match=r"lr: expected one rate for all steps of a round.*InverseStep.*lambda round"):
        with_plain_steps("FedAvg", OF_STEPS)


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_is_missing_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=rf"without \['{name}'\]"):
        read_fields({key: value for key, value in ORDER.items() if key != name})


def test_a_field_that_nobody_knows_is_refused_by_name():
    assert read_fields(ORDER) == ORDER
    with pytest.raises(ConfigError, match=r"with \['clip'\].*of one version"):
        read_fields({**ORDER, "clip": 1.0})
    with pytest.raises(ConfigError, match="placement"):
        read_fields({**ORDER, "placement": "nowhere"})


def test_fedcore_s_own_steps_refuse_what_they_would_not_follow():
    require_followed(ORDER, plain=True)
    require_followed({**ORDER, "plain": False}, plain=False)
    with pytest.raises(RangeError, match=r"options: expected no momentum and no clip.*control='sent'"):
        require_followed(ORDER, plain=False)
    require_followed({**ORDER, "second_vector": "mean gradient"}, plain=True)
    with pytest.raises(RangeError, match=r"second_vector: expected 'mean gradient', got .*'my own'"):
        require_followed({**ORDER, "second_vector": "my own"}, plain=True)
    with pytest.raises(RangeError, match="placement: expected 'server'"):
        require_followed({**ORDER, "placement": "client"}, plain=True)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "", [3]])
def test_steps_are_a_number_or_a_name(steps):
    require_steps(3, MIFA())
    require_steps("num-steps", MIFA())
    with pytest.raises(RangeError, match="steps: expected an integer >= 1, or a metric's name"):
        require_steps(steps, MIFA())


def test_steps_are_not_guessed_for_clients_that_must_do_more():
    with pytest.raises(RangeError, match="steps: expected None, since SCAFFOLD is a method whose clients step along"):
        require_steps(3, SCAFFOLD())
