"""What a folder says of the caller's own methods and rates: names of methods, and of rates none that anybody calls."""

from fedcore.algorithms.cohort import Claims
from fedcore.algorithms.descriptions import describe
from tests.algorithms.own import Fading, Halved, Own


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


def test_a_sum_that_forgets_is_not_whole():
    assert Halved().keeps_total
    assert not Halved().total_is_whole


def test_claims_of_nobody():
    claims = Claims()
    for column in (claims.steps, claims.examples, claims.counts):
        assert column.shape == (0,)
        assert column.dtype == float
