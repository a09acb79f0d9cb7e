"""Models to merge, and merges in small steps whose child can be killed at each call."""

import os

import numpy as np

from fedcore import write_model
from fedcore.model import merging, windows
from tests.kills import killed

NAMES = ("mkdir", "ftruncate", "pwrite", "fdatasync", "fsync", "replace", "rename", "unlink", "rmdir", "fchmod")
CALLS = [(os, name) for name in NAMES]
"""The calls by which a merge changes a disk, except that a file is made: an empty one is there at the next call."""


def models(folder, count=3, n=500_000):
    """Write some models and return their paths."""
    rng = np.random.default_rng(0)
    for i in range(count):
        tensors = {"w": rng.normal(size=n), "b": rng.normal(size=n // 5), "s": rng.normal(size=()), "n": np.array(i)}
        write_model(
            {k: np.asarray(t, t.dtype if k == "n" else np.float32) for k, t in tensors.items()},
            folder / f"{i}.safetensors",
        )
    return [folder / f"{i}.safetensors" for i in range(count)]


def content(folder):
    """Return the bytes of each file of a result."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def small_steps(largest=1 << 17):
    """Make windows and the steps between two records small."""
    merging.SAFE, windows.LARGEST = 4 * largest, largest


def in_child(call):
    """Run a call in small steps in a child; see ``killed``."""

    def act():
        small_steps()
        call()

    return killed(act)
