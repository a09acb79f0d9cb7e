import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedcore
from bench.papers.theory.local_sgd import largest_alpha, largest_full_gradient_rate
from fedcore import errors
from fedcore.algorithms import rates


def test_rates_by_hand():
    assert [rates.Exponential(8, 0.5)(t) for t in range(4)] == [8, 4, 2, 1]
    assert rates.Constant(3)(100) == 3
    assert [rates.Staircase(12)(t) for t in range(4)] == [12, 6, 4, 3]
    assert rates.as_rate(0.1)(7) == 0.1
    twice = lambda round: 2.0 * round  # noqa: E731
    assert rates.as_rate(twice) is twice
    assert [rates.Horizon(L=5, K=4, T=100)(t) for t in (0, 9)] == [0.04, 0.04]


def test_theorem_3_1s_rate_by_hand():
    """16 E / (mu w) / (t E + gamma): here 16 * 5 / (2 * 4) / (5 t + 10) = 10 / (5 t + 10)."""
    rate = rates.InverseRound(mu=2.0, E=5, work=4.0, gamma=10.0)
    assert [rate(t) for t in range(3)] == pytest.approx([1, 10 / 15, 10 / 20])
    assert [rate.restarted(2)(t) for t in range(4)] == pytest.approx([1, 10 / 15, 1, 10 / 15])
    with pytest.raises(errors.RangeError, match="work"):
        rates.InverseRound(mu=2.0, E=5, work=0.0, gamma=10.0)


def test_the_staircase_restarts():
    rate = rates.Staircase(12, restarts=[5, 2])
    assert [rate(t) for t in range(8)] == [12, 6, 12, 6, 4, 12, 6, 4]
    assert rates.Staircase(12, [0])(0) == 12
    assert rate == rates.Staircase(12).restarted(5).restarted(2).restarted(2)
    assert hash(rate) == hash(rates.Staircase(12, (2, 5)))


def test_an_arrival_of_a_schedule_is_a_restart():
    """A new client's first round has eta_0 / 1: the paper's eta_0 / (t - t0) in its round t0 + 1."""
    schedule = fedcore.participation.Schedule(3, arrivals={2: 7})
    rate = rates.Staircase(1.0, restarts=list(schedule.arrivals.values()))
    first = next(t for t in range(20) if 2 in schedule.active(t).clients)
    assert (rate(first - 1), rate(first), rate(first + 1)) == (1 / 7, 1, 1 / 2)


def test_inverse_steps_by_hand():
    rate = rates.InverseStep(mu=2, alpha=3, E=2)  # a = 10
    assert [rate.of_step(*t) for t in ((0, 0), (0, 1), (1, 0), (1, 1), (15, 0))] == [0.2, 4 / 22, 4 / 24, 4 / 26, 0.05]
    assert [rate(t) for t in (0, 1, 15)] == [rate.of_step(t, 0) for t in (0, 1, 15)]


def test_rates_of_steps_are_checked():
    class Odd:
        def __call__(self, round):
            return 0.1

        def of_step(self, round, step):
            return [0.1, -0.1, float("nan"), 0.0][step]

    of_step = rates.rate_of_steps(Odd(), 7)
    assert of_step(0) == 0.1
    for step in (1, 2, 3):
        with pytest.raises(errors.RangeError, match=rf"^rate\b.*step {step}\b.*round 7"):
            of_step(step)
    assert rates.rate_of_steps(rates.Staircase(1.0), 7) is None


def test_the_rate_per_cohort_by_hand():
    rule = rates.PerCohort(c=2, beta=4)
    assert [rule(t, S) for t, S in ((0, 2), (4, 2), (4, 6))] == [1, 0.5, 1.5]
    assert rule(0, 0) == rule(0, 1) == 0.5


def test_the_rate_per_cohort_needs_sizes():
    pattern = fedcore.participation.Uniform(9, 3)
    rule = rates.PerCohort(c=2, beta=4)
    rate = rule.over(lambda t: len(pattern.active(t)))
    assert [rate(t) for t in range(5)] == [rule(t, 3) for t in range(5)]
    server = fedcore.Server(np.zeros(1, np.float32), "MimiC", clients=9, lr=0.1, server_lr=rate)
    for t in range(3):
        before = server.x.copy()
        report = server.round([fedcore.Update(i, before - np.float32(0.1), steps=1) for i in range(3)])
        assert report.gamma == rule(t, 3)
        np.testing.assert_allclose(server.x, before - report.gamma, rtol=1e-6)
    with pytest.raises(errors.RangeError, match=r"^rate\b"):
        fedcore.Server(np.zeros(1, np.float32), "MimiC", clients=9, lr=0.1, server_lr=rule)


@given(st.floats(1, 1e4), st.floats(1, 1e6), st.integers(1, 1000))
def test_the_largest_alpha_is_at_the_edge(kappa, diversity, K):
    bound = kappa * math.sqrt(192 * diversity * (K + 1) / K)
    alpha = largest_alpha(kappa, diversity, K)
    assert alpha * math.exp(-2 / alpha) <= bound
    beyond = alpha * (1 + 1e-9)
    assert beyond * math.exp(-2 / beyond) > bound


