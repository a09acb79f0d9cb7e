"""Accuracy over rounds: a line for each algorithm's mean, a band from the lowest to the highest seed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedcore.experiment.records import Record
from fedcore.reports.summary import accuracies

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Okabe and Ito's palette, made for every kind of colour vision; line styles repeat the difference."""
STYLES = ("solid", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.2, 1.5)))
INK, FAINT = "#333333", "#dddddd"


def draw_curves(records: Sequence[Record], path: Path, paper: Mapping[str, float] | None = None) -> None:
    """Draw the accuracies of a run's records as a PNG.

    A curve ends where the first of its seeds ends, so that a mean never jumps because a seed stopped early.

    Args:
        records: of one experiment.
        path: the file.
        paper: the accuracies in percent that a paper reports at the end, by algorithm: dotted lines.
    """
    figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display, and leaves matplotlib's global state alone
    axes = figure.add_subplot()
    ends: list[tuple[float, str, str]] = []
    for algorithm in dict.fromkeys(record.header.algorithm for record in records):
        group = [record for record in records if record.header.algorithm == algorithm]
        rounds, low, mean, high = _band(group)
        if not rounds:
            continue
        order = group[0].header.order
        colour = COLOURS[order % len(COLOURS)]
        axes.fill_between(rounds, low, high, color=colour, alpha=0.13, linewidth=0)
        axes.plot(rounds, mean, color=colour, linestyle=STYLES[order % len(STYLES)], linewidth=1.8)
        ends.append((mean[-1], algorithm, colour))
        if paper and algorithm in paper:
            axes.axhline(paper[algorithm], color=colour, linestyle=":", linewidth=1)
    _dress(axes, records, ", dotted: the paper's" if paper else "")
    _label_ends(axes, ends)
    figure.savefig(path)


def _band(group: Sequence[Record]) -> tuple[list[int], list[float], list[float], list[float]]:
    """Rounds (counted from 1) and the lowest, mean and highest accuracy in percent."""
    curves = [curve for curve in map(accuracies, group) if curve]
    shared = [round for round in curves[0] if all(round in curve for curve in curves)] if curves else []
    columns = [[100 * curve[round] for curve in curves] for round in shared]
    return (
        [round + 1 for round in shared],
        [min(column) for column in columns],
        [sum(column) / len(column) for column in columns],
        [max(column) for column in columns],
    )


def _label_ends(axes: Any, ends: list[tuple[float, str, str]]) -> None:
    """Write each algorithm's name beside the end of its line, moved apart where two would overlap."""
    low, high = axes.get_ylim()
    heights = _apart([y for y, *_ in sorted(ends)], gap=(high - low) / 20, top=high)
    for y, (_, algorithm, colour) in zip(heights, sorted(ends), strict=True):
        axes.text(
            1.012,
            y,
            algorithm,
            transform=axes.get_yaxis_transform(),
            color=colour,
            fontweight="bold",
            va="center_baseline",
        )


def _apart(heights: Sequence[float], *, gap: float, top: float) -> list[float]:
    """Ascending heights moved up until each is ``gap`` above the one before, then down to stay below ``top``."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + gap) if placed else height)
    for index in reversed(range(len(placed))):
        placed[index] = min(placed[index], top - gap / 2 - gap * (len(placed) - 1 - index))
    return placed


def _dress(axes: Any, records: Sequence[Record], dotted: str) -> None:
    seeds = len({record.header.seed for record in records})
    axes.set_title(records[0].header.title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=22)
    spread = f"mean of {seeds} seeds, band from the lowest to the highest" if seeds > 1 else "one seed"
    axes.text(0, 1.02, f"Test accuracy (%), {spread}{dotted}", transform=axes.transAxes, fontsize=9.5, color=INK)
    axes.set_xlabel("round", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
