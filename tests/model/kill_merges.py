"""Kill merges at random moments until they finish: ``python -m tests.model.kill_merges 100 [SEED]``.

Each result must have the bytes of a merge that was not killed.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from fedcore import merge, write_model
from fedcore.algorithms.optimizers import Nesterov
from fedcore.model import merging, windows


def models(folder, count=3, n=500_000):
    """Write some models and return their paths."""
    rng = np.random.default_rng(0)
    for i in range(count):
        tensors = {"w": rng.normal(size=n), "b": rng.normal(size=100_000), "s": rng.normal(size=()), "n": np.array(i)}
        write_model(
            {k: np.asarray(t, t.dtype if k == "n" else np.float32) for k, t in tensors.items()},
            folder / f"{i}.safetensors",
        )
    return [folder / f"{i}.safetensors" for i in range(count)]


def content(folder):
    """Return the bytes of each file of a result."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def small_steps():
    """Make windows and the steps between two records small."""
    merging.SAFE, windows.LARGEST = 1 << 19, 1 << 17


def in_child(call, kill_at=None):
    """Run a call in a child; kill it after some seconds, or let the call kill itself. Return whether it was killed."""
    if (child := os.fork()) == 0:
        small_steps()
        try:
            call()
        finally:
            os._exit(0)
    if kill_at is not None:
        time.sleep(kill_at)
        os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def storm(kills, seed):
    rng, killed, merges = random.Random(seed), 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base, *inputs = models(folder)
        options = dict(base=base, optimizer=Nesterov(), clip_norm=1000.0)
        began = time.monotonic()
        in_child(lambda: merge(folder / "due", inputs, [3, 1], **options))
        took, due = time.monotonic() - began, content(folder / "due")
        while killed < kills:
            out = folder / "out"
            while not out.exists():
                killed += in_child(lambda out=out: merge(out, inputs, [3, 1], **options), rng.uniform(0, 1.2 * took))
            in_child(lambda out=out: merge(out, inputs, [3, 1], **options))  # cleans up after a kill behind the rename
            assert content(out) == due, "a killed merge has a different result"
            assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["due", "out"]
            shutil.rmtree(out)
            merges += 1
    return merges, killed


if __name__ == "__main__":
    merges, killed = storm(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print(f"{merges} merges, {killed} kills: every result as without a kill")
