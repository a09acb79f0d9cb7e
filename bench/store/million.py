"""The cost of a store per client, row and round, with a million clients and rows of 100,000 elements.

python -m bench.store.million FOLDER [--clients N] [--elements n] [--cohort S] [--rounds T]

A MIFA server has an mmap store with int8 rows. Every round draws a new cohort, commits its rows and, with
``durability="round"``, waits for the disk. The folder must not exist, and is deleted at the end.
"""

import argparse
import shutil
import time
from pathlib import Path

import numpy as np

from bench import machine
from fedcore import ClientStore, Server, Update, algorithms, sampling

RESIDENT_ROWS = 2_000


def resident():
    """Return this process's resident memory in MB: anonymous memory, and mapped pages of files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {kind: int(lines[kind].split()[0]) / 1e3 for kind in ("RssAnon", "RssFile")}


def measure(folder, options, durability):
    """Return the lines of the table for one durability."""
    ids = np.random.default_rng(0).permutation(options.clients).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    before, began = resident(), time.perf_counter()
    store = ClientStore(
        ids,
        options.elements,
        medium="mmap",
        codec="int8",
        path=folder,
        durability=durability,
        resident_rows=RESIDENT_ROWS,
    )
    yield f"registering {options.clients:,} ids in a new folder, s", f"{time.perf_counter() - began:.2f}"
    server = Server(np.zeros(options.elements, np.float32), algorithms.MIFA(wait=False), storage=store, lr=0.1)
    h = np.random.default_rng(1).standard_normal(options.elements).astype(np.float32)
    took, most = [], 0.0
    for t in range(options.rounds):
        drawn = sampling.without_replacement(options.clients, options.cohort, seed=0, round=t)
        updates = [Update(client, value=h, kind="gradient", steps=1) for client in ids[drawn].tolist()]
        began = time.perf_counter()
        server.round(updates)
        took.append(time.perf_counter() - began)
        most = max(most, resident()["RssFile"])
    own, row = resident()["RssAnon"] - before["RssAnon"], store.info().row_bytes / 1e6
    low, middle, high = np.quantile(took[1:], [0.25, 0.5, 0.75])
    yield "rounds a second, median (quartiles)", f"{1 / middle:.2f} ({1 / high:.2f}-{1 / low:.2f})"
    yield "clients' updates a second", f"{options.cohort / middle:,.0f}"
    yield "rows written", f"{len(store):,} of {row * 1e3:.1f} KB"
    yield "on the disk, MB (the rows' own bytes)", f"{store.info().bytes / 1e6:,.0f} ({len(store) * row:,.0f})"
    bound = (2 * RESIDENT_ROWS + options.cohort) * row
    yield "the process's own memory, MB (of which 25 MB a million clients)", f"{own:,.0f}"
    yield f"mapped rows in memory, MB at most ({2 * RESIDENT_ROWS:,} rows and a cohort: {bound:,.0f})", f"{most:,.0f}"
    began = time.perf_counter()
    store.close()
    with ClientStore.open(folder, durability=durability):
        yield "closing and opening again, s", f"{time.perf_counter() - began:.2f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--elements", type=int, default=100_000)
    parser.add_argument("--cohort", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    print(machine.head(machine.describe()), "", sep="\n")
    found = {}
    for durability in ("none", "round"):
        try:
            found[durability] = dict(measure(options.folder, options, durability))
        finally:
            shutil.rmtree(options.folder, ignore_errors=True)
    print(f"| durability | {' | '.join(found)} |", f"|---|{'---:|' * len(found)}", sep="\n")
    for line in next(iter(found.values())):
        print(f"| {line} | {' | '.join(figures[line] for figures in found.values())} |")


if __name__ == "__main__":
    main()
