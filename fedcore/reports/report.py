"""All reports of a run's folder: ``table.md``, ``table.csv``, ``curves.png`` and ``report.html``."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedcore.experiment.folder import CONFIG
from fedcore.experiment.records import Record, read_folder
from fedcore.reports import page
from fedcore.reports.curves import draw_curves
from fedcore.reports.diagnostics import diagnostics_table
from fedcore.reports.paired import Difference, differences_to_first
from fedcore.reports.papers import Figures, Line, compare, figures, interval
from fedcore.reports.summary import Summary, summarise
from fedcore.reports.table import cells, csv_table, legend, markdown_lines, markdown_table

PAPER = ("", "paper", "here", "", "seeds")
"""The headings of a comparison with a paper."""
DIFFERENCES = ("paired by seed", "points", "interval", "seeds")


@dataclass(frozen=True)
class Report:
    """A run's summary, what a paper says of it, and the files that were written."""

    summary: Summary
    files: tuple[Path, ...]
    source: str = ""
    lines: tuple[Line, ...] = ()


def write_report(folder: Path) -> Report:
    """Read the records of a run, whole or partial, and write its reports beside them.

    Raises:
        MissingDataError: there are no records, or one is damaged.
    """
    config = folder / CONFIG
    text = config.read_text(encoding="utf-8") if config.exists() else ""
    return report_on(read_folder(folder), folder, config=text)


def report_on(records: Sequence[Record], folder: Path, *, notes: Sequence[str] = (), config: str = "") -> Report:
    """Write the reports of some records into a folder.

    Args:
        records: of one experiment, in the order of the comparison.
        folder: where the files go.
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
    draw_curves(records, curves, paper.accuracy if paper else None)
    html.write_text(_page(summary, paper, lines, apart, curves, config), encoding="utf-8")
    return Report(summary, (markdown, table, curves, html), paper.source if paper else "", lines)


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


def _page(
    summary: Summary,
    paper: Figures | None,
    lines: Sequence[Line],
    apart: Sequence[Difference],
    curves: Path,
    config: str,
) -> str:
    parts = [page.picture(curves, "Test accuracy over rounds")]
    if paper and lines:
        parts += [page.heading("The paper"), page.table(PAPER, rows(lines)), page.paragraph(sized(paper), faint=True)]
    parts += [page.heading("Here"), page.table(*cells(summary)), page.paragraph(legend(), faint=True)]
    if apart:
        parts += [page.heading("Differences"), page.table(DIFFERENCES, _differences(apart))]
    parts += [page.paragraph(note) for note in summary.notes]
    if config:
        parts += [page.heading("Configuration"), page.source(config)]
    return page.page(summary.title, parts)
