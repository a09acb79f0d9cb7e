"""Ruan et al. 2021, eq. 7 to 9, against their definitions: a minimum over many rounds, and limits."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bench.papers.theory import departure
from fedcore.errors import RangeError

CONSTANTS = dict(t0=20, E=5, D=2.0, V=30.0, g=1.0, gap=9.0)


@given(
    t0=st.integers(1, 200),
    more=st.integers(0, 2000),
    E=st.integers(1, 20),
    D=st.floats(0, 100),
    V=st.floats(0.01, 1e4),
    g=st.floats(0.01, 1e3),
    gap=st.floats(0, 100),
)
def test_eq_8_is_the_minimum_over_all_rounds(t0, more, E, D, V, g, gap):
    T = t0 + more
    rounds = [*range(t0, t0 + 2000), *(t0 + 10**k for k in range(4, 15))]
    least = min(((t - t0) * D + V) / (t * E + g) for t in rounds)
    excluded = (V / (t0 * E + g) + gap) / ((T - t0) * E + g)
    assume(abs(least - excluded) > 1e-6 * (least + excluded))  # Otherwise the result depends on rounding.
    assert departure.should_exclude(T, t0=t0, E=E, D=D, V=V, g=g, gap=gap) == (least >= excluded)


def test_f_0_and_f_1_are_the_bounds_of_the_paper():
    assert departure.kept_bound(20, t0=20, E=5, D=2.0, V=30.0, g=10.0) == 30 / 110
    assert departure.kept_bound(30, t0=20, E=5, D=2.0, V=30.0, g=10.0) == 50 / 160
    assert departure.excluded_bound(30, t0=20, E=5, V=30.0, g=10.0, gap=1.0) == (30 / 110 + 1) / 60


def test_exclusion_pays_for_all_later_ends():
    answers = [departure.should_exclude(T, **CONSTANTS) for T in range(20, 200)]
    assert answers == sorted(answers)
    assert not answers[0]
    assert answers[-1]


def test_a_custom_bound():
    constants = CONSTANTS | {"g": 10.0}
    assert departure.should_exclude(25, **constants)  # As printed, f_1 starts at a tenth of f_0 plus the gap.
    assert not departure.should_exclude(25, **constants, V_after=10 * (30 / 110 + 9))
    assert departure.should_exclude(90, **constants, V_after=10 * (30 / 110 + 9))


def test_with_d_0_exclusion_never_pays():
    """With D = 0 the bound falls to zero if the device is kept."""
    assert not departure.should_exclude(10**9, **CONSTANTS | {"D": 0.0})


@pytest.mark.parametrize(("t0", "gap", "c"), [(16, 9.0, 1.0), (50, 0.5, 2.0), (7, 0.0, 3.0)])
def test_eq_9_is_a_square_root(t0, gap, c):
    expected = t0 + math.ceil(c * math.sqrt(gap * t0))
    assert [departure.should_exclude_by_rate(T, t0=t0, gap=gap, c=c) for T in (expected, expected + 1)] == [True, True]
    if expected > t0:
        assert not departure.should_exclude_by_rate(expected - 1, t0=t0, gap=gap, c=c)


def test_eq_7_in_numbers():
    # (2 sqrt(8) / .5 * .25 * 3 + 1) * .25 * 10 with L = 4, mu = .5, p = .25, Gamma = 9, W = 10
    due = 1.5 / ((2 * math.sqrt(8) / 0.5 * 0.25 * 3 + 1) * 0.25 * 10)
    found = departure.reboot_helps_within(shift=1.5, share=0.25, gap=9.0, L=4.0, mu=0.5, W=10.0)
    assert found == pytest.approx(due)


def test_the_reboot_radius_falls_with_the_gap():
    radii = [departure.reboot_helps_within(shift=1.0, share=0.1, gap=gap, L=4.0, mu=0.5, W=10.0) for gap in (0, 1, 4)]
    assert radii == sorted(radii, reverse=True)
    assert radii[0] == 1.0


@pytest.mark.parametrize(
    "wrong", [{"t0": 0}, {"T": 19}, {"E": 0}, {"D": -1.0}, {"V": 0.0}, {"g": 0.0}, {"gap": math.inf}, {"gap": math.nan}]
)
def test_wrong_numbers_are_rejected(wrong):
    with pytest.raises(RangeError, match=rf"^{next(iter(wrong))}\b"):
        departure.should_exclude(**{"T": 30} | CONSTANTS | wrong)


@pytest.mark.parametrize(
    "wrong", [{"share": 1.5}, {"share": 0.0}, {"L": 0.0}, {"mu": 0.0}, {"W": 0.0}, {"shift": -1.0}]
)
def test_wrong_numbers_of_eq_7_are_rejected(wrong):
    numbers = dict(shift=1.0, share=0.1, gap=1.0, L=4.0, mu=0.5, W=10.0)
    with pytest.raises(RangeError, match=rf"^{next(iter(wrong))}\b"):
        departure.reboot_helps_within(**numbers | wrong)


def test_the_constant_of_eq_9_is_positive():
    with pytest.raises(RangeError, match=r"^c\b"):
        departure.should_exclude_by_rate(30, t0=20, gap=1.0, c=0.0)


@given(
    curvatures=st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    start=st.lists(st.floats(-1e3, 1e3), min_size=6, max_size=6),
)
def test_the_distance_to_a_quadratic_s_optimum_is_between_the_bounds(curvatures, start):
    gradient = math.hypot(*(a * x for a, x in zip(curvatures, start, strict=False)))
    low, high = departure.distance_by_gradient(gradient, L=max(curvatures), mu=min(curvatures))
    distance = math.hypot(*start[: len(curvatures)])
    assert low * (1 - 1e-12) - 1e-300 <= distance <= high * (1 + 1e-12) + 1e-300


def test_the_bounds_of_the_distance_are_attained():
    assert departure.distance_by_gradient(6.0, L=3.0, mu=0.5) == (2.0, 12.0)
    assert departure.distance_by_gradient(0.0, L=3.0, mu=3.0) == (0.0, 0.0)


@pytest.mark.parametrize("wrong", [{"length": -1.0}, {"length": math.inf}, {"L": 0.0}, {"mu": 0.0}, {"mu": 4.1}])
def test_wrong_numbers_of_the_distance_are_rejected(wrong):
    with pytest.raises(RangeError, match=rf"^{next(iter(wrong))}\b"):
        departure.distance_by_gradient(**dict(length=1.0, L=4.0, mu=0.5) | wrong)
