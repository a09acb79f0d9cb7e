from collections.abc import Callable

import numpy as np
import pytest

from fedcore.errors import RangeError, UnknownNameError
from fedcore.participation import REGISTRY, Bernoulli, Participation, RoundRobin, TimeVarying, named

OPTIONS = {
    "Bernoulli": {"p": 0.4},
    "RoundRobin": {"tau_max": 6, "phase": "random"},
    "TimeVarying": {"share": 0.3},
}


def make(name: str, **options: object) -> Participation:
    return named(name, 20, **OPTIONS[name], **options)


def test_every_pattern_is_tested_here() -> None:
    assert OPTIONS.keys() == REGISTRY.keys()


@pytest.mark.parametrize("name", OPTIONS)
def test_a_round_is_the_same_in_any_order_of_calls(name: str) -> None:
    forward, backward = make(name, seed=3), make(name, seed=3)
    there = [forward.active(t) for t in range(12)]
    back = [backward.active(t) for t in reversed(range(12))][::-1]
    again = [forward.active(t) for t in range(12)]
    for a, b, c in zip(there, back, again, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)


@pytest.mark.parametrize("name", OPTIONS)
def test_answers_are_sorted_distinct_clients(name: str) -> None:
    pattern = make(name)
    for t in range(12):
        active = pattern.active(t)
        assert active.dtype == np.int64
        assert (np.diff(active) > 0).all()
        assert ((active >= 0) & (active < 20)).all()


@pytest.mark.parametrize("name", OPTIONS)
def test_rounds_and_seeds_differ(name: str) -> None:
    sets = [make(name, seed=seed).active(t).tolist() for seed in (0, 1) for t in (1, 2)]
    assert len({tuple(active) for active in sets}) == 4


@pytest.mark.parametrize("name", OPTIONS)
def test_first_round_all_changes_round_0_only(name: str) -> None:
    everyone, plain = make(name, first_round="all"), make(name)
    np.testing.assert_array_equal(everyone.active(0), np.arange(20))
    assert len(plain.active(0)) < 20
    for t in range(1, 6):
        np.testing.assert_array_equal(everyone.active(t), plain.active(t))


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: Bernoulli(0, 0.5), "clients"),
        (lambda: Bernoulli(3, 0.5, seed=-1), "seed"),
        (lambda: Bernoulli(3, 0.5, first_round="none"), "first_round"),
        (lambda: Bernoulli(3, 0.5).active(-1), "round"),
        (lambda: Bernoulli(3, 1.01), "p"),
        (lambda: Bernoulli(3, float("nan")), "p"),
        (lambda: RoundRobin(3, -1), "tau_max"),
        (lambda: RoundRobin(3, 2, phase="zeros"), "phase"),
        (lambda: TimeVarying(3, 0), "share"),
        (lambda: TimeVarying(3, 1.5), "share"),
    ],
)
def test_an_argument_out_of_range_is_named(call: Callable[[], object], argument: str) -> None:
    with pytest.raises(RangeError, match=rf"^{argument}: expected"):
        call()


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"participation: 'Bernouli' is unknown; did you mean 'Bernoulli'"):
        named("Bernouli", 3, p=0.5)
