"""The report of a run: plots, tables for the terminal, Markdown, LaTeX and CSV, and a page of HTML."""

import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from html import escape
from importlib import resources
from io import BytesIO
from pathlib import Path
from statistics import fmean
from textwrap import fill
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context, rc_params_from_file
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator, StrMethodFormatter
from pandas import DataFrame, Series, concat, option_context
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fedcore.arrays import I64
from fedcore.errors import MissingDataError
from fedcore.files import read_text, replacing, write_text
from fedcore.sim.experiment import config as presets
from fedcore.sim.experiment.changes import Changes, inherited_text, of_tables, text_of
from fedcore.sim.experiment.results import CONFIG, Record, parse_tables, read_folder
from fedcore.sim.experiment.schema import Pictures, ReportSettings
from fedcore.sim.reports import statistics as stats
from fedcore.sim.reports.statistics import ACCURACY, CROSSING, POINTS, RECOVERY, Comparison, Summary, by_algorithm

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")
"""Okabe and Ito's colour-blind-safe palette. Line styles also distinguish the two blues and the two oranges."""
STYLES = ("solid", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.2, 1.5)))
INK = "#333333"
TITLE, NOTE, NAME = 12, 9.5, 10
"""The font sizes of titles, of notes below them, and of the names of axes and curves, in points."""
STYLE = rc_params_from_file(Path(__file__).with_name("report.mplstyle"), use_default_template=False)
METADATA: dict[str, dict[str, None]] = {
    "pdf": {"CreationDate": None},
    "svg": dict.fromkeys(("Creator", "Date", "Format", "Type")),
}
BANDS = {
    "range": "band from the lowest to the highest",
    "se": "band: standard error of the mean",
    "95%": "band: 95 % interval of the mean",
}
WIDTH, HEIGHT = 8.0, 4.8
WIDE = 10
"""The least ratio of an axis's largest to its smallest value that makes the axis logarithmic."""
AXES = {"rounds": "round", "uploadings": "uploads (rounds × vectors per round)", "seconds": "virtual seconds"}
MEASURES = {
    "accuracy": ("Test accuracy (%)", stats.accuracies, 100.0),
    "loss": ("Test loss (mean cross entropy)", stats.losses, 1.0),
}
KINDS = {
    ACCURACY: "Test accuracy (%)",
    POINTS: "Difference of accuracies (points)",
    RECOVERY: "Rounds until the accuracy is what it was",
    CROSSING: "Rounds until the first's test loss is below the second's",
}
"""The panel title of each kind of figure, in the order of the panels."""
BARS, NO_BAR = "▁▂▃▄▅▆▇█", "·"


@dataclass(frozen=True)
class Drawing:
    """How a plot of curves is drawn.

    Attributes:
        settings: the kind of the band, and the number of rounds over which curves are smoothed.
        over: the x axis, "rounds", "uploadings" or "seconds"; records of older versions have only rounds. On the
            virtual clock, a round is at its mean time over the seeds.
        changed: the experiment's changes to its preset.
        measure: "accuracy" or "loss".
        shifts: the rounds in which the objective changes, drawn as dashed lines on an axis of rounds.
    """

    settings: ReportSettings = ReportSettings()  # noqa: RUF009  # a frozen value
    over: str = "rounds"
    changed: str = ""
    measure: str = "accuracy"
    shifts: Sequence[int] = ()


DRAWING = Drawing()


class Picture(Figure):
    """A figure that notebooks show."""

    def _repr_png_(self) -> bytes:
        return _saved(self, "png")


def draw_curves(records: Sequence[Record], path: Path, paper: Comparison | None = None, **options: Any) -> str:
    """Write a plot of curves as PNG, in the formats of the settings and in those of an older plot; return it as SVG.

    See ``Drawing``.
    """
    drawing = Drawing(**options)
    figure = curves(records, paper, drawing)
    for place in map(path.with_suffix, (".png", ".pdf", ".svg")):
        if place.suffix[1:] in ("png", *drawing.settings.formats) or place.exists():
            _save(figure, place)
    return _saved(figure, "svg").decode()