@given(st.floats(0.01, 1), st.integers(1, 60), st.floats(1, 1e4))
def test_the_largest_full_gradient_rate_is_at_the_edge(mu, E, diversity):
    def left(eta):
        return eta * (1 + 4 * (1 / mu) * E / (1 - mu * eta) ** (E - 1))

    eta = largest_full_gradient_rate(1.0, mu, E, diversity)
    assert left(eta) <= 1 / diversity * (1 + 1e-12)
    assert left(eta * (1 + 1e-9)) > 1 / diversity


@given(st.floats(0.01, 1), st.integers(1, 60), st.floats(1, 1e4), st.sampled_from([2.0**-10, 0.5, 2.0**7]))
def test_the_rate_is_in_the_unit_of_the_objective(mu, E, diversity, c):
    """f and c f have one kappa and one lambda, so eta c f' must be the same step: eq. 19 as printed fails."""
    of_f, of_cf = (largest_full_gradient_rate(L, L * mu, E, diversity) for L in (1.0, c))
    assert of_cf * c == pytest.approx(of_f, rel=1e-12)


def test_many_local_steps_leave_a_rate():
    assert 0 < largest_full_gradient_rate(1.0, 1.0, 5000, 1.0) < 1e-3


VALUES = [0, -1, float("nan"), float("inf"), "1", True, None]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (rates.as_rate, "rate"),
        (lambda bad: rates.Constant(bad), "rate"),
        (lambda bad: rates.Exponential(1, bad), "decay"),
        (lambda bad: rates.Exponential(bad, 0.5), "initial"),
        (lambda bad: rates.Staircase(bad), "initial"),
        (lambda bad: rates.Horizon(bad, 1, 1), "L"),
        (lambda bad: rates.InverseStep(bad, 1, 1), "mu"),
        (lambda bad: rates.InverseStep(1, bad, 1), "alpha"),
        (lambda bad: rates.PerCohort(bad, 1), "c"),
        (lambda bad: rates.PerCohort(1, bad), "beta"),
        (lambda bad: largest_full_gradient_rate(bad, 1, 1, 1), "L"),
        (lambda bad: largest_full_gradient_rate(1, bad, 1, 1), "mu"),
    ],
)
def test_numbers_that_must_be_positive(call, name, value):
    with pytest.raises(errors.RangeError, match=rf"^{name}\b"):
        call(value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rates.Horizon(1, 0, 1), r"K\b"),
        (lambda: rates.Horizon(1, 1, 1.0), r"T\b"),
        (lambda: rates.InverseStep(1, 1, 0), r"E\b"),
        (lambda: rates.Exponential(1, 1.5), r"decay\b"),
        (lambda: rates.Staircase(1, [-1]), r"restarts\b"),
        (lambda: rates.Staircase(1, [1.0]), r"restarts\b"),
        (lambda: rates.Staircase(1, "12"), r"restarts\b"),
        (lambda: rates.Staircase(1, [True]), r"restarts\b"),
        (lambda: largest_alpha(0.5, 1, 1), r"kappa\b"),
        (lambda: largest_alpha(1, 0.5, 1), r"diversity\b"),
        (lambda: largest_alpha(1, 1, 0), r"K\b"),
        (lambda: largest_full_gradient_rate(1, 2, 1, 1), r"mu\b"),
        (lambda: rates.rate_at(rates.Exponential(1, 1e-300), 2), r"rate\b"),
    ],
)
def test_other_arguments_are_named(call, message):
    with pytest.raises(errors.RangeError, match=rf"^{message}"):
        call()


def test_every_rate_is_registered_by_its_name_and_cites_its_source():
    for name, kind in rates.REGISTRY.items():
        assert kind.__name__ == name
        assert name == "Constant" or "Reference:" in kind.__doc__
        assert ">>>" in kind.__doc__


@pytest.mark.parametrize("wrong", [math.nan, -1.0, 0, 1e39, "fast", None, np.ones(2), ZeroDivisionError])
@pytest.mark.parametrize("what", ["lr", "server_lr"])
def test_own_rate_that_fails_is_named_and_changes_nothing(what, wrong):
    """It works in the first round, and in the third one."""

    def decayed(round):
        if round == 1 and isinstance(wrong, type):
            raise wrong
        return wrong if round == 1 else 0.1

    server = fedcore.Server(np.zeros(2, np.float32), "MIFA", clients=1, **{"lr": 0.1, what: decayed})
    update = fedcore.Update(0, np.ones(2, np.float32), steps=1)
    server.round([update])
    before = server.x.tobytes()
    for call in (lambda: server.round([update]), lambda: server.broadcast([0]))[: 1 + (what == "lr")]:
        with pytest.raises((errors.AlgorithmError, errors.RangeError), match="decayed"):
            call()
    assert (server.round_number, server.x.tobytes()) == (1, before)
