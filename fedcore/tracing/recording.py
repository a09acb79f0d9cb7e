"""The recording of a trace: what its spans come to, and the first so many of them."""

import os
import threading
from array import array
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from fedcore.tracing.spans import Span
from fedcore.tracing.totals import Totals

MANY = 1000
"""Spans that wait until they are counted, all at once."""
COLUMNS = len(Span._fields)


class Recorded(NamedTuple):
    """The recording of one process, as it is sent to another."""

    process: int
    counts: dict[str, list[int]]
    numbers: "array[int]"
    """The spans of the timeline, one after the other."""
    threads: dict[int, str]
    left_out: int
    """Spans that are counted, and not in the timeline."""


class Recording:
    """Counts spans, and keeps the first of them; any thread may bring one, in the middle of anything.

    Args:
        timeline: how many are kept, 64 bytes each.

    Attributes:
        totals: of all spans, those of other processes too.
    """

    def __init__(self, timeline: int) -> None:
        self.timeline = timeline
        self.totals = Totals()
        # What is taken in waits here: a deque's ends need no lock, which the handler of a signal could not wait for.
        self._waiting: deque[tuple[Span, str]] = deque()
        self._lock = threading.RLock()
        self._numbers: array[int] = array("q")
        self._threads: dict[int, str] = {}
        self._left_out = 0
        self._others: list[Recorded] = []

    def take(self, span: Span, thread: str) -> None:
        """Take a span in."""
        self._waiting.append((span, thread))
        if len(self._waiting) >= MANY and self._lock.acquire(blocking=False):
            try:
                self._count()
            finally:
                self._lock.release()

    def absorb(self, recorded: Recorded) -> None:
        """Take in what another process has recorded."""
        with self._lock:
            self.totals.merge(recorded.counts)
            numbers = recorded.numbers[: self._room() * COLUMNS]
            left_out = recorded.left_out + (len(recorded.numbers) - len(numbers)) // COLUMNS
            self._others.append(recorded._replace(numbers=numbers, left_out=left_out))

    def recorded(self) -> Recorded:
        """The recording of this process so far, without the others."""
        with self._lock:
            self._count()
            return Recorded(os.getpid(), self.totals.counts, self._numbers[:], dict(self._threads), self._left_out)

    def parts(self) -> list[Recorded]:
        """The recording of each process so far, this one first; a process that sent more than once comes again."""
        with self._lock:
            return [self.recorded(), *self._others]

    def counted(self) -> Totals:
        """The totals with every span that has come."""
        with self._lock:
            self._count()
            totals = Totals()
            totals.merge(self.totals.counts)
            return totals

    def _room(self) -> int:
        """The number of spans that the timeline still takes."""
        kept = len(self._numbers) + sum(len(other.numbers) for other in self._others)
        return max(0, self.timeline - kept // COLUMNS)

    def _count(self) -> None:
        room = self._room()
        while self._waiting:
            try:
                span, thread = self._waiting.popleft()
            except IndexError:  # a signal's handler has counted meanwhile
                return
            self.totals.add(span)
            if room > 0:
                room -= 1
                self._numbers.extend(span)
                self._threads.setdefault(span.thread, thread)
            else:
                self._left_out += 1


def spans_of(part: Recorded) -> Iterator[Span]:
    """The spans of a part's timeline."""
    numbers = iter(part.numbers)
    for columns in zip(*[numbers] * COLUMNS, strict=True):
        yield Span(*columns)
