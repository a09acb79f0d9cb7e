"""Checks of numbers, and descriptions of ranges."""

import tracemalloc
from fractions import Fraction
from functools import partial

import numpy as np
import pytest

import fedcore
from fedcore.cluster import reshard
from fedcore.errors import RangeError
from fedcore.sim.experiment import load_results
from fedcore.sim.experiment.notebook import run
from fedcore.validation import as_integer, check_integer, check_number, in_interval, short_repr

HUGE = 10**400
"""Finite, but out of the range of a float."""


@pytest.mark.parametrize(
    ("value", "interval", "fits"),
    [
        (0, "(0, 1]", False),
        (1, "(0, 1]", True),
        (0, "[0, 1)", True),
        (1, "[0, 1)", False),
        (np.float32(0.5), "[0, 1]", True),
        (np.float16(np.inf), "[0, 100000.0]", False),
        (np.float16(0), "[1e-12, 1]", False),
        (np.float32(2), "[0, 1e280]", True),
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
def test_numbers_in_an_interval(value, interval, fits):
    assert in_interval(value, interval) == fits
    if fits:
        assert check_number("x", value, interval) == float(value)
    else:
        with pytest.raises(RangeError, match=r"^x\b"):
            check_number("x", value, interval)


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
def test_integers_in_a_range(value, low, high, fits):
    if fits:
        assert type(check_integer("k", value, low, high)) is int
    else:
        with pytest.raises(RangeError, match=r"^k\b"):
            check_integer("k", value, low, high)


def test_a_float_without_a_fraction_becomes_an_int():
    assert type(as_integer(3.0)) is int
    assert [as_integer(value) for value in (2.5, "3", None, True, 7)] == [2.5, "3", None, True, 7]
    assert as_integer(float("inf")) == float("inf")


@pytest.mark.parametrize("value", [b"a" * 10**7, bytearray(10**7), "a" * 10**7])
def test_the_repr_of_a_long_value_makes_no_copy(value):
    tracemalloc.start()
    assert len(short_repr(value)) < 100
    assert tracemalloc.get_traced_memory()[1] < 10**5
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("path", [fedcore.Storage, fedcore.Server.load, fedcore.ClientStore.open, fedcore.ClientStore(1, 1).save]),
        ("path", [fedcore.Network.load, partial(reshard, shards=2), fedcore.read_model, fedcore.Safetensors]),
        ("path", [partial(fedcore.write_model, {"x": np.zeros(3, np.float32)})]),
        ("storage", [lambda path: fedcore.Server(np.zeros(3, np.float32), lr=0.1, clients=1, storage=path)]),
        ("folders", [lambda path: fedcore.Storage(folders=[path])]),
        ("folder", [partial(fedcore.Server.open, model=None, lr=0.1), load_results]),
        ("out", [partial(fedcore.merge, inputs=["a"])]),
        ("inputs", [lambda path: fedcore.merge("out", [path])]),
        ("preset", [run]),
    ],
)
def test_an_object_that_is_no_path(name, calls):
    for call in calls:
        with pytest.raises(RangeError, match=rf"^{name}=<object .*: must be a path"):
            call(object())
