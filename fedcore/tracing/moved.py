"""The bytes that a kernel moves, as its arguments tell them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def moved(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, in_place: bool) -> int:
    """The bytes of all arguments, and of a result that is none of them: what is read and written once.

    An array that comes twice in one list, as the x of all clients does, counts once; one that is read as one argument
    and written as another counts for both. Arrays are asked how large they are, and not kept.

    Args:
        in_place: whether the arguments are written where they are read.

    >>> x, y, out = np.float32([1, 2]), np.float32([3, 4]), np.float64([0, 0])
    >>> moved([[x[:], x[:]], [x, y]], {"out": out}, None, False)
    40
    """
    given = [*args, *kwargs.values()]
    read = sum([_bytes(argument) for argument in given])
    made = 0 if any(argument is result for argument in given) else _bytes(result)
    return 2 * read if in_place else read + made


def _bytes(value: Any) -> int:
    try:
        if isinstance(value, list | tuple):
            return sum([_bytes(member) for member in {_memory(member): member for member in value}.values()])
        return int(value.nbytes)
    except Exception:  # a number, or whatever the class of a foreign array says
        return 0


def _memory(member: Any) -> int:
    """A number for the memory of a list's member: the address of a view, of which another may be just alike."""
    if isinstance(member, np.ndarray) and member.base is not None:
        return int(member.__array_interface__["data"][0])
    return id(member)
