"""A turn: the timing of one operation, in any process."""

import time
from typing import NamedTuple

WALL = time.perf_counter

PAUSE_SECONDS = 0.05
"""The least pause before a turn. After an operation torch's threads spin for milliseconds, OpenBLAS's for 200 ms."""

WARM_SECONDS = 0.1
"""The warm-up time, since a virtual processor runs at a third of its speed after a sleep, with empty caches."""


class Seconds(NamedTuple):
    """The seconds per call in a turn.

    Attributes:
        warm: the time after ``WARM_SECONDS`` of the same operation, which comparisons use.
        after_pause: the time at the start of the turn, when processor and threads sleep.
    """

    warm: float
    after_pause: float


def turn(operation, calls=1, clock=WALL):
    """Wait until other threads sleep; then time the operation immediately and after a warm-up."""
    pause()
    after_pause = seconds(operation, calls, clock)
    warm_up(operation)
    return Seconds(seconds(operation, calls, clock), after_pause)


def pause():
    """Sleep until no thread of this process spins, since a spinning thread occupies a core."""
    time.sleep(PAUSE_SECONDS)
    for _ in range(100):
        computed = time.process_time()
        time.sleep(0.01)
        if time.process_time() - computed < 0.001:
            return


def warm_up(operation):
    """Repeat the operation for ``WARM_SECONDS``, at least once, and return its last result."""
    began = time.perf_counter()
    while True:
        result = operation()
        if time.perf_counter() - began >= WARM_SECONDS:
            return result


def seconds(operation, calls=1, clock=WALL):
    """Return the seconds per call of ``calls`` consecutive calls."""
    began = clock()
    for _ in range(calls):
        operation()
    return (clock() - began) / calls
