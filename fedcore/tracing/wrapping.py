"""The functions of the phases: wrapped while a trace is open, and themselves before and afterwards."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import wraps
from inspect import isgeneratorfunction
from time import perf_counter_ns
from typing import Any, NamedTuple

from fedcore.tracing.functions import FUNCTIONS, Function
from fedcore.tracing.moved import moved
from fedcore.tracing.spans import OPEN, Recorder, Running


class _Wrapped(NamedTuple):
    """A function that is wrapped: where, what it was, and what it is."""

    owner: Any
    before: Any
    after: Any


class Wrapping:
    """The wrapped functions of this process, for all traces that are open."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._wrapped: dict[int, _Wrapped] = {}  # by number in FUNCTIONS
        self._imported = 0  # how many modules there were when all were looked for; -1 once none is absent

    def begin(self, recorder: Recorder) -> None:
        """Open a trace."""
        with self._lock:
            try:
                OPEN.session += not OPEN.recorders
                OPEN.recorders = (*OPEN.recorders, recorder)
                self._wrap()
            except BaseException:
                self.end(recorder)
                raise

    def end(self, recorder: Recorder) -> None:
        """Close a trace; after the last one every function is itself again."""
        with self._lock:
            OPEN.recorders = tuple(other for other in OPEN.recorders if other is not recorder)
            if not OPEN.recorders:
                self._unwrap()

    def look_again(self) -> None:
        """Wrap what was imported since a trace was opened, before a round may use it."""
        if -1 != self._imported != len(sys.modules) and self._lock.acquire(blocking=False):
            try:
                if OPEN.recorders:
                    self._wrap()
            finally:
                self._lock.release()

    def after_fork(self) -> None:
        """Forget the lock, which another thread may have held in the process that was forked."""
        self._lock = threading.RLock()

    def _wrap(self) -> None:
        imported, complete = len(sys.modules), True
        for number, function in enumerate(FUNCTIONS):
            owner = function.owner()
            if owner is None:
                complete = False
            elif number not in self._wrapped:
                before = vars(owner)[function.name]
                self._wrapped[number] = wrapped = _Wrapped(owner, before, _timed(number, function, before))
                setattr(owner, function.name, wrapped.after)
        self._imported = -1 if complete else imported

    def _unwrap(self) -> None:
        for number, wrapped in list(self._wrapped.items()):
            name = FUNCTIONS[number].name
            if vars(wrapped.owner).get(name) is wrapped.after:  # else somebody put another thing in its place meanwhile
                setattr(wrapped.owner, name, wrapped.before)
            del self._wrapped[number]


WRAPPING = Wrapping()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=WRAPPING.after_fork)


def _timed(number: int, function: Function, before: Callable[..., Any]) -> Callable[..., Any]:
    """The function, timed while a trace is open; of a generator, each item while it is made."""
    if isgeneratorfunction(before):

        @wraps(before)
        def iterated(*args: Any, **kwargs: Any) -> Iterator[Any]:
            return _TimedItems(before(*args, **kwargs), number, function)

        return iterated

    follows, is_kernel, is_measured, is_in_place = (
        function.follows,
        function.is_kernel,
        function.is_measured,
        function.is_in_place,
    )
    knows_round = function.is_method and not follows

    @wraps(before)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if not OPEN.recorders:  # closed by another thread, between its wrapping and now
            return before(*args, **kwargs)
        running = Running()
        if running.caller is None:
            WRAPPING.look_again()
        try:
            running.begin(args[0] if knows_round else None, follows)
            result = before(*args, **kwargs)
            running.end = perf_counter_ns()
            if is_measured:
                running.bytes += moved(args, kwargs, result, is_in_place)
            return result
        except StopIteration:  # an iterator at its end: no item, and no call
            running.start = 0
            raise
        finally:
            running.finish(number, is_kernel)

    return timed


class _TimedItems:
    """An iterator whose items are timed while they are made; it keeps none of them."""

    def __init__(self, items: Iterator[Any], number: int, function: Function) -> None:
        self._next = _timed(number, function, items.__next__)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._next()
