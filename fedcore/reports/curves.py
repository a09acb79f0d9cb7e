"""Accuracy or test loss over rounds or uploadings: a line for each algorithm's mean, a band over its seeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from matplotlib.ticker import MaxNLocator

from fedcore.experiment.records import Record
from fedcore.reports.comparison import Comparison
from fedcore.reports.drawing import BESIDE_TEXT, frame, label_axis, look, name_ends, new_figure, room_for, save_figure
from fedcore.reports.summary import accuracies, losses

WIDTH, HEIGHT = 8.0, 4.8
AXES = {"rounds": "round", "uploadings": "uploadings (rounds × vectors that a client sends in one)"}
WIDE = 10
"""From this ratio of the largest loss to the smallest on, the axis is logarithmic."""


@dataclass(frozen=True)
class Measure:
    """One of the things that a record has a curve of.

    Attributes:
        says: what is drawn, with its unit.
        curve: its values by round.
        unit: what a value is multiplied with for the picture.
        may_be_log: whether values that lie far apart make the axis logarithmic.
    """

    says: str
    curve: Callable[[Record], Mapping[int, float]] = field(repr=False)
    unit: float = 1.0
    may_be_log: bool = False


ACCURACY = Measure("Test accuracy (%)", accuracies, unit=100)
LOSS = Measure("Test loss (mean cross entropy)", losses, may_be_log=True)


def draw_curves(
    records: Sequence[Record],
    path: Path,
    paper: Comparison | None = None,
    *,
    over: str = "rounds",
    changed: str = "",
    measure: Measure = ACCURACY,
    shifts: Sequence[int] = (),
) -> None:
    """Draw the curves of a run's records as a PNG.

    A curve ends where the first of its seeds ends, so that a mean never jumps because a seed stopped early.

    Args:
        records: of one experiment.
        path: the file.
        paper: its accuracies at the end are dotted lines.
        over: "rounds", or "uploadings" (rounds where a record of an older version does not have them).
        changed: what the experiment has otherwise than its title says.
        measure: what is drawn.
        shifts: the first rounds in which the objective is another one, as after an arrival or a departure: dashed lines
            where the curves are over rounds.
    """
    accuracy = paper.accuracy if paper and measure is ACCURACY else {}
    if any(line.uploadings is None for record in records for line in record.rounds):
        over = "rounds"
    labels = list(dict.fromkeys(record.header.algorithm for record in records))
    figure = new_figure(WIDTH, max(HEIGHT, room_for(labels) + 1.8))
    axes = figure.add_subplot()
    ends: list[tuple[float, str, str]] = []
    means: list[float] = []
    waits = False
    for algorithm in labels:
        group = [record for record in records if record.header.algorithm == algorithm]
        places, low, mean, high = band(group, over, measure)
        if not places:
            continue
        colour, style = look(group[0].header.order)
        axes.fill_between(places, low, high, color=colour, alpha=0.13, linewidth=0)
        axes.plot(places, mean, color=colour, linestyle=style, linewidth=1.8)
        stayed = {place for record in group for place in band([_stayed(record)], over, measure)[0]}
        waited = [(place, value) for place, value in zip(places, mean, strict=True) if place in stayed]
        if waited:
            axes.plot(*zip(*waited, strict=True), color=colour, linestyle="none", marker="x", markersize=5)
        waits |= bool(waited)
        ends.append((mean[-1], algorithm, colour))
        means += mean
        if algorithm in accuracy:
            axes.axhline(accuracy[algorithm], color=colour, linestyle=":", linewidth=1)
    for shift in shifts if over == "rounds" else ():
        axes.axvline(shift + 1, color="0.5", linestyle="--", linewidth=1, zorder=0)
    seeds = len({record.header.seed for record in records})
    spread = f"mean of {seeds} seeds, band from the lowest to the highest" if seeds > 1 else "one seed"
    dotted = ", dotted: the paper's" if accuracy else ""
    dotted += f" (CUT SHORT here: {paper.short})" if dotted and paper and paper.short else ""
    dashed = ", dashed: somebody came or went" if shifts and over == "rounds" else ""
    crosses = ", crosses: the model stays, waiting for clients" if waits else ""
    says = [f"{measure.says}, {spread}{dotted}{dashed}{crosses}", *([f"changed: {changed}"] if changed else [])]
    frame(axes, "\n".join(says), width=WIDTH, title=records[0].header.title)
    label_axis(axes.xaxis, AXES[over], WIDTH - 2 * BESIDE_TEXT)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.margins(x=0)
    if measure.may_be_log and 0 < WIDE * min(means, default=0.0) < max(means, default=0.0):
        axes.set_yscale("log")
    name_ends(axes, ends)
    save_figure(figure, path)


def _stayed(record: Record) -> Record:
    """The rounds of a record in which the model stayed as it was."""
    return replace(record, rounds=[line for line in record.rounds if line.awaited])


def band(
    group: Sequence[Record], over: str, measure: Measure = ACCURACY
) -> tuple[list[int], list[float], list[float], list[float]]:
    """Places on the axis (both count from 1), and the lowest, mean and highest value in the picture's unit."""
    curves = [curve for curve in map(measure.curve, group) if curve]
    shared = [round for round in curves[0] if all(round in curve for curve in curves)] if curves else []
    columns = [[measure.unit * curve[round] for curve in curves] for round in shared]
    sent = {line.round: line.uploadings or 0 for record in group for line in record.rounds}
    return (
        [sent[round] if over == "uploadings" else round + 1 for round in shared],
        [min(column) for column in columns],
        [sum(column) / len(column) for column in columns],
        [max(column) for column in columns],
    )
