"""IEEE arithmetic for this package's functions, whatever mode of the processor their callers have chosen."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from fedcore.native import core

P = ParamSpec("P")
R = TypeVar("R")


def ieee(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, with the calling thread in IEEE's mode while it runs, and in its own again behind it.

    ``torch.set_flush_denormal(True)`` makes the thread that calls it take subnormal numbers for zeros, in NumPy and in
    comparisons too. What is decorated gives the same bits in such a thread as in any other. Whatever it calls runs in
    that mode as well; so it belongs on functions that call no code of the user's that may train a model.

    Cost: half a microsecond.

    >>> ieee(abs)(-5e-324)
    5e-324
    """

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        return core.in_ieee_mode(function, *args, **kwargs)

    return called
