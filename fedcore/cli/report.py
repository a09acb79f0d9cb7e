"""``fedcore report``."""

from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fedcore.reports import is_sweep, write_overview, write_report
from fedcore.reports.report import PAPER, Report, rows
from fedcore.reports.sweeps import size
from fedcore.reports.table import legend, terminal_table


def report(folder: Path) -> None:
    """Make the reports of a run or a sweep anew."""
    if is_sweep(folder):
        show_sweep(Console(), folder)
    else:
        show_report(Console(), folder)


def show_report(console: Console, folder: Path) -> None:
    """Write a run's reports, print its table, and say where the files are."""
    written = write_report(folder)
    console.print(terminal_table(written.summary))
    console.print(legend(), style="dim", markup=False, highlight=False)
    _show_paper(console, written)
    for note in written.summary.notes:
        console.print(f"note: {note}", style="yellow", markup=False, highlight=False)
    for file in written.files:
        console.print(f"wrote {file}", markup=False, highlight=False, soft_wrap=True)


def show_sweep(console: Console, folder: Path) -> None:
    """Write a sweep's reports, print what its presets came to, and say where the files are."""
    written = write_overview(folder)
    for preset, report in written.reports.items():
        console.print(f"{preset}, {size(report)}", style="dim", markup=False, highlight=False)
        if report.has_accuracies:
            console.print(report.summary.title, style="bold", markup=False, highlight=False)
        else:
            console.print(terminal_table(report.summary))
        _show_paper(console, report)
        for note in report.summary.notes:
            console.print(f"note: {note}", style="yellow", markup=False, highlight=False)
    console.print(legend(), style="dim", markup=False, highlight=False)
    for file in written.files:
        console.print(f"wrote {file}", markup=False, highlight=False, soft_wrap=True)


def _show_paper(console: Console, report: Report) -> None:
    if report.lines:
        table = Table(*PAPER, box=SIMPLE_HEAD, pad_edge=False, caption=report.source, caption_justify="left")
        for row in rows(report.lines):
            table.add_row(*row)
        console.print(table)
