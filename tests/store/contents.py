"""Rows and vectors that are a pure function of a key, and that every codec stores without loss."""

import numpy as np

from fedcore import kernels
from fedcore.kernels import Codes


def content(n, *key):
    """float32[n], a pure function of the key, that every codec stores without loss."""
    rng = np.random.default_rng([int.from_bytes(part.encode()) if isinstance(part, str) else part for part in key])
    values = rng.integers(-127, 128, n).astype(np.float32)
    values[::64] = 127  # a block's scale is then 1
    return values


def write(store, client, values):
    """Stage a row with these values."""
    slot = store.stage(client)
    if isinstance(slot, Codes):
        kernels.quantise(np.float32(values), slot.codec, out=slot)
    else:
        slot[:] = values
