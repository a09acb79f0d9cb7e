"""Plot the folds' share of the floor over the length of rows: ``python -m bench.shares PICTURE FILES``.

The files are results of ``bench_shapes`` on one machine.
"""

import argparse
import re
from pathlib import Path

import matplotlib.pyplot as plt

from bench.table import read

TITLE = re.compile(r"weighted sum, (\d+) rows x ([\d,]+), (.+)")
MARKS = {"apart": "o", "stacked": "s", "small pages": "^"}


def draw(entries, picture):
    """Plot the share over the elements, with a line for each number of rows and layout."""
    found = {}
    for entry in entries:
        if "bench_shapes" in entry.bench:
            k, n, layout = TITLE.fullmatch(entry.line.title).groups()
            share = entry.line.ratios["fold floor"]
            found.setdefault((int(k), layout), []).append((int(n.replace(",", "")), share))
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for (k, layout), points in sorted(found.items()):
        colour = f"C{sorted({rows for rows, _ in found}).index(k)}"
        n, share = zip(*sorted(points), strict=True)
        axes.plot(n, share, MARKS[layout] + "-", color=colour, alpha=0.8, label=f"{k} rows, {layout}")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="elements of a row, float32", ylabel="share of the fold floor", ylim=(0, None))
    axes.set_title(f"weighted sums, {entries[0].machine['cpu']}, {entries[0].machine['threads']} threads", fontsize=10)
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(picture, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path)
    parser.add_argument("files", nargs="+", type=Path, help="JSON of runs: build/bench/*.json")
    chosen = parser.parse_args()
    draw(read(chosen.files), chosen.picture)


if __name__ == "__main__":
    main()
