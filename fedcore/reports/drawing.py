"""What the reports' pictures have in common: colours, frames, and names beside the ends of lines."""

from collections.abc import Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Okabe and Ito's palette, made for every kind of colour vision; line styles repeat the difference."""
STYLES = ("solid", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.2, 1.5)))
INK, FAINT = "#333333", "#dddddd"
NAME_HEIGHT = 0.24
"""Inches that a name takes, with the space above it."""


def new_figure(width: float, height: float) -> Figure:
    """An empty picture of so many inches."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display, and leaves matplotlib's global state alone
    return figure


def look(order: int) -> tuple[str, Any]:
    """Colour and line style of the algorithm at this place of the comparison."""
    return COLOURS[order % len(COLOURS)], STYLES[order % len(STYLES)]


def frame(axes: Any, says: str, *, title: str = "") -> None:
    """Give axes a frame without boxes, and above them a title and lines that say what is drawn, with its unit."""
    if title:
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=22 + 13 * says.count("\n"))
    axes.text(0, 1.02, says, transform=axes.transAxes, fontsize=9.5, color=INK)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


def name_ends(axes: Any, ends: Sequence[tuple[float, str, str]], height: float) -> None:
    """Write names beside the right ends of lines, moved apart where two would overlap.

    Args:
        axes: whose limits are final.
        ends: the y of each line's end, its name and its colour.
        height: of the axes, in inches.
    """
    low, high = axes.get_ylim()
    gap = (high - low) * NAME_HEIGHT / height
    heights = apart([y for y, *_ in sorted(ends)], gap=gap, top=high)
    for y, (_, name, colour) in zip(heights, sorted(ends), strict=True):
        axes.text(
            1.012,
            y,
            name,
            transform=axes.get_yaxis_transform(),
            color=colour,
            fontweight="bold",
            va="center_baseline",
        )


def apart(heights: Sequence[float], *, gap: float, top: float) -> list[float]:
    """Ascending heights moved up until each is ``gap`` above the one before, then down to stay below ``top``."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + gap) if placed else height)
    for index in reversed(range(len(placed))):
        placed[index] = min(placed[index], top - gap / 2 - gap * (len(placed) - 1 - index))
    return placed
