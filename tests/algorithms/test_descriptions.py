"""What a folder says of the caller's own methods and rates: names of methods, and of rates none that anybody calls."""

import pytest

from fedcore.algorithms import MIFA
from fedcore.algorithms.base import Claims
from fedcore.algorithms.rates import Exponential
from fedcore.errors import CheckpointError, RangeError
from fedcore.options import describe, next_rate, revive
from tests.algorithms.own import Fading, Own, Untold


def test_a_method_of_one_s_own_has_a_name():
    own = describe("algorithm", Own(0.5))
    assert (own["name"], own["class"], own["options"]) == ("tests.algorithms.own:Own", "Own", {"part": 0.5})


def test_a_rate_of_one_s_own_has_none():
    own = describe("lr", Fading(0.1))
    assert (own["name"], own["class"], own["options"]) == (None, "Fading", {"first": 0.1})


def test_what_is_said_of_an_object_is_short():
    def rate(t):
        return 0.1

    rate.__qualname__ = "rate" * 100
    said = describe("lr", rate)
    assert said == {"name": None, "was": repr(rate)[:200]}
    assert len(said["was"]) == 200


def test_claims_of_nobody():
    claims = Claims()
    for column in (claims.steps, claims.examples, claims.counts):
        assert column.shape == (0,)
        assert column.dtype == float


def test_a_rate_s_next_value_is_that_of_one_s_own_alone():
    """A rate of the package's is known by its name and options."""
    assert next_rate("lr", Fading(0.5), 4) == 0.1
    assert next_rate("lr", Exponential(0.1, 0.9), 4) is None
    assert next_rate("lr", None, 4) is None


def test_what_was_no_truth_is_refused():
    """JSON has numbers where a folder was forged."""
    said = describe("algorithm", MIFA())
    assert revive("algorithm", said, None) == MIFA()
    with pytest.raises(RangeError, match=r"^algorithm\b.*wait"):
        revive("algorithm", said | {"options": said["options"] | {"wait": 1}}, None)


def test_an_option_that_is_left_out_has_its_default():
    assert revive("algorithm", {"name": "MIFA", "options": {}}, None) == MIFA()


def test_a_rate_by_its_module_is_not_looked_up():
    with pytest.raises(CheckpointError, match=r"^lr\b"):
        revive("lr", {"name": "tests.algorithms.own:Fading", "was": "Fading", "options": {}}, None)


def test_another_class_is_refused_by_its_name():
    """Whatever the one that is given is: an object, a method of the package's, or a function."""
    saved = describe("algorithm", Own(0.5))
    with pytest.raises(CheckpointError, match=r"^algorithm\b.*Own.*MIFA"):
        revive("algorithm", saved, MIFA())
    rate = describe("lr", Fading(0.5))
    with pytest.raises(CheckpointError, match=r"^lr\b.*Fading"):
        revive("lr", rate, lambda t: 0.1)


def test_a_class_whose_arguments_nobody_can_tell():
    class Odd:
        __signature__ = "none"

        def __call__(self, t):
            return 0.1

    said = describe("lr", Odd())
    assert (said["name"], said["options"]) == (None, {})
    said = describe("algorithm", Untold(0.5))  # which has a name to be found by, but nobody knows how it is made
    assert (said["name"], said["class"], said["options"]) == (None, "Untold", {})
