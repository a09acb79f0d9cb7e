"""All reports of a run's folder: ``table.md``, ``table.csv`` and ``curves.png``."""

from dataclasses import dataclass
from pathlib import Path

from fedcore.experiment.records import read_folder
from fedcore.reports.curves import draw_curves
from fedcore.reports.diagnostics import diagnostics_table
from fedcore.reports.summary import Summary, summarise
from fedcore.reports.table import csv_table, markdown_table


@dataclass(frozen=True)
class Report:
    """A run's summary and the files that were written."""

    summary: Summary
    files: tuple[Path, ...]


def write_report(folder: Path) -> Report:
    """Read the records of a run, whole or partial, and write its reports beside them.

    Raises:
        MissingDataError: there are no records, or one is damaged.
    """
    records = read_folder(folder)
    summary = summarise(records)
    markdown, table, curves = (folder / name for name in ("table.md", "table.csv", "curves.png"))
    markdown.write_text(f"{markdown_table(summary)}\n{diagnostics_table(records)}", encoding="utf-8")
    table.write_text(csv_table(summary), encoding="utf-8")
    draw_curves(records, curves)
    return Report(summary, (markdown, table, curves))
