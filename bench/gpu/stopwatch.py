"""Times on the GPU's own clock, and by the host's."""

import statistics
import sys
import time

import torch

from bench.gpu.arrays import REAL

WARMING, TIMES = 3, 15


def seconds(call, times=TIMES):
    """The median of a call's time from event to event on torch's current stream, after three that do not count.

    In a rehearsal the call is made once, and the time is None.
    """
    if not REAL:
        call()
        return None
    for _ in range(WARMING):
        call()
    took = []
    for _ in range(times):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(took)


def host_seconds(call, times=TIMES):
    """The same by the host's clock, of a call and all that it has queued."""
    if not REAL:
        call()
        return None
    took = []
    for _ in range(WARMING + times):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - begin)
    return statistics.median(took[WARMING:])


def rivals_seconds(rivals, clock=seconds):
    """By name, the times of those that can run here; why another one cannot goes to the log."""
    found = {}
    for name, run in rivals.items():
        try:
            found[name] = clock(run, 5)
        except Exception as error:  # a compiler or a package that is not there is no fault of ours
            print(f"{name}: {error!r}", file=sys.stderr, flush=True)
    return found
