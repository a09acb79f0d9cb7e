"""One turn: how everybody is timed, in whatever process."""

import time
from typing import NamedTuple

PAUSE_SECONDS = 0.05
"""The threads of torch and OpenBLAS spin for milliseconds after an operation, and would take a core from the next."""


class Seconds(NamedTuple):
    """What a turn took, per call.

    Attributes:
        warm: right after the same operation, when its threads are awake: what is compared.
        after_pause: at the beginning of the turn, when they sleep.
    """

    warm: float
    after_pause: float


def turn(operation, calls=1):
    """Pause until the others' threads sleep, then time the operation twice."""
    time.sleep(PAUSE_SECONDS)
    after_pause = seconds(operation, calls)
    return Seconds(seconds(operation, calls), after_pause)


def seconds(operation, calls=1):
    """Seconds per call of ``calls`` consecutive calls."""
    began = time.perf_counter()
    for _ in range(calls):
        operation()
    return (time.perf_counter() - began) / calls
