"""Checks of numbers: what is in a range, and the words for one."""

import tracemalloc
from fractions import Fraction

import numpy as np
import pytest

from fedcore.arguments import due_in, due_whole, inside, integral, real, shown, whole
from fedcore.errors import RangeError

HUGE = 10**400
"""Below infinity, and no float."""


@pytest.mark.parametrize(
    ("value", "interval", "fits"),
    [
        (0, "(0, 1]", False),
        (1, "(0, 1]", True),
        (0, "[0, 1)", True),
        (1, "[0, 1)", False),
        (np.float32(0.5), "[0, 1]", True),
        (Fraction(1, 3), "[0, 1]", True),
        (float("nan"), "[0, 1]", False),
        (float("inf"), "(0, inf)", False),
        (1.7e308, "(0, inf)", True),
        (HUGE, "(0, inf)", False),
        (-HUGE, "(0, inf)", False),
        (True, "[0, 1]", False),
        ("1", "[0, 1]", False),
        (None, "[0, 1]", False),
        (1j, "[0, 1]", False),
        (np.ones(1), "[0, 1]", False),
    ],
)
def test_a_number_is_inside_or_not(value, interval, fits):
    assert inside(value, interval) == fits
    if fits:
        assert real("x", value, interval) == float(value)
    else:
        with pytest.raises(RangeError, match=r"^x\b"):
            real("x", value, interval)


@pytest.mark.parametrize(
    ("value", "low", "high", "fits"),
    [
        (1, 1, None, True),
        (0, 1, None, False),
        (np.uint64(2**64 - 1), 0, 2**64 - 1, True),
        (2**64, 0, 2**64 - 1, False),
        (HUGE, 0, None, True),
        (True, 0, 1, False),
        (1.0, 0, 1, False),
        (None, 0, 1, False),
    ],
)
def test_an_integer_is_in_a_range_or_not(value, low, high, fits):
    if fits:
        assert type(whole("k", value, low, high)) is int
    else:
        with pytest.raises(RangeError, match=r"^k\b"):
            whole("k", value, low, high)


def test_ranges_are_said_as_short_as_they_can_be():
    assert due_in("(0, inf)") == "a finite number > 0"
    assert due_in("[1.0, inf)") == "a finite number >= 1"
    assert due_in(f"(0, {100.0!r}]") == "a number in (0, 100]"
    assert due_in("[0, 0.25)") == "a number in [0, 0.25)"
    assert due_whole(1) == "an integer >= 1"
    assert due_whole(0, 2**64 - 1) == "an integer in 0..2**64 - 1"
    assert due_whole(1, 10**9) == "an integer in 1..1000000000"


def test_a_float_that_is_an_integer_counts_as_one():
    assert type(integral(3.0)) is int
    assert [integral(value) for value in (2.5, "3", None, True, 7)] == [2.5, "3", None, True, 7]
    assert integral(float("inf")) == float("inf")


@pytest.mark.parametrize("value", [b"a" * 10**7, bytearray(10**7), "a" * 10**7])
def test_a_long_value_is_named_without_a_copy_of_it(value):
    tracemalloc.start()
    assert len(shown(value)) < 100
    assert tracemalloc.get_traced_memory()[1] < 10**5
    tracemalloc.stop()
