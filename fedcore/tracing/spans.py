"""Spans: what ran from when to when, in which thread and for which round, and who wants to know."""

import os
import threading
from itertools import count
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol
from weakref import ReferenceType, WeakKeyDictionary, ref

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
        session: how often a first one was opened: what threads remember of a session before is of no use.
    """

    def __init__(self) -> None:
        self.recorders: tuple[Recorder, ...] = ()
        self.session = 0


OPEN = Open()
_NUMBERS = count(1)
_SERVERS = count()
_SERVER: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


class _Thread(threading.local):
    """A thread's spans that have begun, and the last round that it had to do with."""

    def __init__(self) -> None:
        self.running: list[ReferenceType[Running]] = []
        self.last, self.session = NOBODY, 0
        self.number = next(_NUMBERS)
        self.name = threading.current_thread().name


class Running:
    """A span that has begun.

    The call that is timed alone holds it. So where an exception comes in the midst of ``finish`` itself, the span is
    gone with the call.
    """

    __slots__ = ("__weakref__", "bytes", "caller", "depth", "end", "inner", "place", "recorders", "start", "within")

    def __init__(self) -> None:
        self.recorders, self.within, self.place = OPEN.recorders, _THREAD.running, NOBODY
        self.caller: Running | None = None
        while self.within and (caller := self.within[-1]()) is None:
            self.within.pop()
        if self.within:
            self.caller = caller
        self.depth = len(self.within)
        self.start = self.end = self.inner = self.bytes = 0

    def begin(self, owner: Any, follows: bool) -> None:
        """Begin it.

        Args:
            owner: an object that may know its server and round, or None. It is not kept.
            follows: whether it belongs to the last round of the thread.
        """
        caller = NOBODY if self.caller is None else self.caller.place
        own = NOBODY if owner is None else _place_of(owner)
        if own is NOBODY:
            self.place = _last_place() if follows and self.caller is None else caller
        else:  # a server within its own round stays in it, also when it knows the next one already
            self.place = _THREAD.last = caller if own[0] == caller[0] else own
            _THREAD.session = OPEN.session
        self.within.append(ref(self))
        self.start = perf_counter_ns()

    def finish(self, function: int, is_kernel: bool) -> None:
        """End it, and tell the traces that were open when it began and still are."""
        del self.within[self.depth :]
        if not self.start:
            if self.caller is not None:
                self.caller.inner += self.inner
            return
        end = self.end or perf_counter_ns()
        own = end - self.start - self.inner
        if self.caller is not None:
            if is_kernel:
                self.caller.bytes += self.bytes
                own = 0
            else:
                self.caller.inner += end - self.start
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


def _last_place() -> tuple[int, int]:
    """The last round that this thread had to do with, since any trace was opened."""
    return _THREAD.last if _THREAD.session == OPEN.session else NOBODY


def _after_fork() -> None:
    """Time nothing in a process that was forked within a trace: nobody there would ask for it."""
    OPEN.recorders = ()
    _THREAD.running.clear()


_THREAD = _Thread()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
