"""One turn: how everybody is timed, in whatever process."""

import time
from typing import NamedTuple

PAUSE_SECONDS = 0.05
"""The least pause before a turn: torch's threads spin for milliseconds after an operation, OpenBLAS's for 200."""

WARM_SECONDS = 0.1
"""A virtual processor that slept computes at a third of its speed at first, and has its caches to fill again."""


class Seconds(NamedTuple):
    """What a turn took, per call.

    Attributes:
        warm: after ``WARM_SECONDS`` of the same operation: the figure that is compared.
        after_pause: at the beginning of the turn, when processor and threads sleep.
    """

    warm: float
    after_pause: float


def turn(operation, calls=1):
    """Pause until the others' threads sleep, then time the operation at once and after it has warmed up."""
    pause()
    after_pause = seconds(operation, calls)
    warm_up(operation)
    return Seconds(seconds(operation, calls), after_pause)


def pause():
    """Sleep until no thread of this process spins, which would take a core from the next turn."""
    time.sleep(PAUSE_SECONDS)
    for _ in range(100):
        computed = time.process_time()
        time.sleep(0.01)
        if time.process_time() - computed < 0.001:
            return


def warm_up(operation):
    """Repeat the operation for ``WARM_SECONDS``, at least once; what it returned last."""
    began = time.perf_counter()
    while True:
        result = operation()
        if time.perf_counter() - began >= WARM_SECONDS:
            return result


def seconds(operation, calls=1):
    """Seconds per call of ``calls`` consecutive calls."""
    began = time.perf_counter()
    for _ in range(calls):
        operation()
    return (time.perf_counter() - began) / calls
