"""What wires without a channel of their own to the clients take, and what they refuse by name."""

from dataclasses import fields

import numpy as np
import pytest

from fedcore import Server, Update
from fedcore.adapters.session import require_steps, with_plain_steps
from fedcore.algorithms import MIFA, SCAFFOLD
from fedcore.errors import RangeError
from fedcore.server.instructions import Instructions
from tests.adapters.orders import OF_STEPS, ORDERS, PLAIN


@pytest.mark.parametrize("name", ORDERS)
def test_a_method_has_plain_steps_or_is_refused_by_name(name):
    if name in PLAIN:
        assert with_plain_steps(ORDERS[name], 0.1) is ORDERS[name]
    else:
        with pytest.raises(RangeError, match=rf"^algorithm\b.*{type(ORDERS[name]).__name__}"):
            with_plain_steps(ORDERS[name], 0.1)


def test_a_rate_of_each_step_is_refused():
    with pytest.raises(RangeError, match=r"^lr\b.*InverseStep.*lambda round"):
        with_plain_steps("FedAvg", OF_STEPS)


@pytest.mark.parametrize("steps", [0, -1, 1.5, 2**53 + 1, True, "", [3]])
def test_steps_are_a_number_or_a_name(steps):
    require_steps(3, MIFA())
    require_steps("num-steps", MIFA())
    with pytest.raises(RangeError, match=r"^steps\b"):
        require_steps(steps, MIFA())


def test_steps_are_not_guessed_for_clients_that_must_do_more():
    with pytest.raises(RangeError, match=r"^steps\b"):
        require_steps(3, SCAFFOLD())


def test_everything_sets_every_field_of_an_order():
    server = Server(np.zeros(3, np.float32), ORDERS["everything"], clients=2, lr=0.5)
    server.round([Update(0, np.float32([1, 2, 3]), 1, control=np.ones(3, np.float32))])
    asked, usual = server.broadcast([0]).of(0), Instructions(round=0, lr=0.1)
    for name in {field.name for field in fields(Instructions)} - {"lr_of_step"}:
        assert np.any(getattr(asked, name) != getattr(usual, name)), name
