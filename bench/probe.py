"""The floors: several ways to read the same arrays once, to rewrite them, or to write others, on as many threads.

The floor of a line is the way whose median over the line's rounds is least; ``versus`` chooses it.
"""

import ctypes
import os
import subprocess
import time
from functools import cache
from pathlib import Path

import numpy as np

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
    library.fedcore_probe_read.argtypes = [pointer, long, long, pointer] + 3 * [ctypes.c_int]
    library.fedcore_probe_rewrite.restype = None
    library.fedcore_probe_rewrite.argtypes = [pointer] + 3 * [long] + 3 * [ctypes.c_int]
    library.fedcore_probe_write.restype = None
    library.fedcore_probe_write.argtypes = [pointer, pointer] + 3 * [long] + 4 * [ctypes.c_int]
    return library


def read_seconds(rows, threads):
    """float64[8], the seconds of 1, 2, 4 and 8 read streams over k rows, with and without prefetch.

    The rows are of one length, k is a multiple of 8. Each row may also be a list of arrays, the tensors of one model,
    as long in every model.
    """
    models = [row if isinstance(row, list) else [row] for row in rows]
    pointers = np.array([row.ctypes.data for segment in zip(*models, strict=True) for row in segment], np.uint64)
    words = np.array([row.nbytes // 8 for row in models[0]], np.int64)
    seconds = []
    for streams in range(4):
        for prefetch in (0, 1):
            began = time.perf_counter()
            _library().fedcore_probe_read(
                pointers.ctypes.data, len(words), len(models), words.ctypes.data, streams, prefetch, threads
            )
            seconds.append(time.perf_counter() - began)
    return np.array(seconds)


def rewrite_seconds(rows, streams, threads):
    """float64[4], the seconds of reading ``rows``, ``streams`` at a time, and rewriting the first of each group.

    With and without prefetch, row by row and in tiles. What the rows hold stays; there are as many as fit in
    ``streams``, which is 1..5.
    """
    pointers = np.array([row.ctypes.data for row in rows], np.uint64)
    words = rows[0].nbytes // 8
    seconds = []
    for tile in (words, min(words, 8192)):
        for prefetch in (0, 1):
            began = time.perf_counter()
            _library().fedcore_probe_rewrite(pointers.ctypes.data, len(rows), words, tile, streams, prefetch, threads)
            seconds.append(time.perf_counter() - began)
    return np.array(seconds)


def write_seconds(rows, to, streams, threads):
    """float64[8], the seconds of reading ``rows``, ``streams`` at a time, and writing as long an array of ``to`` each.

    The stores go past the caches, so that no line of ``to`` is read before. With and without prefetch, row by row and
    in tiles, line by line and a stretch of 2 KiB at a time. The whole lines of each array of ``to``, which starts where
    a line does, become something else. There are as many rows as fit in ``streams``, which is 1..4.
    """
    pointers = np.array([row.ctypes.data for row in rows], np.uint64)
    targets = np.array([array.ctypes.data for array in to], np.uint64)
    if (targets % 64).any() or len(rows) != streams * len(to):
        raise ValueError(f"expected {len(rows) // streams} arrays at cache lines, got {len(to)}")
    words = rows[0].nbytes // 64 * 8
    seconds = []
    for tile in (words, min(words, 8192)):
        for prefetch in (0, 1):
            for stretch in (0, 1):
                began = time.perf_counter()
                _library().fedcore_probe_write(
                    *(pointers.ctypes.data, targets.ctypes.data, len(rows), words, tile),
                    *(streams, prefetch, stretch, threads),
                )
                seconds.append(time.perf_counter() - began)
    return np.array(seconds)
