"""All reports of a run's folder: ``table.md``, ``table.csv``, ``curves.png``, ``loss.png`` and ``report.html``."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedcore.atomic_file import require_file, write_text
from fedcore.errors import MissingDataError
from fedcore.experiment import presets
from fedcore.experiment.records import Record, read_folder
from fedcore.experiment.run_folder import CONFIG
from fedcore.experiment.schema.changes import Changes, of_tables, said
from fedcore.experiment.schema.pictures import Pictures
from fedcore.reports import html_page as page
from fedcore.reports.comparison import Comparison, comparison
from fedcore.reports.curves import LOSS, draw_curves
from fedcore.reports.diagnostics import NOTE, diagnostics, diagnostics_table
from fedcore.reports.paired import Difference, differences_to_first
from fedcore.reports.papers import interval
from fedcore.reports.summary import Summary, losses, summarise
from fedcore.reports.table import cells, csv_table, escaped, legend, markdown_lines, markdown_table

DIFFERENCES = ("paired by seed", "points", "interval", "seeds")


FILES = ("table.md", "table.csv", "curves.png", "loss.png", "report.html")


@dataclass(frozen=True)
class Report:
    """A run's summary, the files that were written, the pictures among them with what each shows, and what a paper says
    of it, if one does."""

    summary: Summary
    files: tuple[Path, ...]
    drawings: Mapping[Path, str]
    paper: Comparison | None = None

    @property
    def page(self) -> Path:
        """The page that shows all of it, with the other files beside it."""
        return self.files[-1]

    @property
    def has_accuracies(self) -> bool:
        """Tell whether the paper's figures are accuracies, so that ours stand beside them."""
        return self.paper is not None and self.paper.has_accuracies


def write_report(folder: Path) -> Report:
    """Read the records of a run, whole or partial, and write its reports beside them.

    Raises:
        MissingDataError: there are no records, or one is damaged.
    """
    config = folder / CONFIG
    text = require_file(config).read_text(encoding="utf-8") if config.exists() else ""
    records = read_folder(folder)
    preset = records[0].header.preset
    return report_on(records, folder, pictures(preset, text), changed=changes(preset, text), config=text)


def pictures(preset: str, config: str) -> Pictures:
    """The axis of a run's pictures: its configuration says it, or, of a run of an older version, its preset.

    Args:
        preset: the name of the experiment.
        config: its ``config.json``; empty without one.

    Raises:
        MissingDataError: the configuration is damaged.
    """
    with _config(preset, config) as tables:
        found = tables.get("pictures")
        if found is None and preset in presets.names():
            found = presets.read(preset).get("pictures")
        return Pictures() if found is None else Pictures.model_validate(found)


def changes(preset: str, config: str) -> Changes:
    """The changes of a run's experiment against its title; runs of older versions do not tell.

    Args:
        preset, config: as for ``pictures``.

    Raises:
        MissingDataError: the configuration is damaged.
    """
    with _config(preset, config) as tables:
        return of_tables(tables)


def shifts(preset: str, config: str) -> list[int]:
    """The rounds in which clients arrive or depart, ascending.

    Args:
        preset, config: as for ``pictures``.

    Raises:
        MissingDataError: the configuration is damaged.
    """
    with _config(preset, config) as tables:
        rounds: set[int] = set()
        pattern = tables.get("participation")
        while isinstance(pattern, dict):
            for kind in ("arrivals", "departures"):
                given = pattern.get(kind)
                rounds |= {t for t in given.values() if isinstance(t, int)} if isinstance(given, dict) else set()
            pattern = pattern.get("among")
        return sorted(rounds - {0})


@contextmanager
def _config(preset: str, config: str) -> Iterator[dict[str, Any]]:
    try:
        tables = json.loads(config or "{}")
        if not isinstance(tables, dict):
            raise ValueError(f"expected tables at the top, got {type(tables).__name__}")
        yield tables
    except ValueError as error:
        raise MissingDataError(f"{preset}: its {CONFIG} is damaged: {error}") from None


def report_on(
    records: Sequence[Record],
    folder: Path,
    drawn: Pictures,
    *,
    changed: Changes = (),
    notes: Sequence[str] = (),
    config: str = "",
) -> Report:
    """Write the reports of some records into a folder.

    Args:
        records: of one experiment, in the order of the comparison.
        folder: where the files go.
        drawn: what the curves are drawn over.
        changed: what the experiment has otherwise than its title says.
        notes: what else is to be said.
        config: the configuration, for the page.
    """
    paper = comparison(records, changed)
    summary = summarise(records, said(changed))
    summary = replace(summary, notes=(*notes, *summary.notes))
    apart = differences_to_first(records)
    markdown, table, curves, loss, html = (folder / name for name in FILES)
    write_text(markdown, f"{markdown_table(summary)}\n{diagnostics_table(records)}{_sections(paper, apart)}")
    write_text(table, csv_table(summary))
    drawings, when = {curves: "test accuracy"}, shifts(records[0].header.preset, config)
    draw_curves(records, curves, paper, over=drawn.over, changed=summary.changed, shifts=when)
    if any(map(losses, records)):  # runs of older versions have none
        drawings[loss] = "test loss"
        draw_curves(records, loss, over=drawn.over, changed=summary.changed, measure=LOSS, shifts=when)
    report = Report(summary, (markdown, table, *drawings, html), drawings, paper)
    write_text(html, _page(report, records, apart, config))
    return report


def picture_parts(report: Report) -> list[str]:
    """A run's pictures as parts of a page: accuracies, and test losses where there are any."""
    return [page.picture(file, f"{report.summary.title}: {what}") for file, what in report.drawings.items()]


def paper_parts(paper: Comparison) -> list[str]:
    """A paper's figures beside ours as parts of a page, or why they are not there."""
    said = page.remark(paper.remark()) if paper.is_loud else page.paragraph(paper.remark(), faint=True)
    return [page.table(*paper.table()), said] if paper.lines else [said]


def paper_lines(paper: Comparison) -> list[str]:
    """The same as lines of Markdown."""
    remark = escaped(paper.remark())
    said = f"**{remark}**" if paper.is_loud else remark
    return [*markdown_lines(*paper.table()), "", said] if paper.lines else [said]


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


def _sections(paper: Comparison | None, apart: Sequence[Difference]) -> str:
    found: list[str] = []
    if apart:
        found += ["", "## Differences", "", *markdown_lines(DIFFERENCES, _differences(apart))]
    if paper:
        found += ["", "## The paper", "", *paper_lines(paper)]
    return "\n".join([*found, ""]) if found else ""


def _page(report: Report, records: Sequence[Record], apart: Sequence[Difference], config: str) -> str:
    summary = report.summary
    parts = [page.remark(f"Changed: {summary.changed}.")] if summary.changed else []
    parts += picture_parts(report)
    if report.paper:
        parts += [page.heading("The paper"), *paper_parts(report.paper)]
    parts += [page.heading("Here"), page.table(*cells(summary)), page.paragraph(legend(summary), faint=True)]
    parts += [page.paragraph(note) for note in summary.notes]
    if apart:
        parts += [page.heading("Differences"), page.table(DIFFERENCES, _differences(apart))]
    parts += [page.heading("What it took"), page.table(*diagnostics(records)), page.paragraph(NOTE, faint=True)]
    if config:
        parts += [page.heading("Configuration"), page.source(config)]
    return page.page(summary.title, parts)
