"""One call at a time into an open round."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from fedcore.errors import RoundError

P = ParamSpec("P")
R = TypeVar("R")


class GuardedCalls(Protocol):
    """An object whose calls take turns.

    Attributes:
        _turn: whose turn it is; the same thread's too, within a call.
        _inside: held while a call is at work. Both are let go by Python itself, at whatever line an exception comes.
        _is_ending: whether ``abort`` came from within a call, which obeys when it is done.
    """

    _turn: Any  # RLock and Lock, which are functions to the type checker
    _inside: Any
    _is_ending: bool

    def _abort(self) -> None: ...


T = TypeVar("T", bound=GuardedCalls)


def one_call(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """A method that waits for other threads, and refuses to run within a call of its own thread.

    Only the handler of a signal comes upon a call of its own thread: it cannot wait for it.
    """

    @wraps(method)
    def called(self: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._turn:
            if self._inside.locked():
                raise RoundError(
                    "round: expected one call at a time, got one from within another, as a signal's handler makes it: "
                    "abort() alone may be called there"
                )
            try:
                with self._inside:
                    return method(self, *args, **kwargs)
            finally:
                if self._is_ending:
                    self._abort()

    return called
