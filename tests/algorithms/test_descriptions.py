"""Descriptions of custom methods and rates in folders: names of methods, and values of rates."""

import pytest

from fedcore.algorithms import MIFA
from fedcore.algorithms.base import Claims
from fedcore.algorithms.rates import Exponential
from fedcore.errors import CheckpointError, RangeError
from fedcore.options import describe, next_rate, revive
from tests.algorithms.own import Fading, Own, Untold


def test_a_custom_method_has_a_name():
    own = describe("algorithm", Own(0.5))
    assert (own["name"], own["class"], own["options"]) == ("tests.algorithms.own:Own", "Own", {"part": 0.5})


def test_a_custom_rate_has_no_name():
    own = describe("lr", Fading(0.1))
    assert (own["name"], own["class"], own["options"]) == (None, "Fading", {"first": 0.1})


def test_descriptions_are_short():
    def rate(t):
        return 0.1

    rate.__qualname__ = "rate" * 100
    output = describe("lr", rate)
    assert output == {"name": None, "was": repr(rate)[:200]}
    assert len(output["was"]) == 200


def test_claims_without_clients():
    claims = Claims()
    for column in (claims.steps, claims.examples, claims.counts):
        assert column.shape == (0,)
        assert column.dtype == float


def test_only_custom_rates_are_described_by_their_next_value():
    """The package's rates are described by name and options."""
    assert next_rate("lr", Fading(0.5), 4) == 0.1
    assert next_rate("lr", Exponential(0.1, 0.9), 4) is None
    assert next_rate("lr", None, 4) is None


def test_invalid_booleans_are_rejected():
    """A forged folder may have numbers instead of booleans."""
    output = describe("algorithm", MIFA())
    assert revive("algorithm", output, None) == MIFA()
    with pytest.raises(RangeError, match=r"^algorithm\b.*wait"):
        revive("algorithm", output | {"options": output["options"] | {"wait": 1}}, None)


def test_an_option_that_is_left_out_has_its_default():
    assert revive("algorithm", {"name": "MIFA", "options": {}}, None) == MIFA()


def test_a_rate_by_its_module_is_not_looked_up():
    with pytest.raises(CheckpointError, match=r"^lr\b"):
        revive("lr", {"name": "tests.algorithms.own:Fading", "was": "Fading", "options": {}}, None)


def test_another_class_is_refused_by_its_name():
    """For objects, the package's methods and functions."""
    saved = describe("algorithm", Own(0.5))
    with pytest.raises(CheckpointError, match=r"^algorithm\b.*Own.*MIFA"):
        revive("algorithm", saved, MIFA())
    rate = describe("lr", Fading(0.5))
    with pytest.raises(CheckpointError, match=r"^lr\b.*Fading"):
        revive("lr", rate, lambda t: 0.1)


def test_a_class_without_a_signature():
    class Odd:
        __signature__ = "none"

        def __call__(self, t):
            return 0.1

    output = describe("lr", Odd())
    assert (output["name"], output["options"]) == (None, {})
    output = describe("algorithm", Untold(0.5))  # it has a name, but no known arguments
    assert (output["name"], output["class"], output["options"]) == (None, "Untold", {})
