"""The report of a run: ``table.md``, ``table.csv``, ``table.tex``, ``curves.png``, ``loss.png`` and ``report.html``."""

import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pandas import DataFrame, option_context
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fedcore.errors import MissingDataError
from fedcore.files import read_text, write_text
from fedcore.sim.experiment import config as presets
from fedcore.sim.experiment.changes import Changes, inherited_text, of_tables, text_of
from fedcore.sim.experiment.results import CONFIG, Record, parse_tables, read_folder
from fedcore.sim.experiment.schema import Pictures, ReportSettings
from fedcore.sim.reports import statistics as stats
from fedcore.sim.reports.figures import draw_curves
from fedcore.sim.reports.papers import Comparison, comparison
from fedcore.sim.reports.statistics import Summary

FILES = ("table.md", "table.csv", "table.tex", "curves.png", "loss.png", "report.html")
ESSENTIAL = 5
"""The number of columns that fit into a terminal 80 characters wide."""
_FOLDER = resources.files("fedcore.sim.reports")
STYLE, SCRIPT = ((_FOLDER / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
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
        head += f"<title>{escape(self._title)}</title><style>{STYLE}</style><script>{SCRIPT}</script>"
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
                about = f"evaluated on {100 * share:g} % of each client's training examples (validation)"
                about += ", not on the test set"
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
        return self.paper is not None and self.paper.has_accuracies


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
    paper = comparison(records, config.changes)
    notes = [*filter(None, [config.note]), *notes]
    summary = stats.summarise(records, text_of(config.changes), notes, config.inherited)
    markdown, table, tex, curves, loss, html = (folder / name for name in FILES)
    write_text(table, stats.summary_csv(summary))
    write_text(tex, tex_table(_with_best(summary)))
    options: dict[str, Any] = {"over": config.pictures.over, "shifts": config.shifts}
    # The note of a run with the best points of a sweep stands for its changes.
    options |= {"settings": config.report, "changed": "" if config.note else summary.changed}
    drawings, plots = {"test accuracy": draw_curves(records, curves, paper, **options)}, [curves]
    if any(map(stats.losses, records)):  # older versions did not record the loss
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
    rows = zip(table.itertuples(index=False, name=None), _are_best(summary), strict=True)
    bold = [(label, Bold(cell) if best else cell, *cells) for (label, cell, *cells), best in rows]
    return stats.frame(list(table.columns), bold)


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
        text: str = marked.to_html(index=False, escape=False, border=0)
    return text


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
