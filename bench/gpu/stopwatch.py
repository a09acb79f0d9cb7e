"""Timing by the GPU's clock and by the host's clock."""

import statistics
import sys
import time

import torch

from bench.gpu.arrays import REAL

WARMING, TIMES = 3, 15


def seconds(call, times=TIMES):
    """Return the median seconds of a call between two events on torch's current stream, after three warm-up calls.

    In a rehearsal the function calls once and returns None.
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
    """Return the median seconds of a call and all its queued work by the host's clock."""
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
    """Return the seconds of each rival by name; log the reason for each rival that cannot run."""
    found = {}
    for name, run in rivals.items():
        try:
            found[name] = clock(run, 5)
        except Exception as error:  # a missing compiler or package is not an error here
            print(f"{name}: {error!r}", file=sys.stderr, flush=True)
    return found
