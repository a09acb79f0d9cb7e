"""What the draws' faces check alike: whole numbers, and the key of the random numbers."""

from operator import index
from typing import Any

from fedcore.errors import RangeError
from fedcore.randomness import tag

LONGEST = 2**63 - 1  # indices are int64
_WORD = 2**64 - 1

Key = tuple[int, int, int, int]  # seed, round, client, purpose


def whole(name: str, value: Any, low: int, high: int) -> int:
    """``value`` as an int in low .. high.

    Raises:
        RangeError: it is no whole number, or not in that range.
    """
    try:
        number = index(value)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        raise RangeError(f"{name}: expected an int in {low} .. {high}, got {value!r}")
    return number


def key(seed: int, round: int, purpose: str) -> Key:
    """The key of a draw over all clients, for which no single client's number stands."""
    return whole("seed", seed, 0, _WORD), whole("round", round, 0, _WORD), 0, tag(purpose)
