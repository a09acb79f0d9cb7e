import pytest

from fedcore import errors
from fedcore.algorithms.rates import Constant, Exponential, as_rate


def test_rates_by_hand():
    assert [Exponential(8, 0.5)(t) for t in range(4)] == [8, 4, 2, 1]
    assert Constant(3)(100) == 3
    assert as_rate(0.1)(7) == 0.1
    twice = lambda round: 2.0 * round  # noqa: E731
    assert as_rate(twice) is twice


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_values_out_of_range(value):
    with pytest.raises(errors.RangeError, match="rate: expected a finite number > 0"):
        as_rate(value)
    with pytest.raises(errors.RangeError, match="rate: expected"):
        Exponential(value, 0.5)
    with pytest.raises(errors.RangeError, match=r"decay: expected a number in \(0, 1\]"):
        Exponential(1, -abs(value))