def curves(records: Sequence[Record], paper: Comparison | None = None, drawing: Drawing = DRAWING) -> Picture:
    """Return a figure with a line for the mean of each algorithm and a band over its seeds.

    A curve ends with its shortest seed, so that the mean does not jump when a seed stops early. It has no point where a
    seed's loss is infinite. In SVG, the parts of curve i have ids that begin with ``curve-i-``; those of its entry in
    the legend end with ``-key``.

    Args:
        records: the records of one experiment.
        paper: a comparison whose final accuracies are drawn as dotted lines.
        drawing: how the curves are drawn.
    """
    settings, over, measure, changed = drawing.settings, drawing.over, drawing.measure, drawing.changed
    accuracy = paper.accuracy if paper and measure == "accuracy" else {}
    needed = {"uploadings": "uploadings", "seconds": "clock"}.get(over, "round")
    if any(getattr(line, needed) is None for record in records for line in record.rounds):
        over = "rounds"
    shifts = drawing.shifts if over == "rounds" else ()
    groups, means, waits = by_algorithm(records), [], False
    names = [_name(label) for label in groups]
    with rc_context(STYLE):
        figure = _figure(WIDTH, max(HEIGHT, _height(names) + 1.8))
        axes = figure.add_subplot()
        for number, (name, (label, group)) in enumerate(zip(names, groups.items(), strict=True)):
            curve = band(group, over, measure, settings)
            if curve.empty:
                continue
            colour, style = look(group[0].header.order)
            part = f"curve-{number}"
            shade: dict[str, Any] = {"color": colour, "alpha": 0.13, "linewidth": 0, "gid": f"{part}-band"}
            axes.fill_between(curve.index, curve["low"], curve["high"], **shade)
            axes.plot(curve["mean"], color=colour, linestyle=style, label=name, gid=f"{part}-line")
            at = _positions(group, over)
            waited = curve[curve.index.isin({at[line.round] for one in group for line in one.rounds if line.pending})]
            if len(waited):
                waits = True
                axes.plot(waited["mean"], "x", color=colour, markersize=5, gid=f"{part}-waits")
            means += list(curve["mean"])
            if label in accuracy:
                axes.axhline(accuracy[label], color=colour, linestyle=":", linewidth=1, gid=f"{part}-paper")
        for shift in shifts:
            axes.axvline(shift + 1, color="0.5", linestyle="--", linewidth=1, zorder=0)
        seeds = len({record.header.seed for record in records})
        notes = [f"mean of {seeds} seeds, {BANDS[settings.band]}" if seeds > 1 else "one seed"]
        notes += [f"smoothed over {settings.smooth} evaluated rounds"] if settings.smooth > 1 else []
        if accuracy:
            notes.append("dotted: the paper's" + (f" (CUT SHORT here: {paper.short})" if paper and paper.short else ""))
        notes += ["dashed: clients arrived or departed"] if shifts else []
        notes += ["crosses: the model stays, waiting for clients"] if waits else []
        diverged = any(np.inf in MEASURES[measure][1](record).values() for record in records)
        notes += ["no point where a seed's loss is infinite"] if diverged else []
        below = [", ".join([MEASURES[measure][0], *notes]), *([f"changed: {changed}"] if changed else [])]
        _head(figure, axes, records[0].header.title, "\n".join(below))
        axes.set_xlabel(AXES[over])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.margins(x=0)
        if measure == "loss" and 0 < WIDE * min(means, default=0.0) < max(means, default=0.0):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        _legend(axes)
        return figure


