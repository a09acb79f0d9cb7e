"""Callers' lists, of arrays and of numbers: what can be told of them before native code looks at each array."""

from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.errors import ArrayError, DtypeError


def listed(name: str, values: Any) -> tuple[Any, ...]:
    """What ``values``, which must be a list or a tuple, hold now: another thread may change a list.

    Raises:
        ArrayError: they are something else; a matrix, say, whose rows would be made one by one.
    """
    if not isinstance(values, list | tuple):
        raise ArrayError(f"{name}: expected a list or tuple, got {type(values).__name__}")
    return tuple(values)


def length(name: str, array: Any) -> int:
    """How many elements a result needs that is to be like ``array``.

    Raises:
        ArrayError: it is nothing that has a length.
    """
    try:
        return len(array)
    except TypeError:
        raise ArrayError(f"{name}: expected an array in CPU memory, got {type(array).__name__}") from None


def numbers(name: str, values: Any, dtype: type) -> npt.NDArray[Any]:
    """``values`` as an array of that dtype.

    Raises:
        DtypeError: they are no numbers.
    """
    try:
        return np.array(values, dtype)
    except (TypeError, ValueError) as error:
        raise DtypeError(f"{name}: expected numbers: {error}") from None
