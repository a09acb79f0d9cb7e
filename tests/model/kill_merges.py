"""Kill merges at random moments until they finish: ``python -m tests.model.kill_merges 100 [SEED]``.

Each result must have the bytes of a merge that was not killed, and nothing beside it may change.
"""

import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from fedcore import merge, write_model
from fedcore.algorithms.optimizers import Nesterov
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


def in_child(call, kill_at=None):
    """Run a call in small steps in a child; see ``killed``."""

    def act():
        small_steps()
        call()

    return killed(act, kill_at)


def storm(kills, seed, folder):
    """Return the number of merges, and of kills, in a new folder."""
    rng, count, merges = random.Random(seed), 0, 0
    base, *inputs = models(folder)
    options = dict(base=base, optimizer=Nesterov(), clip_norm=1000.0)
    began = time.monotonic()
    in_child(lambda: merge(folder / "due", inputs, [3, 1], **options))
    took, before, out = time.monotonic() - began, content(folder), folder / "out"
    due = content(folder / "due")
    while count < kills:
        while not out.exists():
            count += in_child(lambda: merge(out, inputs, [3, 1], **options), rng.uniform(0, 1.2 * took))
        in_child(lambda: merge(out, inputs, [3, 1], **options))  # cleans up after a kill behind the rename
        assert content(out) == due, "a killed merge has a different result"
        shutil.rmtree(out)
        assert content(folder) == before, "a merge changed something else"
        merges += 1
    return merges, count


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        merges, kills = storm(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0, Path(name))
    print(f"{merges} merges, {kills} kills: every result as without a kill")