def band(
    group: Sequence[Record], over: str, measure: str = "accuracy", settings: ReportSettings = DRAWING.settings
) -> DataFrame:
    """Return the mean and the ends of the band in the plot's unit, by the x position; rounds count from 1."""
    _, curve_of, unit = MEASURES[measure]
    found = [Series(curve) for curve in map(curve_of, group) if curve]
    if not found:
        return DataFrame(columns=["low", "mean", "high"], dtype=float)
    table = unit * concat(found, axis=1, join="inner").replace(np.inf, np.nan).dropna()
    table = table.rolling(settings.smooth, center=True, min_periods=1).mean()
    mean = table.mean(axis=1)
    if settings.band == "range" or len(found) == 1:
        low, high = table.min(axis=1), table.max(axis=1)
    else:
        half = table.std(axis=1) / len(found) ** 0.5
        half *= 1 if settings.band == "se" else stats.students_t(len(found))
        ends = mean - half, mean + half  # a symmetric interval may leave the possible range
        low, high = (end.clip(0, unit if measure == "accuracy" else None) for end in ends)
    values = DataFrame({"low": low, "mean": mean, "high": high})
    at = _positions(group, over)
    values.index = [at[round] for round in values.index]
    return values


def _positions(group: Sequence[Record], over: str) -> dict[int, float]:
    """Return the x position of each round; seconds are the mean over the records."""
    lines = [line for record in group for line in record.rounds]
    if over == "seconds":
        times: dict[int, list[float]] = {}
        for line in lines:
            times.setdefault(line.round, []).append(line.clock or 0.0)
        return {round: fmean(found) for round, found in times.items()}
    return {line.round: line.uploadings or 0 if over == "uploadings" else line.round + 1 for line in lines}


