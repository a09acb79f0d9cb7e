"""What the patterns check alike: real numbers, and one number a client."""

from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.errors import RangeError, ShapeError
from fedcore.float_mode import ieee


def inside(value: Any, interval: str) -> bool:
    """Whether value is a number in ``interval``, written as it is read: ``"(0, 1]"``.

    >>> inside(0.5, "(0, 1]"), inside(0, "(0, 1]"), inside(float("nan"), "(0, 1]"), inside("1", "(0, 1]")
    (True, False, False, False)
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = is_number and (value >= low if interval[0] == "[" else value > low)
    below = is_number and (value <= high if interval[-1] == "]" else value < high)
    return bool(above and below)  # as a NaN is not


@ieee
def real(name: str, value: Any, interval: str) -> float:
    """``value`` as a float in an interval.

    Raises:
        RangeError: it is no number, or not in the interval.
    """
    if not inside(value, interval):
        raise RangeError(f"{name}: expected a number in {interval}, got {value!r}")
    return float(value)


@ieee
def each(name: str, values: Sequence[float], clients: int, interval: str) -> npt.NDArray[np.float64]:
    """One number a client, as a read-only copy.

    Returns:
        float64[clients].

    Raises:
        ShapeError: there are not as many as clients.
        RangeError: one of them is no number in the interval.
    """
    shape = np.shape(values)
    if shape != (clients,):
        raise ShapeError(f"{name}: expected {clients} numbers, one a client, got shape {list(shape)}")
    for client, value in enumerate(values):
        if not inside(value, interval):
            raise RangeError(f"{name}[{client}]: expected a number in {interval}, got {value!r}")
    array = np.array(values, np.float64)
    array.flags.writeable = False
    return array
