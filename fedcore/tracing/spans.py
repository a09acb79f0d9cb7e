"""Spans: what ran from when to when, in which thread and for which round, and who wants to know."""

import os
import threading
from itertools import count
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

NOBODY = (-1, -1)
"""The server and the round of what belongs to none."""


class Span(NamedTuple):
    """A span that is over. Times are nanoseconds of the monotonic clock, which the processes of a machine share."""

    function: int
    """Its place in ``FUNCTIONS``."""
    server: int
    """The server's or network's number in its process, or -1."""
    round: int
    """The round's number, or -1."""
    thread: int
    """The thread's number in its process."""
    start: int
    end: int
    own: int
    """The time without that of spans within it; 0 for a kernel within a phase, whose time is the phase's."""
    bytes: int
    """The bytes that its kernels moved; 0 where nobody knows."""


class Recorder(Protocol):
    """An open trace, as it is told of spans."""

    timeline: int

    def take(self, span: Span, thread: str) -> None:
        """Take a span in, of a thread of that name."""

    def absorb(self, recorded: Any) -> None:
        """Take in what another process has recorded."""


class Open:
    """The traces that are open in this process.

    Attributes:
        recorders: a new tuple whenever one begins or ends.
    """

    def __init__(self) -> None:
        self.recorders: tuple[Recorder, ...] = ()


OPEN = Open()
_NUMBERS = count(1)
_SERVERS = count()
_SERVER: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


class _Thread(threading.local):
    """A thread's spans that have begun, and the last round that it had to do with."""

    def __init__(self) -> None:
        self.running: list[Running] = []
        self.last = NOBODY
        self.number = next(_NUMBERS)
        self.name = threading.current_thread().name


class Running:
    """A span that has begun.

    Whoever ends a span also ends those that were begun within it and are left: an exception may come between any two
    lines.
    """

    __slots__ = ("bytes", "depth", "end", "inner", "place", "recorders", "running", "start")

    def __init__(self) -> None:
        self.recorders, self.running, self.place = OPEN.recorders, _THREAD.running, NOBODY
        self.depth = len(self.running)
        self.start = self.end = self.inner = self.bytes = 0

    def begin(self, owner: Any, follows: bool) -> None:
        """Begin it.

        Args:
            owner: an object that may know its server and round, or None. It is not kept.
            follows: whether it belongs to the last round of the thread.
        """
        caller = self.running[-1].place if self.depth else NOBODY
        own = NOBODY if owner is None else _place_of(owner)
        if own is NOBODY:
            self.place = _THREAD.last if follows and not self.depth else caller
        else:  # a server within its own round stays in it, also when it knows the next one already
            self.place = _THREAD.last = caller if own[0] == caller[0] else own
        self.running.append(self)
        self.start = perf_counter_ns()

    def finish(self, function: int, is_kernel: bool) -> None:
        """End it, and tell the traces that were open when it began and still are."""
        del self.running[self.depth :]  # first, for an exception may come at any later line
        if not self.start:
            if self.running:
                self.running[-1].inner += self.inner
            return
        end = self.end or perf_counter_ns()
        own = end - self.start - self.inner
        if self.running:
            caller = self.running[-1]
            if is_kernel:
                caller.bytes += self.bytes
                own = 0
            else:
                caller.inner += end - self.start
        span = Span(function, *self.place, _THREAD.number, self.start, end, own, self.bytes)
        for recorder in self.recorders:
            if recorder in OPEN.recorders:
                recorder.take(span, _THREAD.name)


def longest_timeline() -> int | None:
    """The spans that an open trace keeps, of the one that keeps most; None where none is open."""
    return max((recorder.timeline for recorder in OPEN.recorders), default=None)


def absorb(recorded: Any) -> None:
    """Tell the open traces what another process has recorded."""
    for recorder in OPEN.recorders:
        recorder.absorb(recorded)


def _place_of(owner: Any) -> tuple[int, int]:
    """The server or network, as its number, and its round; a round that is over does not know them any more."""
    state = getattr(owner, "_state", owner)
    number = getattr(getattr(state, "snapshot", state), "round_number", None)
    if number is None:
        return NOBODY
    known = _SERVER.get(state)
    return (_SERVER.setdefault(state, next(_SERVERS)) if known is None else known), number


def _after_fork() -> None:
    """Time nothing in a process that was forked within a trace: nobody there would ask for it."""
    OPEN.recorders = ()
    _THREAD.running.clear()


_THREAD = _Thread()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
