"""Rows that an exchange may write, and the keys of their rounding."""

import numpy as np

from fedcore.kernels import Codes


def empty(codec, n):
    if codec == "f32":
        return np.full(n, np.nan, np.float32)
    scales = np.empty(-(-n // 64), np.float32) if codec == "int8" else None
    return Codes(codec, np.empty(n, np.int8 if codec == "int8" else np.uint16), scales)


def random_keys(k, seed):
    return np.random.default_rng(seed).integers(0, 2**64, (k, 2), np.uint64)
