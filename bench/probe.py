"""The floors: several ways to read the same arrays once, to rewrite them, or to write others, on as many threads.

``versus`` tries them all, keeps three, and takes the one whose median over the line's rounds is least.
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
"""How rows are read: the binary logarithm of the streams, the words of each in turn, and whether with prefetch."""


class Floor:
    """The fastest of several ways to move some bytes.

    Args:
        run: the name of a function of probe.cpp.
        before: its first arguments.
        ways: the arguments that follow, of each way.
        after: the last arguments.
        times: how often ``run`` does the work.
        keep: arrays that the arguments point to.
    """

    def __init__(self, run, before, ways, after, keep, times=1):
        self._run, self._before, self._ways, self._after = run, before, ways, after
        self._keep, self._times = keep, times

    def choose(self):
        """Try every way, and keep the three that took the least time."""
        warm_up(self.seconds)
        trials = np.median([self.seconds() for _ in range(3)], axis=0)
        self._ways = [self._ways[way] for way in np.argsort(trials)[:3]]

    def turn(self):
        """float64[ways], what each way took, once the others' threads sleep and the processor is warm."""
        pause()
        return warm_up(self.seconds)

    def seconds(self):
        """float64[ways], what each way takes now."""
        return np.array([self._seconds(way) for way in self._ways])

    def _seconds(self, way):
        run = getattr(_library(), self._run)
        began = time.perf_counter()
        run(*self._before, *way, *self._after)
        return (time.perf_counter() - began) / self._times


def _addresses(arrays):
    return np.array([array.ctypes.data for array in arrays], np.uint64)


def read_floor(rows, threads, out=None, times=1):
    """To read k rows of one length, and to write ``out`` if there is one: a fold's floor.

    Args:
        rows: k arrays; or k lists of arrays, the tensors of one model each, as long in every model.
        out: as long as one row, or one model, and written to, plainly and past the caches.
        times: how often, by threads that are started once: where the rows are so short that starting them counts.
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
    """To read ``rows``, ``streams`` at a time, and to rewrite the first of each group with what it holds.

    There are as many rows as fit in ``streams``, which is 1..5.
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
    """To read ``rows``, ``streams`` at a time, and to write as long an array of ``to`` each, past the caches.

    So no line of ``to`` is read before. The whole lines of each array of ``to``, which starts where a line does, become
    something else. There are as many rows as fit in ``streams``, which is 1..4.
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
