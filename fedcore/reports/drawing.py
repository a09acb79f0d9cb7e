"""The common parts of the reports' pictures: colours, frames, and names beside the ends of lines."""

from collections.abc import Iterable, Sequence
from math import inf
from pathlib import Path
from textwrap import wrap
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FixedFormatter

from fedcore.atomic_file import draft_of

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")
"""Okabe and Ito's palette, made for every kind of colour vision; line styles repeat the difference. The two blues, and
the two oranges, are far from each other and never of one style."""
STYLES = ("solid", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.2, 1.5)))
INK, FAINT = "#333333", "#dddddd"
TITLE, SAID, NAMED = 12, 9.5, 10
"""Points: a title, the lines below it, and names."""
NAME_HEIGHT, NAME_WIDTH = 0.2, 2.2
"""Inches that a line of a name takes, with the space above it, and at most."""
NAMES = FontProperties(size=NAMED, weight="bold")
GAP = 0.08
"""Inches between two labels of an axis."""
PLAIN: dict[str, Any] = {"parse_math": False}
"""Of every text that somebody else wrote: a dollar is a dollar, and no formula that fails when all is done."""
BESIDE_TEXT = 0.9
"""Inches to the left of the axes, and at the right edge, that a title has not."""


def new_figure(width: float, height: float) -> Figure:
    """An empty picture of so many inches."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display, and leaves matplotlib's global state alone
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a picture whose format is the ending of its path."""
    with draft_of(path) as draft:
        figure.savefig(draft, format=path.suffix[1:])


def look(order: int) -> tuple[str, Any]:
    """Colour and line style of the algorithm at this place of the comparison."""
    return COLOURS[order % len(COLOURS)], STYLES[order % len(STYLES)]


def fitted(text: str, inches: float, *, size: float, weight: str = "normal") -> str:
    """The text on as many lines as it takes to be no wider than so many inches, by its own font's measures."""
    font = FontProperties(size=size, weight=weight)
    fitting: list[str] = []
    for paragraph in text.split("\n"):
        columns = max(len(paragraph), 1)
        lines = [paragraph]
        while columns > 1 and max(_inches(line, font) for line in lines) > inches:
            columns -= max(1, columns // 20)
            lines = wrap(paragraph, columns) or [""]
        fitting += lines
    return "\n".join(fitting)


def frame(axes: Any, says: str, *, width: float, title: str = "") -> None:
    """Give axes a frame without boxes, and above them a title and lines that say what is drawn, with its unit.

    Args:
        axes: whose frame it is.
        says: what is drawn.
        width: of the picture, in inches.
        title: above that, of the picture.
    """
    says = fitted(says, width - BESIDE_TEXT, size=SAID)
    if title:
        title = fitted(title, width - BESIDE_TEXT, size=TITLE, weight="bold")
        pad = 22 + 13 * says.count("\n")
        axes.set_title(title, loc="left", fontsize=TITLE, fontweight="bold", color=INK, pad=pad, **PLAIN)
    axes.text(0, 1.02, says, transform=axes.transAxes, fontsize=SAID, color=INK, **PLAIN)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


def label_axis(axis: Any, text: str, inches: float) -> None:
    """Name an axis, on as many lines as its length asks for."""
    axis.set_label_text(fitted(text, inches, size=NAMED), color=INK, **PLAIN)


def stagger(axes: Any, names: Iterable[str]) -> None:
    """Move the labels of an x axis that would overlap the one before to lines below it.

    Args:
        axes: whose ticks and limits are final.
        names: that ``name_ends`` will write beside it, for which it becomes narrower.
    """
    figure = axes.get_figure()
    figure.draw_without_rendering()
    taken = max((_inches(line, NAMES) for name in names for line in _name(name).split("\n")), default=0.0)
    narrower = 1 - taken * figure.dpi / axes.get_window_extent().width
    ends: list[float] = []
    texts = []
    for label in axes.get_xticklabels():
        box = label.get_window_extent()
        left = narrower * (box.x0 + box.x1) / 2 - box.width / 2
        line = next((place for place, end in enumerate(ends) if left >= end), len(ends))
        ends[line : line + 1] = [left + box.width + GAP * figure.dpi]
        texts.append("\n" * line + label.get_text())
    axes.xaxis.set_major_formatter(FixedFormatter(texts))


def room_for(names: Iterable[str]) -> float:
    """Inches that names take above each other."""
    return sum(_name(name).count("\n") + 1 for name in names) * NAME_HEIGHT


def name_ends(axes: Any, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write names beside the right ends of lines, moved apart where two would overlap.

    Args:
        axes: whose limits, frame and title are final.
        ends: the y of each line's end, its name and its colour.
    """
    figure = axes.get_figure()
    figure.draw_without_rendering()  # lays out what is there, so that the axes have their height
    low, high = axes.get_ylim()
    inch = (high - low) / (axes.get_window_extent().height / figure.dpi)
    placed = sorted((y, _name(name), colour) for y, name, colour in ends)
    sizes = [inch * NAME_HEIGHT * (name.count("\n") + 1) for _, name, _ in placed]
    for y, (_, name, colour) in zip(apart([y for y, *_ in placed], sizes, top=high), placed, strict=True):
        axes.text(
            1.012,
            y,
            name,
            transform=axes.get_yaxis_transform(),
            color=colour,
            fontsize=NAMED,
            fontweight="bold",
            linespacing=1.0,
            va="center_baseline",
            **PLAIN,
        )


def apart(middles: Sequence[float], sizes: Sequence[float], *, top: float) -> list[float]:
    """Ascending middles of names moved up until none overlaps the one before, then down to stay below ``top``.

    Args:
        middles: where the names would be.
        sizes: how high each of them is.
        top: what none may pass.
    """
    placed: list[float] = []
    below = -inf
    for middle, size in zip(middles, sizes, strict=True):
        placed.append(max(middle, below + size / 2))
        below = placed[-1] + size / 2
    above = top
    for index in reversed(range(len(placed))):
        placed[index] = min(placed[index], above - sizes[index] / 2)
        above = placed[index] - sizes[index] / 2
    return placed


def _name(text: str) -> str:
    return fitted(text, NAME_WIDTH, size=NAMED, weight="bold")


def _inches(line: str, font: FontProperties) -> float:
    width, _, _ = text_to_path.get_text_width_height_descent(line, font, ismath=False)
    return width / 72
