"""What patterns do where nothing is said, and what of them cannot be changed."""

import dataclasses
import inspect

import numpy as np
import pytest

from fedcore.participation import REGISTRY, Active, OverSelection
from fedcore.participation.traces import Generated, Recorded


@pytest.mark.parametrize("name", sorted(REGISTRY.own))
def test_the_seed_is_0(name):
    parameters = inspect.signature(REGISTRY[name]).parameters
    assert "seed" not in parameters or parameters["seed"].default == 0


def test_over_selection_s_times():
    """A spread of .5 over clients and of .25 over rounds."""
    pattern = OverSelection(20_000, 1, seed=2)
    one, other = np.log(pattern.times(0)), np.log(pattern.times(1))
    assert abs(one.var() - (0.25 + 0.0625)) < 0.015
    assert abs(np.cov(one, other)[0, 1] - 0.25) < 0.015


@pytest.mark.parametrize(
    ("frozen", "field"),
    [
        (Active(np.arange(3)), "clients"),
        (Generated("a", 0.5, 0.1), "mean"),
        (Recorded("a", (0.5, 1.0)), "shares"),
    ],
)
def test_values_stay_as_they_are(frozen, field):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(frozen, field, getattr(frozen, field))


def test_an_active_set_is_equal_to_itself_alone():
    """It holds arrays, of which nobody can say whether they are equal in one word."""
    one, other = Active(np.arange(3)), Active(np.arange(3))
    assert one == one
    assert one != other
    assert len({one, other}) == 2
    assert repr(one) == "Active(clients=int64[3])"
