"""The floors: the fastest of several ways to read the same arrays once, or to rewrite them, on as many threads."""

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
    library.fedcore_probe_read.restype = ctypes.c_uint64
    library.fedcore_probe_read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64] + 3 * [ctypes.c_int]
    library.fedcore_probe_rewrite.restype = None
    library.fedcore_probe_rewrite.argtypes = [ctypes.c_void_p] + 3 * [ctypes.c_int64] + 3 * [ctypes.c_int]
    return library


def read_seconds(rows, threads):
    """Seconds of the fastest probe over those rows: 1, 2, 4 or 8 streams, with and without prefetch."""
    pointers = np.array([row.ctypes.data for row in rows], np.uint64)
    best = float("inf")
    for streams in range(4):
        for prefetch in (0, 1):
            began = time.perf_counter()
            _library().fedcore_probe_read(
                pointers.ctypes.data, len(rows), rows[0].nbytes // 8, streams, prefetch, threads
            )
            best = min(best, time.perf_counter() - began)
    return best


def rewrite_seconds(rows, streams, threads):
    """Seconds of the fastest probe that reads ``rows``, ``streams`` at a time, and rewrites the first of each group.

    With and without prefetch, row by row and in tiles. The rows' words are changed; there are as many as fit in
    ``streams`` x 8 bytes.
    """
    pointers = np.array([row.ctypes.data for row in rows], np.uint64)
    words = rows[0].nbytes // 8
    best = float("inf")
    for tile in sorted({words, min(words, 8192)}):
        for prefetch in (0, 1):
            began = time.perf_counter()
            _library().fedcore_probe_rewrite(pointers.ctypes.data, len(rows), words, tile, streams, prefetch, threads)
            best = min(best, time.perf_counter() - began)
    return best
