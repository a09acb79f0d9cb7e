"""Floors of memory bandwidth: several ways to read arrays once, rewrite them or write other arrays, on all threads.

``versus`` tries every way, keeps three, and uses the way with the least median over the rounds of a line.
"""

import ctypes
import os
import subprocess
import time
from functools import cache
from pathlib import Path

import numpy as np

from bench.turns import pause, warm_up

SOURCE = Path(__file__).with_name("probe.cpp")
BUILT = SOURCE.parent.parent / "build" / "bench" / "probe.so"


@cache
def _library():
    BUILT.parent.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CXX", "c++")
    flags = ["-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-pthread"]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(BUILT)], check=True)
    library = ctypes.CDLL(str(BUILT))
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    library.fedcore_probe_read.restype = ctypes.c_uint64
    library.fedcore_probe_read.argtypes = [pointer, pointer, long, long, pointer, long] + 5 * [ctypes.c_int]
    library.fedcore_probe_rewrite.restype = None
    library.fedcore_probe_rewrite.argtypes = [pointer] + 3 * [long] + 3 * [ctypes.c_int]
    library.fedcore_probe_write.restype = None
    library.fedcore_probe_write.argtypes = [pointer, pointer] + 3 * [long] + 4 * [ctypes.c_int]
    return library


KIB, WHOLE = 1024 // 8, 1 << 60
READS = [
    *((streams, 32 * KIB, prefetch) for streams in range(4) for prefetch in (0, 1)),
    (2, 256 * KIB, 0),
    (2, 256 * KIB, 1),
    (3, 256 * KIB, 0),
    (0, WHOLE, 0),
    (1, WHOLE, 0),
    (2, WHOLE, 0),
]
"""Ways to read rows: log2 of the streams, the words read from each stream in turn, and whether to prefetch."""


class Floor:
    """The fastest of several ways to move the same bytes.

    Args:
        run: the name of a function of probe.cpp.
        before: its first arguments.
        ways: for each way, the arguments that follow.
        after: the last arguments.
        times: the number of times that ``run`` does the work.
        keep: the arrays that the arguments point to.
    """

    def __init__(self, run, before, ways, after, keep, times=1):
        self._run, self._before, self._ways, self._after = run, before, ways, after
        self._keep, self._times = keep, times

    def choose(self, clock=time.perf_counter):
        """Time every way by a clock, and keep the three fastest."""
        self._clock = clock
        warm_up(self.seconds)
        trials = np.median([self.seconds() for _ in range(3)], axis=0)
        self._ways = [self._ways[way] for way in np.argsort(trials)[:3]]

    def turn(self):
        """Return float64[ways], the time of each way with a warm processor and without other threads."""
        pause()
        return warm_up(self.seconds)

    def seconds(self):
        """Return float64[ways], the time of each way, measured immediately."""
        return np.array([self._seconds(way) for way in self._ways])

    def _seconds(self, way):
        run = getattr(_library(), self._run)
        began = self._clock()
        run(*self._before, *way, *self._after)
        return (self._clock() - began) / self._times


def _addresses(arrays):
    return np.array([array.ctypes.data for array in arrays], np.uint64)


def read_floor(rows, threads, out=None, times=1):
    """Return the floor of a fold: read k rows, and write ``out``.

    Args:
        rows: k arrays of one length, or k lists of arrays, the tensors of k models of one shape.
        out: an array of the length of a row or model. The ways write it with and without the caches. Default: none.
        times: the number of repetitions by threads that are started once; use it for short rows, where the start of the
            threads would dominate.
    """
    models = [row if isinstance(row, list) else [row] for row in rows]
    pointers = _addresses(row for segment in zip(*models, strict=True) for row in segment)
    words = np.array([row.nbytes // 8 for row in models[0]], np.int64)
    outs = None if out is None else _addresses(out if isinstance(out, list) else [out])
    return Floor(
        "fedcore_probe_read",
        (pointers.ctypes.data, None if out is None else outs.ctypes.data, len(words), len(models), words.ctypes.data),
        [
            (tile, streams, prefetch, past)
            for streams, tile, prefetch in READS
            for past in range(1 if out is None else 2)
        ],
        (times, threads),
        keep=(rows, out, pointers, words, outs),
        times=times,
    )


def rewrite_floor(rows, streams, threads):
    """Return the floor of reading ``rows`` in groups of ``streams`` and rewriting the first row of each group.

    ``streams`` is 1..5 and divides the number of rows.
    """
    pointers, words = _addresses(rows), rows[0].nbytes // 8
    return Floor(
        "fedcore_probe_rewrite",
        (pointers.ctypes.data, len(rows), words),
        [(tile, streams, prefetch) for tile in (words, min(words, 8192)) for prefetch in (0, 1)],
        (threads,),
        keep=(rows, pointers),
    )


def write_floor(rows, to, streams, threads):
    """Return the floor of reading ``rows`` in groups of ``streams`` and writing an array of ``to`` per group.

    The writes bypass the caches, so no line of ``to`` is read first. They overwrite the whole cache lines of each array
    of ``to``, which must start at a cache line. ``streams`` is 1..4 and divides the number of rows.
    """
    pointers, targets = _addresses(rows), _addresses(to)
    if (targets % 64).any() or len(rows) != streams * len(to):
        raise ValueError(f"expected {len(rows) // streams} arrays at cache lines, got {len(to)}")
    words = rows[0].nbytes // 64 * 8
    return Floor(
        "fedcore_probe_write",
        (pointers.ctypes.data, targets.ctypes.data, len(rows), words),
        [
            (tile, streams, prefetch, stretch)
            for tile in (words, min(words, 8192))
            for prefetch in (0, 1)
            for stretch in (0, 1)
        ],
        (threads,),
        keep=(rows, to, pointers, targets),
    )
