"""Checks of a caller's arguments: of a number, and of a list of arrays, in one wording."""

import math
import os
from functools import lru_cache
from numbers import Real
from operator import index
from pathlib import Path
from reprlib import repr as short_repr
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from fedcore.arrays import ieee
from fedcore.errors import ArrayError, DtypeError, FedcoreError, RangeError, StoreError

LONGEST = 500
"""Characters of a reason in a report: a client can make it as long as it likes."""
_PLAIN = frozenset([int, float, *np.sctypeDict.values()])


def is_real(value: object) -> TypeGuard[float]:
    """Tell whether value is a real number, of Python or NumPy, and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: object, low: int | None = None, high: int | None = None) -> TypeGuard[int]:
    """Tell whether value is an integer, of Python or NumPy, and no bool, in low..high."""
    if type(value) is not int and (not isinstance(value, int | np.integer) or isinstance(value, bool)):
        return False
    number = _plain(value)
    return (low is None or bool(low <= number)) and (high is None or bool(number <= high))


def inside(value: Any, interval: str) -> bool:
    """Tell whether value is a number in ``interval``, written as it is read: ``"(0, 1]"``, ``"(0, inf)"``.

    >>> inside(0.5, "(0, 1]"), inside(0, "(0, 1]"), inside(float("nan"), "(0, 1]"), inside("1", "(0, 1]")
    (True, False, False, False)
    """
    if not is_real(value) or not _is_float(value):
        return False
    number, (low, high) = _plain(value), _ends(interval)
    above = number >= low if interval[0] == "[" else number > low
    below = number <= high if interval[-1] == "]" else number < high
    return bool(above and below)  # as a NaN is not


def _plain(value: Any) -> Any:
    """A number without a class of the caller's, which may compare as it likes."""
    if type(value) in _PLAIN:
        return value
    return index(value) if isinstance(value, int | np.integer) else float(value)


def _is_float(value: float) -> bool:
    """Tell whether a number has a float near it, as an integer of 400 digits has not."""
    try:
        float(value)
    except OverflowError:
        return False
    return True


@lru_cache(64)  # the same few, and those that a server's limits make
def _ends(interval: str) -> tuple[float, float]:
    low, high = interval[1:-1].split(",")
    return float(low), float(high)


@ieee
def real(name: str, value: Any, interval: str) -> float:
    """``value`` as a float in an interval.

    Raises:
        RangeError: it is no number, or not in the interval.

    >>> real("lr", 0, "(0, inf)")
    Traceback (most recent call last):
    fedcore.errors.RangeError: lr: expected a finite number > 0, got 0
    """
    number = _plain(value) if is_real(value) and _is_float(value) else value
    if not inside(number, interval):
        raise RangeError(f"{name}: expected {due_in(interval)}, got {shown(value)}")
    return float(number)


def whole(name: str, value: Any, low: int, high: int | None = None) -> int:
    """``value`` as an int in low..high.

    Raises:
        RangeError: it is no integer, or not in that range.

    >>> whole("steps", 2.5, 1)
    Traceback (most recent call last):
    fedcore.errors.RangeError: steps: expected an integer >= 1, got 2.5
    """
    number = index(value) if is_whole(value) else value  # once: a class of the caller's may give another the next time
    if not is_whole(number, low, high):
        raise RangeError(f"{name}: expected {due_whole(low, high)}, got {shown(value)}")
    return index(number)


def integral(value: object) -> Any:
    """A float that is an integer as that, as a message may carry a count; anything else as it is."""
    if not is_real(value) or is_whole(value) or not math.isfinite(value) or value != int(value):
        return value
    return int(value)


def due_in(interval: str) -> str:
    """An interval in words: ``a finite number > 0`` for ``"(0, inf)"``."""
    low, high = (end.removesuffix(".0") for end in interval[1:-1].split(", "))
    if high != "inf":
        return f"a number in {interval[0]}{low}, {high}{interval[-1]}"
    return f"a finite number {'>=' if interval[0] == '[' else '>'} {low}"


def due_whole(low: int, high: int | None = None) -> str:
    """A range of integers in words."""
    return f"an integer >= {low}" if high is None else f"an integer in {low}..{_power(high)}"


def _power(number: int) -> str:
    """A number near a high power of two as that."""
    for below in (0, 1):
        bits = (number + below).bit_length() - 1
        if bits >= 31 and number + below == 1 << bits:
            return f"2**{bits}" + " - 1" * below
    return str(number)


def shown(value: object) -> str:
    """A value that came, in few characters whatever it is."""
    try:
        if isinstance(value, bytes | bytearray | str):
            value = value[:100]  # whose whole text would be made first
        return short_repr(value)
    except Exception:  # an int of too many digits, or a repr that fails
        return f"an unprintable {type(value).__name__}"


def reason_of(error: Exception) -> str:
    """Say what is wrong with an update, in at most ``LONGEST`` characters; the error may be of the client's own class.

    >>> reason_of(KeyError("w"))
    "update: expected one that can be read, got KeyError: 'w'"
    """
    try:
        text = f"{error}" if isinstance(error, FedcoreError) else f"{type(error).__name__}: {error}"
    except Exception:
        text = "an error without a text"
    return bounded(text if isinstance(error, FedcoreError) else f"update: expected one that can be read, got {text}")


def bounded(text: str) -> str:
    """A text in at most ``LONGEST`` characters, all of which UTF-8 can hold."""
    text = str.encode(text, errors="backslashreplace").decode()
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def listed(name: str, values: Any) -> tuple[Any, ...]:
    """The items that ``values``, a list or a tuple, hold now: another thread may change a list.

    Raises:
        ArrayError: they are something else; a matrix, say, whose rows would be made one by one.
    """
    if not isinstance(values, list | tuple):
        raise ArrayError(f"{name}: expected a list or tuple, got {type(values).__name__}")
    return tuple(values)


def length(name: str, array: Any) -> int:
    """The number of elements of a result that is to be like ``array``.

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


def expanded(path: str | os.PathLike[str]) -> Path:
    """A path with the home directory in the place of ``~``.

    Raises:
        RangeError: there is no such home directory.
    """
    found = os.path.expanduser(path)
    if found.startswith("~"):
        raise RangeError(f"path: expected a home directory for ~, got none for {found!r}: ./~ is a folder of this name")
    return Path(found)


def absolute(path: str | os.PathLike[str]) -> Path:
    """An expanded path that stays the same when the working directory changes.

    Raises:
        RangeError: as ``expanded``.
        StoreError: it is relative, and the working directory was deleted.
    """
    found = expanded(path)
    try:
        return found.absolute()
    except FileNotFoundError:
        raise StoreError(f"{found}: expected a working directory, got a deleted one: give an absolute path") from None
