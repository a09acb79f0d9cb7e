"""A store larger than memory: rounds whose rows are only on the disk, against the disk's bandwidth.

python -m bench.store.outgrow FOLDER [--clients N] [--elements n] [--cohort S] [--rows ROWS] [--repeats R]

A MIFA server has an mmap store with bf16 rows (22 MB each for n = 11.17 M). First ROWS clients get a row; choose ROWS
so that the file is larger than memory. Each repeat times one after the other:

- the disk: read the cohort's rows in large pieces, and write and sync the same number of bytes;
- a cold round, whose rows are not in memory, immediately;
- a cold round some seconds after ``Server.broadcast`` named its cohort, as if the clients trained meanwhile;
- a warm round with the same cohort;
- the exchange in place, without free slots and commit, and with rows in memory.

Nothing else should use the disk meanwhile. The folder must not exist, and is deleted at the end.
"""

import argparse
import os
import shutil
import time
from pathlib import Path

import numpy as np

from bench import machine
from fedcore import ClientStore, Server, Storage, Update, algorithms, kernels
from fedcore import runtime as randomness

PIECE = 8 << 20  # the bytes per read or write when the disk is measured
COLD, WARM = "a cold round, right away", "a warm round"
AHEAD = "a cold round, its rows read ahead while clients trained"


class Bench:
    """A server with a folder, cohorts of clients with rows, and the disk below."""

    def __init__(self, options):
        self.options, self.took = options, {}
        n = options.elements
        store = ClientStore(
            options.clients, n, medium="mmap", codec="bf16", path=options.folder, resident_rows=2 * options.cohort
        )
        self.server = Server(np.zeros(n, np.float32), algorithms.MIFA(wait=False), storage=store, lr=0.1)
        self.h = np.random.default_rng(0).standard_normal(n, dtype=np.float32)
        self.row_bytes = store.info().row_bytes
        self._next = 0

    def timed(self, name, act):
        began = time.perf_counter()
        act()
        self.took.setdefault(name, []).append(time.perf_counter() - began)

    def round(self, ids):
        self.server.round([Update(client, value=self.h, kind="gradient", steps=1) for client in ids])

    def fill(self):
        """Give the first ROWS clients a row."""
        for start in range(0, self.options.rows, self.options.cohort):
            ids = range(start, min(start + self.options.cohort, self.options.rows))
            self.timed("a first round, in which nobody has a row", lambda ids=ids: self.round(ids))

    def cold(self):
        """Return the least recently used cohort, after dropping all rows from memory."""
        start, self._next = self._next, (self._next + self.options.cohort) % self.options.rows
        ids = [client % self.options.rows for client in range(start, start + self.options.cohort)]
        fd = os.open(self.options.folder / "rows.slots", os.O_RDWR)
        os.fdatasync(fd)  # unwritten pages cannot be dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        return ids

    def read_by_the_disk(self, ids):
        """Read the cohort's rows in large pieces into memory."""
        slots = [int(self.server.store._content.rows.slot[client]) for client in ids]
        fd, into = os.open(self.options.folder / "rows.slots", os.O_RDONLY), memoryview(bytearray(PIECE))
        for slot in sorted(slots):
            start = 65_536 + (slot - 1) * self.row_bytes
            for at in range(start, start + self.row_bytes, PIECE):
                os.preadv(fd, [into[: min(PIECE, start + self.row_bytes - at)]], at)
        os.close(fd)

    def written_by_the_disk(self):
        """Write the bytes of a round (rows, x and the total) to a new file, and sync it."""
        self._fresh_file(self.options.cohort * self.row_bytes + 12 * self.options.elements)

    def _fresh_file(self, size):
        path = self.options.folder.with_name(self.options.folder.name + ".scratch")
        fd, piece = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), os.urandom(PIECE)
        for _ in range(0, size, PIECE):
            os.write(fd, piece)
        os.fdatasync(fd)
        os.close(fd)
        path.unlink()

    def repeat(self):
        options, server = self.options, self.server
        ids = self.cold()
        self.timed("the disk reads the cohort's rows", lambda: self.read_by_the_disk(ids))
        self.timed("the disk writes and syncs as much as a round", self.written_by_the_disk)
        ids = self.cold()
        self.timed(COLD, lambda: self.round(ids))
        ids = self.cold()
        server.broadcast(ids)
        time.sleep(options.training)
        self.timed(AHEAD, lambda: self.round(ids))
        self.timed(WARM, lambda: self.round(ids))
        self.timed("the disk writes and syncs as much as a round", self.written_by_the_disk)
        self.exchanges(ids)

    def exchanges(self, ids):
        """Time only the kernel: to free slots, in place, and in memory."""
        store, S, n = self.server._backend.store, self.options.cohort, self.options.elements
        old, new = [store.row(client) for client in ids], [store.stage(client) for client in ids]
        acc, ys, ones, none = np.zeros(n), [self.h] * S, np.ones(S), [None] * S
        minus, keys = -ones, randomness.keys("row", round=0, clients=ids)

        def swap(old, new):
            kernels.exchange(acc, none, ys, minus, ones, old, none, new, out=acc, keys=keys)

        swap(old, new)
        self.timed("exchange to free slots of the file, warm", lambda: swap(old, new))
        swap(new, new)
        self.timed("exchange in place in the file, warm", lambda: swap(new, new))
        store.discard()
        rows = ClientStore(S, n, codec="bf16")
        held = [rows.stage(i) for i in range(S)]
        swap(none, held)
        self.timed("exchange in place in memory", lambda: swap(held, held))

    def write_back(self, early):
        """Time a round, and the checkpoint after training, with writing started early or left to the checkpoint."""
        store, ids = self.server._backend.store, self.cold()
        store._session._write_back = early
        self.server.broadcast(ids)
        time.sleep(self.options.training)
        how = "begun early, by a thread" if early else "left to the checkpoint"
        self.timed(f"a round without waiting, its writing {how}", lambda: self.round(ids))
        time.sleep(self.options.training)
        self.timed(f"the checkpoint after training, writing {how}", store.checkpoint)


