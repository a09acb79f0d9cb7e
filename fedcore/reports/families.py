"""Families of presets: what several of them that vary one thing came to, drawn over it and as one table."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from types import MappingProxyType
from typing import Any

from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from fedcore.atomic_file import inside
from fedcore.experiment.records import Record
from fedcore.experiment.schema.changes import Changes, other_figures, said
from fedcore.experiment.schema.pictures import Varied
from fedcore.reports.comparison import short
from fedcore.reports.drawing import (
    BESIDE_TEXT,
    INK,
    frame,
    label_axis,
    look,
    name_ends,
    new_figure,
    room_for,
    save_figure,
    stagger,
)
from fedcore.reports.papers import ACCURACY, CROSSING, POINTS, RECOVERY, compare, figures, percents
from fedcore.reports.summary import Statistic

WIDTH, HEIGHT = 8.0, 3.9
SAYS = {
    ACCURACY: "Test accuracy (%)",
    POINTS: "Difference of accuracies (points)",
    RECOVERY: "Rounds until the accuracy is what it was",
    CROSSING: "Rounds until the first's test loss is below the second's",
}
"""The kinds of figure in the order of their panels, and what is said above each."""
WIDE = 10
"""From this ratio of the largest value to the smallest on, the axis is logarithmic."""
BESIDE = 0.008
"""The part of the axis by which lines are drawn beside each other, so that their bars can be told apart."""


@dataclass(frozen=True)
class Series:
    """One line of a picture.

    Attributes:
        label: an algorithm, or a pair of them.
        order: the algorithm's place in the comparison, or that of the pair's first.
        values: ours by what is varied, one a seed; None where a seed never comes to that.
        paper: the paper's, where it has one.
    """

    label: str
    order: int
    values: dict[float, tuple[float | None, ...]] = field(default_factory=dict)
    paper: dict[float, float] = field(default_factory=dict)

    def here(self, x: float) -> Statistic:
        """Mean and deviation over the seeds; without values where a seed has none."""
        values = [value for value in self.values.get(x, ()) if value is not None]
        return Statistic.of(values if len(values) == len(self.values.get(x, ())) else [])


@dataclass(frozen=True)
class Family:
    """Presets that differ in one thing.

    Attributes:
        title: what they have in common.
        label: what is varied.
        place: where the picture goes.
        panels: the lines of each kind of figure.
        members: their presets, by the value of what is varied, ascending.
        size: their rounds and seeds, in words.
        changed: what the presets have otherwise than their title says.
        short: of how much of a paper's rounds and seeds ours are, where that is less.
    """

    title: str
    label: str
    place: Path
    panels: dict[str, list[Series]]
    members: dict[float, str]
    size: str
    changed: str = ""
    short: str = ""

    def remarks(self) -> list[str]:
        """The remarks that are not to be overlooked."""
        remarks = [f"Changed: {self.changed}."] if self.changed else []
        return remarks + ([f"CUT SHORT beside the paper: {self.short}."] if self.short else [])

    def tables(self) -> Iterator[tuple[list[str], list[list[str]]]]:
        """Headings and rows of a table for each panel: a line for each of ours, and below it the paper's."""
        for kind, lines in self.panels.items():
            rows = []
            for line in lines:
                rows.append([line.label, *(_written(line.here(x)) for x in self.members)])
                if line.paper:
                    paper = [f"{line.paper[x]:g}" if x in line.paper else "–" for x in self.members]
                    rows.append([f"{line.label}, the paper", *paper])
            yield [f"{SAYS[kind]} over {self.label}", *(f"{x:g}" for x in self.members)], rows


def families(
    presets: Iterable[tuple[str, Varied | None, Sequence[Record]]],
    folder: Path,
    changes: Mapping[str, Changes] = MappingProxyType({}),
) -> list[Family]:
    """The families that have at least two members.

    Trials that are not complete are left out, and presets without any other.

    Args:
        presets: name, what it varies, and its records.
        folder: of the sweep.
        changes: what a preset's experiment has otherwise than the preset, where it has.
    """
    found: dict[tuple[str, str], dict[float, tuple[str, Varied, list[Record]]]] = {}
    for preset, varied, records in presets:
        whole = [record for record in records if record.is_complete]
        if varied and whole:
            found.setdefault((varied.family, varied.label), {})[varied.value] = preset, varied, whole
    several = [dict(sorted(members.items())) for members in found.values() if len(members) > 1]
    return [_family(members, folder, changes) for members in several]


def draw_family(family: Family) -> None:
    """Draw a family as a PNG, a panel for each kind of figure.

    Means over the seeds, bars from the lowest to the highest; the paper's figures as hollow diamonds.
    """
    longest = max(room_for(line.label for line in lines) for lines in family.panels.values())
    figure = new_figure(WIDTH, max(HEIGHT, longest + 1.0) * len(family.panels) + 0.6)
    panels = figure.subplots(len(family.panels), 1, sharex=True, squeeze=False)[:, 0]
    xs = list(family.members)
    log = xs[0] > 0 and xs[-1] >= WIDE * xs[0]
    legend = "\n".join([_legend(family), *([f"changed: {family.changed}"] if family.changed else [])])
    figure.set_layout_engine("constrained", h_pad=0.12)  # between a panel and the one below
    ends_of = []
    for number, (axes, (kind, lines)) in enumerate(zip(panels, family.panels.items(), strict=True)):
        axes.set_xscale("log" if log else "linear")
        ends = []
        for order, line in enumerate(lines):
            part = BESIDE * (order - (len(lines) - 1) / 2)
            beside = [x * (xs[-1] / xs[0]) ** part if log else x + part * (xs[-1] - xs[0]) for x in xs]
            ends.append(_draw(axes, line, dict(zip(xs, beside, strict=True))))
        if kind in (RECOVERY, CROSSING):
            axes.set_ylim(bottom=0)
        elif kind == POINTS:
            axes.axhline(0, color=INK, linewidth=0.8)
        says = SAYS[kind] if number else f"{SAYS[kind]}\n{legend}"
        frame(axes, says, width=WIDTH, title="" if number else family.title)
        ends_of.append(ends)
    panels[-1].xaxis.set_major_locator(FixedLocator(xs))
    panels[-1].xaxis.set_minor_locator(NullLocator())
    panels[-1].xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    label_axis(panels[-1].xaxis, family.label, WIDTH - 2 * BESIDE_TEXT)
    stagger(panels[-1], (name for ends in ends_of for _, name, _ in ends))
    for axes, ends in zip(panels, ends_of, strict=True):
        name_ends(axes, ends)
    save_figure(figure, family.place)


