"""A method of one's own is refused where its table contradicts itself, and where it returns what it must not."""

import re
from dataclasses import dataclass

import numpy as np
import pytest

from fedcore import Server, Update, algorithms
from fedcore.algorithms import MEAN_GRADIENT, Algorithm, Direction, Step, check_table
from fedcore.errors import AlgorithmError, RangeError, UnknownNameError
from tests.algorithms import outsiders
from tests.server.rounds import METHODS, made


def server_of(algorithm, **options):
    return Server(algorithm, np.zeros(4, np.float32), clients=3, lr=0.1, **options)


def method(entries, step=lambda self, cohort: Step(from_sum=1 / cohort.S), **more):
    """An algorithm with these entries."""
    return type("Mine", (Algorithm,), dict(entries, step=step, **more))()


@pytest.mark.parametrize("name", METHODS)
def test_the_methods_of_the_registry_are_as_they_should_be(name):
    check_table(made(name).algorithm)


@pytest.mark.parametrize("name", outsiders.METHODS)
def test_so_are_methods_that_nobody_has_seen(name):
    check_table(outsiders.METHODS[name]())


@pytest.mark.parametrize(
    ("entries", "error", "message"),
    [
        (dict(adds="median"), UnknownNameError, "Mine.adds: 'median' is unknown"),
        (dict(adds="h-r"), UnknownNameError, "Mine.adds: 'h-r' is unknown; did you mean 'h - r'"),
        (dict(adds=None), UnknownNameError, "Mine.adds: None is unknown"),
        (dict(placement="nowhere"), UnknownNameError, "Mine.placement: 'nowhere' is unknown"),
        (dict(second=True), AlgorithmError, "Mine.second: expected None, or what clients send .* got True"),
        (dict(second=""), AlgorithmError, "Mine.second: expected None, or what clients send .* got ''"),
        (dict(keeps_total=1), AlgorithmError, "Mine.keeps_total: expected True or False, got 1"),
        (dict(local_rule=None), AlgorithmError, "Mine.local_rule: expected the name of a local rule, got None"),
        (dict(direction={"a": 1}), AlgorithmError, "Mine.direction: expected a Direction of finite numbers, got {"),
        (
            dict(direction=Direction(mu=np.nan)),
            AlgorithmError,
            "Mine.direction: expected a Direction of finite",
        ),
        (dict(direction=Direction(a="1")), AlgorithmError, "Mine.direction: expected a Direction of finite"),
        (dict(direction=Direction(from_row=-1)), AlgorithmError, "Mine.direction: expected from_row = 0, since there"),
        (
            dict(direction=Direction(from_mean=1)),
            AlgorithmError,
            "Mine.direction: expected from_mean = 0, since",
        ),
        (dict(adds="raw - r", direction=Direction(a=0)), AlgorithmError, "Mine.direction: expected a != 0"),
        (dict(adds="h - r + v[t]"), AlgorithmError, r"Mine.keeps_total: expected True beside adds = 'h - r \+ v\[t\]'"),
        (dict(adds="h - r", second=MEAN_GRADIENT), AlgorithmError, "Mine.adds: expected 'h', since the second vector"),
        (dict(adds="h - r", placement="client"), AlgorithmError, "Mine.adds: expected 'h', since clients keep their"),
    ],
)
def test_a_contradiction_is_refused_by_name(entries, error, message):
    with pytest.raises(error, match=message):
        server_of(method(entries))


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (0.5, "Mine.step: expected a Step, got float"),
        (None, "Mine.step: expected a Step, got NoneType"),
        (Step(from_sum=np.inf), r"Mine.step: expected finite numbers, got Step\(from_sum=inf"),
        (Step(from_sum="1"), "Mine.step: expected finite numbers"),
        (
            Step(1, from_total=0.5),
            "Mine.step: expected from_total = 0, since keeps_total is False, got 0.5: say",
        ),
        (Step(1, keep_sum=1), "Mine.step: expected keep_sum = 0, since keeps_total is False"),
        (Step(1, keep_v=1), "Mine.step: expected keep_v = 0, since keeps_total is False"),
        (Step(1, keep_control=1), "Mine.step: expected keep_control = 0, since keeps_total is False"),
    ],
)
def test_a_step_that_is_none_is_refused(step, message):
    with pytest.raises(AlgorithmError, match=message):
        server_of(method({}, step=lambda self, cohort: step))


