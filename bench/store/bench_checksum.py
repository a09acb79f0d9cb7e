"""Checksums of a large buffer, against zlib's CRC-32 and the read floor."""

import zlib

import numpy as np

import fedcore
from bench.probe import read_floor
from fedcore.store import checksums

BUFFER = np.random.default_rng(0).random(1 << 24)  # 128 MiB


def bench_checksums(versus):
    rivals = {
        "zlib.crc32": lambda: zlib.crc32(BUFFER),
        "zlib.adler32": lambda: zlib.adler32(BUFFER),
        "numpy sum of uint64": lambda: BUFFER.view(np.uint64).sum(),
        "read floor": read_floor(np.split(BUFFER, 8), fedcore.threads()),
    }
    title = f"checksums of 128 MiB; {fedcore.threads()} threads"
    versus(title, lambda: checksums(BUFFER), rivals, bytes=BUFFER.nbytes)
