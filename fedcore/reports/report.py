"""All reports of a run's folder: ``table.md``, ``table.csv``, ``curves.png`` and ``report.html``."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedcore.errors import MissingDataError
from fedcore.experiment import presets
from fedcore.experiment.folder import CONFIG
from fedcore.experiment.pictures import Pictures
from fedcore.experiment.records import Record, read_folder
from fedcore.reports import page
from fedcore.reports.curves import draw_curves
from fedcore.reports.diagnostics import NOTE, diagnostics, diagnostics_table
from fedcore.reports.paired import Difference, differences_to_first
from fedcore.reports.papers import ACCURACY, Figures, Line, compare, figures, interval
from fedcore.reports.summary import Summary, summarise
from fedcore.reports.table import cells, csv_table, legend, markdown_lines, markdown_table

PAPER = ("figure", "paper", "here", "spread", "seeds")
"""The headings of a comparison with a paper."""
DIFFERENCES = ("paired by seed", "points", "interval", "seeds")


@dataclass(frozen=True)
class Report:
    """A run's summary, the files that were written, and what a paper says of it: which, its size, and its figures."""

    summary: Summary
    files: tuple[Path, ...]
    source: str = ""
    lines: tuple[Line, ...] = ()

    @property
    def has_accuracies(self) -> bool:
        """Whether the paper's figures are accuracies, so that ours stand beside them."""
        return any(line.kind == ACCURACY for line in self.lines)


def write_report(folder: Path) -> Report:
    """Read the records of a run, whole or partial, and write its reports beside them.

    Raises:
        MissingDataError: there are no records, or one is damaged.
    """
    config = folder / CONFIG
    text = config.read_text(encoding="utf-8") if config.exists() else ""
    records = read_folder(folder)
    return report_on(records, folder, pictures(records[0].header.preset, text), config=text)


def pictures(preset: str, config: str) -> Pictures:
    """What a run's pictures are drawn over: its configuration says it, or, of a run of an older version, its preset.

    Args:
        preset: the name of the experiment.
        config: its ``config.json``; empty without one.

    Raises:
        MissingDataError: the configuration is damaged.
    """
    try:
        tables = json.loads(config or "{}")
        if not isinstance(tables, dict):
            raise ValueError(f"expected tables at the top, got {type(tables).__name__}")
        found = tables.get("pictures")
        if found is None and preset in presets.names():
            found = presets.read(preset).get("pictures")
        return Pictures() if found is None else Pictures.model_validate(found)
    except ValueError as error:
        raise MissingDataError(f"{preset}: its {CONFIG} is damaged: {error}") from None


def report_on(
    records: Sequence[Record], folder: Path, drawn: Pictures, *, notes: Sequence[str] = (), config: str = ""
) -> Report:
    """Write the reports of some records into a folder.

    Args:
        records: of one experiment, in the order of the comparison.
        folder: where the files go.
        drawn: what the curves are drawn over.
        notes: what else is to be said.
        config: the configuration, for the page.
    """
    paper = figures(records[0].header.preset)
    lines = tuple(compare(records, paper)) if paper else ()
    summary = summarise(records)
    summary = replace(summary, notes=(*notes, *summary.notes))
    apart = differences_to_first(records)
    markdown, table, curves, html = (folder / name for name in ("table.md", "table.csv", "curves.png", "report.html"))
    markdown.write_text(
        f"{markdown_table(summary)}\n{diagnostics_table(records)}{_sections(paper, lines, apart)}", encoding="utf-8"
    )
    table.write_text(csv_table(summary), encoding="utf-8")
    draw_curves(records, curves, paper.accuracy if paper else None, over=drawn.over)
    report = Report(summary, (markdown, table, curves, html), sized(paper) if paper else "", lines)
    html.write_text(_page(report, records, apart, curves, config), encoding="utf-8")
    return report


def rows(lines: Sequence[Line]) -> list[list[str]]:
    """A comparison with a paper as texts, under the headings ``PAPER``."""
    return [
        [line.what, line.paper, "–" if line.here is None else f"{line.here:.1f}", line.spread, str(line.seeds)]
        for line in lines
    ]


def sized(paper: Figures) -> str:
    """Where a paper's figures come from, and at what size.

    >>> sized(Figures("A 2020, Table 1", rounds=200, seeds=3))
    'A 2020, Table 1; 200 rounds, 3 seeds'
    """
    size = [f"{paper.rounds} rounds"] if paper.rounds else []
    size += [f"{paper.seeds} seeds"] if paper.seeds else []
    return f"{paper.source}; {', '.join(size)}" if size else paper.source


def _differences(apart: Sequence[Difference]) -> list[list[str]]:
    return [
        [
            f"{one.of} - {one.over}",
            "–" if one.mean is None else f"{100 * one.mean:+.1f}",
            interval(one) + (f"; not the same clients: seeds {list(one.apart)}" if one.apart else ""),
            str(len(one.values)),
        ]
        for one in apart
    ]


def _sections(paper: Figures | None, lines: Sequence[Line], apart: Sequence[Difference]) -> str:
    found: list[str] = []
    if apart:
        found += ["", "## Differences", "", *markdown_lines(DIFFERENCES, _differences(apart))]
    if paper and lines:
        found += ["", "## The paper", "", *markdown_lines(PAPER, rows(lines)), "", f"{sized(paper)}."]
    return "\n".join([*found, ""]) if found else ""


def _page(report: Report, records: Sequence[Record], apart: Sequence[Difference], curves: Path, config: str) -> str:
    summary = report.summary
    parts = [page.picture(curves, f"{summary.title}: test accuracy")]
    if report.lines:
        parts += [page.heading("The paper"), page.table(PAPER, rows(report.lines))]
        parts.append(page.paragraph(f"{report.source}.", faint=True))
    parts += [page.heading("Here"), page.table(*cells(summary)), page.paragraph(legend(), faint=True)]
    parts += [page.paragraph(note) for note in summary.notes]
    if apart:
        parts += [page.heading("Differences"), page.table(DIFFERENCES, _differences(apart))]
    parts += [page.heading("What it took"), page.table(*diagnostics(records)), page.paragraph(NOTE, faint=True)]
    if config:
        parts += [page.heading("Configuration"), page.source(config)]
    return page.page(summary.title, parts)