def test_a_step_that_sums_second_vectors_without_any_is_refused():
    with pytest.raises(AlgorithmError, match=r"Mine.step: expected keep_control = 0, since clients send no second"):
        server_of(method(dict(keeps_total=True), step=lambda self, cohort: Step(1, keep_control=1)))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (1.0, r"Mine.weigh: expected float64\[2\], finite and >= 0, got 1.0"),
        ([1.0, 1.0], r"Mine.weigh: expected float64\[2\], finite and >= 0, got \[1.0, 1.0\]"),
        (np.ones(3), r"Mine.weigh: expected float64\[2\], finite and >= 0, got float64\[3\]"),
        (np.ones(2, np.float32), r"Mine.weigh: .* got float32\[2\]"),
        (np.ones(2, bool), r"Mine.weigh: .* got bool\[2\]"),
        (np.array([1, np.nan]), r"Mine.weigh: .* got nan"),
        (np.array([1.0, -2.0]), r"Mine.weigh: .* got -2"),
    ],
)
def test_weights_that_are_none_are_refused(weights, message):
    with pytest.raises(AlgorithmError, match=message):
        server_of(method({}, weigh=lambda self, claims: weights))


def test_what_is_wrong_in_some_cohorts_alone_is_told_when_it_comes():
    late = method({}, step=lambda self, cohort: Step(from_sum=1.0, keep_sum=float(cohort.S == 3)))
    weigh = method({}, weigh=lambda self, claims: claims.counts / abs(claims.steps - 5))
    for algorithm, message in ((late, "Mine.step: expected keep_sum = 0"), (weigh, "Mine.weigh: .* got inf")):
        server = server_of(algorithm)
        server.round([Update(i, server.x + 1, steps=6) for i in range(2)])
        x = server.x
        with np.errstate(divide="ignore"), pytest.raises(AlgorithmError, match=message):
            server.round([Update(i, server.x + 1, steps=5) for i in range(3)])
        assert server.x.tobytes() == x.tobytes()
        server.round([Update(0, server.x + 1, steps=6)])  # as if that round had never been
        assert server.round_number == 2


def test_a_method_that_cannot_be_tried_is_seen_when_it_is_used():
    picky = method({}, step=lambda self, cohort: Step(from_sum={1: 1.0}[cohort.S]))
    server = server_of(picky)
    assert server.round([Update(0, server.x + 1, steps=1)]).heard == (0,)
    with pytest.raises(KeyError):
        server.round([Update(i, server.x + 1, steps=1) for i in range(2)])


class Kept(Algorithm):
    def __init__(self, alpha=0.1, *more, beta=1, **others):
        self._alpha, self.beta = alpha, beta

    def step(self, cohort):
        return Step(from_sum=1 / cohort.S)


@dataclass(frozen=True)
class Frozen(Algorithm):
    alpha: float = 0.1

    def step(self, cohort):
        return Step(from_sum=1 / cohort.S)


def test_an_option_under_another_name_is_refused():
    with pytest.raises(AlgorithmError, match=re.escape("Kept.alpha: expected the option as an attribute of its name")):
        server_of(Kept())
    server_of(Frozen(0.2))


def test_rows_may_be_taken_off_without_a_total():
    """A sum of differences from rows is float64 also where no total is."""
    taken = method(dict(adds="h - r"), step=lambda self, cohort: Step(from_sum=1 / cohort.S))
    server = server_of(taken, own_rates=True)
    for _ in range(2):
        server.round([Update(0, np.full(4, 2, np.float32), steps=1, kind="gradient", lr=1.0)])
    np.testing.assert_array_equal(server.x, [-2] * 4)  # the second time h - r is zero


def test_a_number_is_no_limit_of_models_and_gradients_at_once():
    class Both(algorithms.FedAvg):
        second = MEAN_GRADIENT

    with pytest.raises(RangeError, match="max_norm: expected None, since models are averaged and second vectors are"):
        server_of(Both(), max_norm=5)
    server_of(Both(), max_norm=5, server_lr=0.1)
    server_of(Both(), max_norm_ratio=5)
