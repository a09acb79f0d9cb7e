"""The examples of each class that clients hold: a picture, and a table for the terminal."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.colors import ListedColormap, PowerNorm
from matplotlib.ticker import MaxNLocator
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fedcore.reports.drawing import (
    BESIDE_TEXT,
    COLOURS,
    FAINT,
    INK,
    PLAIN,
    SAID,
    TITLE,
    fitted,
    new_figure,
    save_figure,
)

Counts = npt.NDArray[np.int64]

BARS = "▁▂▃▄▅▆▇█"
NONE = "·"


def draw_holdings(counts: Counts, path: Path, *, title: str) -> None:
    """Draw who holds what as a PNG: clients x classes as a heat map, and above it the clients' sizes.

    Args:
        counts: int64[N, C], examples of each class at each client.
        path: the file.
        title: what the picture shows.
    """
    clients, classes = counts.shape
    size = (min(max(6.0, 3 + 0.1 * clients), 14.0), min(max(4.2, 2.4 + 0.2 * classes), 14.0))
    figure = new_figure(*size)
    bars, heat = figure.subplots(2, 1, sharex=True, height_ratios=[1, max(2.0, 0.18 * classes)])
    title = fitted(title, size[0] - 0.3, size=TITLE, weight="bold")
    figure.suptitle(title, x=0.01, ha="left", fontsize=TITLE, fontweight="bold", color=INK, **PLAIN)
    says = fitted(_summary(counts).replace(": ", "\n"), size[0] - 2 * BESIDE_TEXT, size=SAID)
    bars.set_title(says, loc="left", fontsize=SAID, color=INK, **PLAIN)

    bars.bar(np.arange(clients), counts.sum(axis=1), color=COLOURS[0], width=0.8)
    bars.set_ylabel("examples", color=INK)
    bars.yaxis.set_major_locator(MaxNLocator(4, integer=True))

    # A square root, so that a client with few examples is seen beside one with many; only nothing at all is white.
    shades = heat.imshow(
        np.ma.masked_equal(counts.T, 0),
        aspect="auto",
        cmap=ListedColormap(colormaps["Blues"](np.linspace(0.2, 1, 256))),
        norm=PowerNorm(0.5, 0, max(counts.max(), 1)),
    )
    heat.set_xlabel("client", color=INK)
    heat.set_ylabel("class", color=INK)
    for axis in (heat.xaxis, heat.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    bar = figure.colorbar(shades, ax=heat, pad=0.01, aspect=30)
    bar.set_label("examples of the class", color=INK)
    bar.outline.set_visible(False)

    for axes in (bars, heat, bar.ax):
        axes.tick_params(colors=INK, length=0)
    bars.spines[["top", "right", "left"]].set_visible(False)
    for spine in (*bars.spines.values(), *heat.spines.values()):
        spine.set_color(FAINT)
    save_figure(figure, path)


def holdings_table(counts: Counts, *, title: str, most: int | None = None) -> Group:
    """The holdings for a terminal: a line for each client, and in it a bar for each class.

    Args:
        counts: int64[N, C].
        title: what the table shows.
        most: lines; the clients past them are counted only. None for all.
    """
    classes = counts.shape[1]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("client", "examples", "classes"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("".join(map(str, range(classes))) if classes <= 10 else f"0 .. {classes - 1}", overflow="fold")
    for client, row in enumerate(counts[:most]):
        table.add_row(str(client), f"{row.sum():,}", str(np.count_nonzero(row)), _bars(row))
    below = [f"{_summary(counts)}. A bar is as high as its share of the client's most frequent class."]
    if most is not None and len(counts) > most:
        below.insert(0, f"... and {len(counts) - most} more clients")
    return Group(Text(title, style="bold"), table, *(Text(line, style="dim") for line in below))


def _bars(row: Counts) -> str:
    highest = max(int(row.max()), 1)
    return "".join(BARS[(count * len(BARS) - 1) // highest] if count else NONE for count in row.tolist())


def _summary(counts: Counts) -> str:
    """``60,000 examples at 30 clients: 1,889 to 2,248 each (median 1,981), 2 classes each``."""
    sizes, held = counts.sum(axis=1), np.count_nonzero(counts, axis=1)
    each = f"{sizes.min():,} to {sizes.max():,} each (median {np.median(sizes):,.0f})"
    if sizes.min() == sizes.max():
        each = f"{sizes.min():,} each"
    kinds = f"{held.min()} to {held.max()}" if held.min() < held.max() else f"{held.min()}"
    return f"{sizes.sum():,} examples at {len(counts)} clients: {each}, {kinds} of {counts.shape[1]} classes each"