def report(bench):
    """Print the table and the ratios."""
    options, median = bench.options, {name: float(np.median(took)) for name, took in bench.took.items()}
    rows, vectors = options.cohort * bench.row_bytes / 1e9, 12 * options.elements / 1e9
    print("| what | s, median (all) |", "|---|---|", sep="\n")
    for name, took in bench.took.items():
        print(f"| {name} | {median[name]:.2f} ({', '.join(f'{s:.2f}' for s in sorted(took)[:12])}) |")
    read, wrote = median["the disk reads the cohort's rows"], median["the disk writes and syncs as much as a round"]
    print(f"\nThe disk reads {rows / read:.2f} GB/s and writes {(rows + vectors) / wrote:.2f} GB/s.")
    # Ratios are within a repeat, and use the faster of the disk's two writes.
    reads, writes = (np.array(bench.took[name]) for name in bench.took if name.startswith("the disk"))
    writes = writes.reshape(-1, 2).min(axis=1)
    for name, own in ((COLD, reads + writes), (AHEAD, reads + writes), (WARM, writes)):
        share = own / bench.took[name]
        print(f"{name}: the disk alone takes {np.median(share):.2f} of it ({share.min():.2f}-{share.max():.2f})")
    plain = median["exchange in place in memory"]
    for name in ("exchange in place in the file, warm", "exchange to free slots of the file, warm"):
        print(f"{name}: {plain / median[name]:.2f} of the speed in place in memory")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--clients", type=int, default=2_000)
    parser.add_argument("--elements", type=int, default=11_173_962)
    parser.add_argument("--cohort", type=int, default=20)
    parser.add_argument("--rows", type=int, default=1_200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--training", type=float, default=2.0, help="seconds that clients train")
    options = parser.parse_args()
    print(machine.head(machine.describe()), "", sep="\n")
    try:
        bench = Bench(options)
        bench.fill()
        size = bench.server.store.info().bytes / 2**30
        print(f"{options.rows:,} rows of {bench.row_bytes / 1e6:.1f} MB are {size:.1f} GiB on the disk\n", flush=True)
        for _ in range(options.repeats):
            bench.repeat()
        bench.server.close()
        bench.server = Server.load(options.folder, storage=Storage(durability="checkpoint"))
        for _ in range(options.repeats):
            bench.write_back(early=False)
            bench.write_back(early=True)
        bench.server.close()
        report(bench)
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