def _family(
    members: Mapping[float, tuple[str, Varied, list[Record]]], folder: Path, changes: Mapping[str, Changes]
) -> Family:
    papers = {
        preset: paper
        for preset, _, _ in members.values()
        if (paper := figures(preset)) and not other_figures(changes.get(preset, ()))
    }
    panels: dict[str, dict[str, Series]] = {kind: {} for kind in SAYS}
    for x, (preset, _, records) in members.items():
        paper = papers.get(preset)
        orders = {record.header.algorithm: record.header.order for record in records}
        for label, order in orders.items():
            series = panels[ACCURACY].setdefault(label, Series(label, order))
            series.values[x] = percents(records, label)
        for line in compare(records, paper) if paper else []:
            if line.kind != ACCURACY and line.values:
                order = orders[line.label.partition(" - ")[0]]
                series = panels[line.kind].setdefault(line.label, Series(line.label, order))
                series.values[x] = line.values
    for x, (preset, _, _) in members.items():
        if paper := papers.get(preset):
            printed = {ACCURACY: paper.accuracy, POINTS: paper.gain}
            printed |= {RECOVERY: paper.recovery, CROSSING: paper.crossing}
            for kind, lines in panels.items():
                for label in lines.keys() & printed[kind].keys():
                    lines[label].paper[x] = printed[kind][label]
    preset, varied, _ = next(iter(members.values()))
    slug = re.sub(r"[^\w.]+", "-", varied.label).strip("-")
    return Family(
        title=varied.title,
        label=varied.label,
        place=inside(folder, folder / preset).parent / f"{Path(varied.family).name}-over-{slug}.png",
        panels={kind: list(lines.values()) for kind, lines in panels.items() if lines},
        members={x: preset for x, (preset, _, _) in members.items()},
        size=_size([records for _, _, records in members.values()]),
        changed=said(change for preset, _, _ in members.values() for change in changes.get(preset, ())),
        short=_each_once(
            short(records, papers[preset], changes.get(preset, ()))
            for preset, _, records in members.values()
            if preset in papers
        ),
    )


def _draw(axes: Any, line: Series, xs: Mapping[float, float]) -> tuple[float, str, str]:
    """Draw one line at the places of its x, and return its end for ``name_ends``."""
    colour, style = look(line.order)
    means = [line.here(x).mean for x in xs]
    drawn = [nan if mean is None else mean for mean in means]
    seeds = [[value for value in line.values.get(x, ()) if value is not None] for x in xs]
    spans = [
        (0.0, 0.0) if mean is None else (mean - min(own), max(own) - mean)
        for mean, own in zip(means, seeds, strict=True)
    ]
    axes.errorbar(
        list(xs.values()),
        drawn,
        yerr=list(zip(*spans, strict=True)),
        color=colour,
        linestyle=style,
        linewidth=1.8,
        elinewidth=1,
        capsize=2.5,
        marker="o",
        markersize=4,
    )
    if line.paper:
        axes.plot(
            [xs[x] for x in line.paper],
            list(line.paper.values()),
            color=colour,
            linestyle=":",
            linewidth=1,
            marker="D",
            markersize=6,
            markerfacecolor="white",
        )
    known = [mean for mean in means if mean is not None] or [*line.paper.values()]
    return known[-1], line.label, colour


def _size(members: Sequence[Sequence[Record]]) -> str:
    """``60 rounds, 2 to 3 seeds``; rounds member by member where they differ, since then they are half of the story."""
    rounds = [records[0].header.rounds for records in members]
    seeds = sorted({len({record.header.seed for record in records}) for records in members})
    said = " / ".join(map(str, rounds if len(set(rounds)) > 1 else rounds[:1]))
    many = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
    return f"{said} rounds, {many} seed{'s' if seeds[-1] > 1 else ''}"


def _each_once(texts: Iterable[str]) -> str:
    return " / ".join(dict.fromkeys(text for text in texts if text))


def _legend(family: Family) -> str:
    """The line below the title, for all panels."""
    lines = [line for lines in family.panels.values() for line in lines]
    counts = [values for line in lines for values in line.values.values()]
    words = [family.size]
    words += [f"CUT SHORT beside the paper: {family.short}"] if family.short else []
    words += ["means, bars from the lowest seed to the highest"] if max(map(len, counts)) > 1 else []
    words += ["diamonds: the paper's"] if any(line.paper for line in lines) else []
    words += ["no mean where a seed never gets there"] if any(None in values for values in counts) else []
    return "; ".join(words)


def _written(statistic: Statistic) -> str:
    if statistic.mean is None:
        return "–"
    return f"{statistic.mean:.1f}" + ("" if statistic.deviation is None else f" ± {statistic.deviation:.1f}")