def draw_family(path: Path, title: str, notes: str, label: str, figures: DataFrame) -> None:
    """Write a PNG of a family's results over the varied value, with a panel per kind of figure.

    Lines are means over the seeds, bars are the range of the seeds, and diamonds are the paper's figures. ``figures``
    is the table ``sweeps.Family.figures``, and ``label`` the name of the x axis.
    """
    xs = sorted(figures["x"].unique())
    log = xs[0] > 0 and xs[-1] >= WIDE * xs[0]
    panels = {kind: list(lines.groupby("label", sort=False)) for kind, lines in figures.groupby("kind")}
    tallest = max(_height(_name(name) for name, _ in lines) for lines in panels.values())
    with _drawn(path, WIDTH, max(3.9, tallest + 1) * len(panels) + 0.6) as figure:
        rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (kind, lines) in zip(rows, panels.items(), strict=True):
            for number, (name, line) in enumerate(lines):
                shift = 0.008 * (number - (len(lines) - 1) / 2)  # a share of the axis, so that bars do not overlap
                positions = line["x"] * (xs[-1] / xs[0]) ** shift if log else line["x"] + shift * (xs[-1] - xs[0])
                colour, style = look(line["order"].iloc[0])
                bars = [line["mean"] - line["low"], line["high"] - line["mean"]]
                options = {"marker": "o", "markersize": 4, "capsize": 2.5, "elinewidth": 1, "label": _name(name)}
                axes.errorbar(positions, line["mean"], bars, color=colour, linestyle=style, **options)
                printed = line["paper"].notna()
                if printed.any():
                    hollow = {"markersize": 6, "markerfacecolor": "white", "linewidth": 1}
                    axes.plot(positions[printed], line["paper"][printed], "D:", color=colour, **hollow)
            if kind in (RECOVERY, CROSSING):
                axes.set_ylim(bottom=0)
            elif kind == POINTS:
                axes.axhline(0, color=INK, linewidth=0.8)
            first = axes is rows[0]
            _head(figure, axes, title if first else "", f"{KINDS[kind]}\n{notes}" if first else KINDS[kind])
            _legend(axes)
        rows[-1].set_xscale("log" if log else "linear")
        rows[-1].set_xlabel(_wrapped(label, WIDTH - 2.6, NAME))
        rows[-1].xaxis.set_major_locator(FixedLocator(_spaced(xs, log)))
        rows[-1].xaxis.set_minor_locator(NullLocator())
        rows[-1].xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def draw_holdings(counts: I64, path: Path, *, title: str) -> None:
    """Write a PNG of the clients' examples: a bar chart of sizes above a heat map of clients x classes.

    ``counts`` is int64[N, C], the examples of each class at each client.
    """
    clients, classes = counts.shape
    width, height = min(max(6.0, 3 + 0.1 * clients), 14.0), min(max(4.2, 2.4 + 0.2 * classes), 14.0)
    with _drawn(path, width, height) as figure:
        bars, heat = figure.subplots(2, 1, sharex=True, height_ratios=[1, max(2.0, 0.18 * classes)])
        _head(figure, bars, title, _holdings_summary(counts).replace(": ", "\n"))
        bars.bar(np.arange(clients), counts.sum(axis=1), color=COLOURS[0], width=0.8)
        bars.set_ylabel("examples")
        bars.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        bars.grid(visible=False)
        heat.grid(visible=False)
        # The square root makes small counts visible next to large counts; only zero is white.
        blues = ListedColormap(colormaps["Blues"](np.linspace(0.2, 1, 256)))
        root = PowerNorm(0.5, 0, max(counts.max(), 1))
        shades = heat.imshow(np.ma.masked_equal(counts.T, 0), aspect="auto", cmap=blues, norm=root)
        heat.set_xlabel("client")
        heat.set_ylabel("class")
        for axis in (heat.xaxis, heat.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        bar = figure.colorbar(shades, ax=heat, pad=0.01, aspect=30, label="examples of the class")
        bar.outline.set_visible(False)


def holdings_table(counts: I64, *, title: str, most: int | None = None, names: Sequence[str] | None = None) -> Group:
    """Return a terminal table of the clients' examples, with a line per client and a bar per class.

    ``counts`` is int64[N, C]. The table has at most ``most`` clients; None means all. ``names`` are the clients' names.
    """
    classes = counts.shape[1]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("client", "examples", "classes"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("".join(map(str, range(classes))) if classes <= 10 else f"0 .. {classes - 1}", overflow="fold")
    for client, row in enumerate(counts[:most]):
        highest = max(int(row.max()), 1)
        bars = [BARS[(count * len(BARS) - 1) // highest] if count else NO_BAR for count in row.tolist()]
        label = str(client) if names is None else f"{client}: {names[client]}"
        table.add_row(Text(label), f"{row.sum():,}", str(np.count_nonzero(row)), "".join(bars))
    below = [f"{_holdings_summary(counts)}. A bar is as high as its share of the client's most frequent class."]
    if most is not None and len(counts) > most:
        below.insert(0, f"... and {len(counts) - most} more clients")
    return Group(Text(title, style="bold"), table, *(Text(line, style="dim") for line in below))


def look(order: int) -> tuple[str, Any]:
    """Return the colour and line style of the algorithm at a position of the comparison."""
    return COLOURS[order % len(COLOURS)], STYLES[order % len(STYLES)]


def _figure(width: float, height: float) -> Picture:
    """Return an empty figure of this size in inches."""
    figure = Picture(figsize=(width, height))
    FigureCanvasAgg(figure)  # this canvas draws without a display
    return figure


@contextmanager
def _drawn(path: Path, width: float, height: float) -> Iterator[Figure]:
    """Yield an empty figure of this size in inches, then save it in the format of the path's suffix."""
    with rc_context(STYLE):
        figure = _figure(width, height)
        yield figure
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    with replacing(path, "wb") as file:
        file.write(_saved(figure, path.suffix[1:]))


def _saved(figure: Figure, suffix: str) -> bytes:
    """Return a figure in a format. Equal figures have equal bytes."""
    file = BytesIO()
    with rc_context(STYLE):
        figure.savefig(file, format=suffix, metadata=METADATA.get(suffix))
    figure.set_layout_engine("none")  # the layout is final; computing it is most of the time
    return file.getvalue()


def _head(figure: Figure, axes: Any, title: str, notes: str) -> None:
    width = figure.get_figwidth()
    if title:
        figure.suptitle(_wrapped(title, width - 0.3, TITLE), x=0.01, ha="left", fontsize=TITLE, fontweight="bold")
    axes.set_title(_wrapped(notes, width - 1, NOTE))


def _legend(axes: Any) -> None:
    curves, names = axes.get_legend_handles_labels()
    if curves:
        place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1), "borderaxespad": 0}
        legend = axes.legend(curves, names, handlelength=2.6, **place)
        for curve, handle, text in zip(curves, legend.legend_handles, legend.get_texts(), strict=True):
            if curve_id := getattr(curve, "get_gid", lambda: None)():
                prefix = curve_id.removesuffix("line")
                handle.set_gid(f"{prefix}handle-key")
                text.set_gid(f"{prefix}text-key")


def _wrapped(text: str, inches: float, size: float) -> str:
    """Wrap a text to a width in inches, assuming letters of average width."""
    columns = int(inches * 72 / (0.66 * size))
    return "\n".join(fill(line, columns) for line in text.split("\n"))


def _name(label: str) -> str:
    """Return a label for the legend; matplotlib skips labels that begin with an underscore."""
    return _wrapped(f" {label}" if label.startswith("_") else label, 2.6, NAME)


def _height(names: Iterable[str]) -> float:
    return sum(0.05 + 0.18 * (name.count("\n") + 1) for name in names)


def _spaced(xs: Sequence[float], log: bool) -> list[float]:
    """Return the values whose labels fit next to each other on the axis."""
    positions = np.log(xs) if log else np.asarray(xs, float)
    positions = (positions - positions[0]) / (positions[-1] - positions[0])
    kept = [0]
    for number, position in enumerate(positions):
        if position - positions[kept[-1]] > 0.08:
            kept.append(number)
    return [xs[number] for number in kept]


def _holdings_summary(counts: I64) -> str:
    """Return a text such as ``60,000 examples at 30 clients: 2,000 each, 2 of 10 classes each``."""
    sizes, held = counts.sum(axis=1), np.count_nonzero(counts, axis=1)
    each = f"{sizes.min():,} to {sizes.max():,} each (median {np.median(sizes):,.0f})"
    if sizes.min() == sizes.max():
        each = f"{sizes.min():,} each"
    kinds = f"{held.min()} to {held.max()}" if held.min() < held.max() else f"{held.min()}"
    return f"{sizes.sum():,} examples at {len(counts)} clients: {each}, {kinds} of {counts.shape[1]} classes each"


FILES = ("table.md", "table.csv", "table.tex", "curves.png", "loss.png", "report.html")
ESSENTIAL = 5
"""The number of columns that fit into a terminal 80 characters wide."""
_FOLDER = resources.files("fedcore.sim.reports")
CSS, SCRIPT = ((_FOLDER / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
TOGGLES = "Click a name in a plot's legend to hide or show its curve."


class Bold(str):
    """A bold table cell."""

    __slots__ = ()


class Document:
    """A report as Markdown and as a self-contained HTML page; all texts are escaped."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._markdown, self._html = [f"# {escaped(title)}"], [f"<h1>{escape(title)}</h1>"]

    def heading(self, text: str) -> None:
        """Add a heading."""
        self._add(f"## {escaped(text)}", f"<h2>{escape(text)}</h2>")

    def paragraph(self, text: str, kind: str = "") -> None:
        """Add a paragraph: plain, "faint" (grey) or a "remark" (a warning)."""
        plain = escaped(text)
        tag = f"<p class={kind}>" if kind else "<p>"
        self._add(f"**{plain}**" if kind == "remark" else plain, f"{tag}{escape(text)}</p>")

    def origin(self, summary: Summary) -> None:
        """Add a run's changes to its preset, and what its file has from one."""
        if summary.changed:
            self.paragraph(f"Changed: {summary.changed}.", "remark")
        if summary.inherited:
            self.paragraph(f"{summary.inherited[0].upper()}{summary.inherited[1:]}.", "faint")

    def table(self, table: DataFrame) -> None:
        """Add a table."""
        self._add(markdown_table(table), html_table(table))

    def notes(self, notes: Sequence[str]) -> None:
        """Add a list of notes."""
        if notes:
            items = "\n".join(f"- {escaped(note)}" for note in notes)
            self._add(items, "\n".join(f"<p class=faint>{escape(note)}</p>" for note in notes))

    def picture(self, path: Path, text: str) -> None:
        """Add a PNG to the page, with an alternative text."""
        data = b64encode(path.read_bytes()).decode("ascii")
        self._html.append(f'<img alt="{escape(text)}" src="data:image/png;base64,{data}">')

    def pictures(self, drawings: Mapping[str, str], title: str) -> None:
        """Add a run's plots to the page, as SVG by description."""
        plots = [
            f'<div role="img" aria-label="{escape(f"{title}: {what}")}">{svg[svg.index("<svg") :]}</div>'
            for what, svg in drawings.items()
        ]
        self._html.append(f'<div class="pictures">{"".join(plots)}</div><p class=faint>{TOGGLES}</p>')

    def source(self, title: str, text: str) -> None:
        """Add preformatted text, such as a configuration, to the page. It is folded."""
        self._html.append(f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>")

    def comparison(self, paper: Comparison | None) -> None:
        """Add the comparison with a paper, or the reason why it is missing."""
        if paper:
            if paper.lines:
                self.table(paper.table())
            self.paragraph(paper.remark(), "remark" if paper.is_warning else "faint")

    def markdown(self) -> str:
        """Return the report as Markdown."""
        return "\n\n".join(self._markdown) + "\n"

    def html(self) -> str:
        """Return the HTML page."""
        head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        head += f"<title>{escape(self._title)}</title><style>{CSS}</style><script>{SCRIPT}</script>"
        body = "\n".join(self._html)
        return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'

    def _add(self, markdown: str, html: str) -> None:
        self._markdown.append(markdown)
        self._html.append(html)


@dataclass(frozen=True)
class Config:
    """The parts of a run's ``config.json`` that the reports use.

    ``text`` is empty if the file is missing, and ``changes`` if an older version wrote it. ``shifts`` are the rounds in
    which clients arrive or depart, ascending. ``note`` is shown below the table, and
    ``inherited`` below the title.
    """

    text: str
    pictures: Pictures
    changes: Changes
    shifts: tuple[int, ...]
    report: ReportSettings
    note: str = ""
    inherited: str = ""

    @classmethod
    def parse(cls, preset: str, text: str) -> "Config":
        """Parse a configuration; raise MissingDataError if it is damaged."""
        try:
            tables = parse_tables(text or "{}")
            pictures = tables.get("pictures")
            if pictures is None and preset in presets.names():  # older versions did not write this table
                pictures = presets.read(preset).get("pictures")
            shifts: set[int] = set()
            pattern = tables.get("participation")
            while isinstance(pattern, dict):
                for moves in (pattern.get("arrivals"), pattern.get("departures")):
                    shifts |= {t for t in moves.values() if isinstance(t, int)} if isinstance(moves, dict) else set()
                pattern = pattern.get("among")
            read = Pictures.model_validate({} if pictures is None else pictures), of_tables(tables)
            settings = ReportSettings.model_validate(tables.get("report", {}))
            notes = str(tables.get("note", "")), inherited_text(tables)
            if share := tables.get("validation"):
                about = f"evaluated not on the test set, but on {100 * share:g} % of each client's training examples"
                notes = "; ".join(filter(None, (notes[0], about))), notes[1]
            return cls(text, *read, tuple(sorted(shifts - {0})), settings, *notes)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise MissingDataError(f"{preset}: its {CONFIG} is damaged: {error}") from None


@dataclass(frozen=True)
class Report:
    """The written report of a run.

    Attributes:
        summary: the statistics.
        files: the written files; the last file is the HTML page.
        drawings: the plots as SVG, by their descriptions.
        paper: the comparison with a paper, or None.
    """

    summary: Summary
    files: tuple[Path, ...]
    drawings: Mapping[str, str]
    paper: Comparison | None = None

    @property
    def page(self) -> Path:
        """The HTML page."""
        return self.files[-1]

    @property
    def has_accuracies(self) -> bool:
        """Whether the comparison with the paper includes this run's accuracies."""
        return self.paper is not None and any(line.kind == ACCURACY for line in self.paper.lines)


def write_report(folder: Path, **settings: Any) -> Report:
    """Write the report of a complete or incomplete run into its folder.

    Args:
        folder: the folder of the run.
        settings: ``window``, ``formats``, ``band`` or ``smooth``, instead of the configuration's ``report``.

    Raises:
        MissingDataError: the folder has no records, or a record is damaged.
    """
    records, config = read_run(folder, settings)
    return report_on(records, folder, config)


def read_run(folder: Path, settings: Mapping[str, Any] = MappingProxyType({})) -> tuple[list[Record], Config]:
    """Return the records of a run, with its window, and its configuration with other settings of the report."""
    path = folder / CONFIG
    text = read_text(path) if path.exists() else ""
    records = read_folder(folder)
    config = Config.parse(records[0].header.preset, text)
    config = replace(config, report=ReportSettings.model_validate(config.report.model_dump() | dict(settings)))
    return [replace(record, window=config.report.window) for record in records], config


def report_on(records: Sequence[Record], folder: Path, config: Config, notes: Sequence[str] = ()) -> Report:
    """Write the report of one experiment's records into a folder; ``notes`` precede the notes on the records."""
    paper = stats.comparison(records, config.changes)
    notes = [*filter(None, [config.note]), *notes]
    summary = stats.summarise(records, text_of(config.changes), notes, config.inherited)
    markdown, table, tex, curves, loss, html = (folder / name for name in FILES)
    write_text(table, stats.summary_csv(summary))
    write_text(tex, tex_table(_with_best(summary)))
    options: dict[str, Any] = {"over": config.pictures.over, "shifts": config.shifts}
    # The note of a run with the best points of a sweep stands for its changes.
    options |= {"settings": config.report, "changed": "" if config.note else summary.changed}
    drawings, plots = {"test accuracy": draw_curves(records, curves, paper, **options)}, [curves]
    if any(loss < np.inf for record in records for loss in stats.losses(record).values()):
        drawings["test loss"] = draw_curves(records, loss, measure="loss", **options)
        plots.append(loss)
    plots += [plot.with_suffix(f".{suffix}") for plot in plots for suffix in config.report.formats]
    report = Report(summary, (markdown, table, tex, *plots, html), drawings, paper)
    document = Document(summary.title)
    document.origin(summary)
    document.pictures(drawings, summary.title)
    document.table(stats.summary_table(summary))
    document.paragraph(stats.legend(summary), "faint")
    document.notes(summary.notes)
    if paper:
        document.heading("The paper")
        document.comparison(paper)
    if len(summary.rows) > 1:
        document.heading("Differences")
        document.table(stats.difference_table(records))
    document.heading("Cost")
    document.table(stats.cost_table(records))
    document.paragraph(stats.COST_NOTE, "faint")
    write_text(markdown, document.markdown())
    if config.text:
        document.source("Configuration", config.text)
    write_text(html, document.html())
    return report


def terminal_table(table: DataFrame, bold: Sequence[bool] = (), *, right: bool = True) -> Table:
    """Return a table for a terminal; ``bold`` has one value per row, ``right`` aligns all columns after the first."""
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(table.columns):
        shown.add_column(Text(heading), justify="right" if index and right else "left", no_wrap=right)
    styles = ["bold" if one else None for one in bold or [False] * len(table)]
    for cells, style in zip(table.itertuples(index=False, name=None), styles, strict=True):
        shown.add_row(*map(Text, cells), style=style)  # Text, since labels may look like markup
    return shown


def summary_for_terminal(summary: Summary) -> Table:
    """Return the first columns of the summary, with the best accuracy in bold."""
    return terminal_table(stats.summary_table(summary).iloc[:, :ESSENTIAL], _are_best(summary))


def _are_best(summary: Summary) -> list[bool]:
    """Return for each row whether it has the best accuracy."""
    means = [row.final.mean for row in summary.rows]
    best = max((mean for mean in means if mean is not None), default=None)
    return [best is not None and mean == best for mean in means]


def _with_best(summary: Summary) -> DataFrame:
    """Return the summary's table with the best accuracy in bold."""
    table = stats.summary_table(summary)
    cells = zip(table.iloc[:, 1], _are_best(summary), strict=True)
    table.iloc[:, 1] = [Bold(cell) if best else cell for cell, best in cells]
    return table


def tex_table(table: DataFrame) -> str:
    """Return a table for LaTeX with the package booktabs, with a left-aligned first column.

    >>> print(tex_table(DataFrame({"a_b": ["50 %"], "c": [Bold("1.5 ± 0.1")]}, dtype=object)), end="")
    \\begin{tabular}{lr}
    \\toprule
    a\\_b & c \\\\
    \\midrule
    50 \\% & \\textbf{1.5 $\\pm$ 0.1} \\\\
    \\bottomrule
    \\end{tabular}
    """

    def line(cells: Iterable[str]) -> str:
        texts = [(cell.translate(_TEX), isinstance(cell, Bold)) for cell in cells]
        return " & ".join(rf"\textbf{{{text}}}" if bold else text for text, bold in texts) + r" \\"

    rows = map(line, table.itertuples(index=False, name=None))
    head = [rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}", r"\toprule", line(table.columns), r"\midrule"]
    return "\n".join([*head, *rows, r"\bottomrule", r"\end{tabular}", ""])


_TEX = str.maketrans(
    {char: rf"\{char}" for char in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"±": r"$\pm$", stats.NONE: "--", "<": "$<$", ">": "$>$", "\n": " "}
)


def markdown_table(table: DataFrame) -> str:
    """Return a table as Markdown, with a left-aligned first column.

    >>> print(markdown_table(DataFrame({"a": ["x|y"], "b": [Bold("1")]}, dtype=object)))
    | a | b |
    | --- | ---: |
    | x\\|y | **1** |
    """

    def line(cells: Iterable[str]) -> str:
        texts = [(escaped(cell).replace("|", r"\|"), isinstance(cell, Bold)) for cell in cells]
        return f"| {' | '.join(f'**{text}**' if bold else text for text, bold in texts)} |"

    rule = f"| {' | '.join(['---'] + ['---:'] * (len(table.columns) - 1))} |"
    return "\n".join([line(table.columns), rule, *map(line, table.itertuples(index=False, name=None))])


def html_table(table: DataFrame) -> str:
    """Return a table as HTML."""
    marked = table.map(lambda cell: f"<b>{escape(cell)}</b>" if isinstance(cell, Bold) else escape(cell))
    marked.columns = [escape(heading) for heading in table.columns]
    with option_context("display.max_colwidth", None):
        return str(marked.to_html(index=False, escape=False, border=0))


_MARKS = re.compile(
    r"[\\`*\[\]~$]"  # code, emphasis, links, pictures, formulas
    r"|(?<![^\W_])_|_(?![^\W_])"  # emphasis, except within a word
    r"|:(?=//)|(?<=mailto):|(?<=xmpp):|(?<=www)\.|@"  # addresses, which some viewers turn into links
    r"|^[#>]|#$|^[-+=:](?=[-+=:\s]|$)",  # headings, quotations, lists and rules, at the start; the end of a heading
    re.IGNORECASE,
)
_NUMBERED = re.compile(r"^(\d+)([.)])(?=\s|$)")


def escaped(text: str) -> str:
    """Escape a text for one line of Markdown, so that it contains no HTML, link, picture or emphasis.

    >>> escaped("a < b\\n![c](https://d) max_norm *e*")
    'a &lt; b !\\\\[c\\\\](https\\\\://d) max_norm \\\\*e\\\\*'
    """
    plain = _NUMBERED.sub(r"\1\\\2", _MARKS.sub(r"\\\g<0>", " ".join(text.split())))
    return plain.replace("&", "&amp;").replace("<", "&lt;")
