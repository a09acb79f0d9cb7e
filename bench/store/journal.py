"""The cost of an accepted update in a round with a journal, next to that of its bytes alone.

    python -m bench.store.journal FOLDER

The floor writes the same bytes to a preallocated file and calls fdatasync. Both ways take turns. FOLDER must not exist.
"""

import os
import shutil
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

from fedcore import Server, Storage

SIZES = {4 << 10: 60, 1 << 20: 40, 4 << 20: 30, 64 << 20: 10}
"""The number of updates for each number of bytes."""
CHUNK = 1 << 20


def measure(folder: Path, size: int, k: int) -> tuple[list[float], list[float], list[float]]:
    """Return the seconds of each write of the floor, of each ``add`` with a journal, and of each one without."""
    y = np.random.default_rng(0).normal(size=size // 4).astype(np.float32)
    storage = Storage(folder / "server", journal=True)
    seconds: tuple[list[float], list[float], list[float]] = [], [], []
    file = os.open(folder / "plain", os.O_RDWR | os.O_CREAT)
    plain = Server(np.zeros_like(y), clients=k, lr=0.1)
    with Server(np.zeros_like(y), clients=k, lr=0.1, storage=storage) as server:
        for _ in range(2):  # the first round makes the slots
            opened, beside = server.open_round(), plain.open_round()
            for client in range(k):
                os.posix_fallocate(file, client * size, size)
                begun = [time.perf_counter()]
                for start in range(0, size, CHUNK):
                    os.pwrite(file, y.view(np.uint8)[start : start + CHUNK], client * size + start)
                os.fdatasync(file)
                begun.append(time.perf_counter())
                assert opened.add(client, y, steps=1)
                begun.append(time.perf_counter())
                assert beside.add(client, y, steps=1)
                begun.append(time.perf_counter())
                for took, start, end in zip(seconds, begun, begun[1:], strict=False):
                    took.append(end - start)
            opened.abort()
            beside.abort()
    os.close(file)
    return tuple(took[k:] for took in seconds)


def main(folder: Path) -> None:
    """Print a row for each size."""
    print("| update | floor, ms | with a journal, ms | without, ms | with a journal / floor |")
    print("|---|---:|---:|---:|---:|")
    for size, k in SIZES.items():
        folder.mkdir()
        try:
            floor, journal, without = measure(folder, size, k)
        finally:
            shutil.rmtree(folder)
        ms = [f"{1000 * median(took):.2f}" for took in (floor, journal, without)]
        ratio = median(ours / least for ours, least in zip(journal, floor, strict=True))
        print(f"| {size >> 10:,} KiB | {' | '.join(ms)} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
