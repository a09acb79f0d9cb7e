"""``fedcore report``."""

from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fedcore.reports import is_sweep, write_overview, write_report
from fedcore.reports.comparison import Comparison
from fedcore.reports.sweeps import size
from fedcore.reports.table import legend, terminal_table, title


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
    console.print(legend(written.summary), style="dim", markup=False, highlight=False)
    _show_paper(console, written.paper)
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
            console.print(*title(report.summary), sep="\n")
        else:
            console.print(terminal_table(report.summary))
        _show_paper(console, report.paper)
        for note in report.summary.notes:
            console.print(f"note: {note}", style="yellow", markup=False, highlight=False)
        console.print(f"wrote {report.page}", markup=False, highlight=False, soft_wrap=True)
    summaries = [report.summary for report in written.reports.values()]
    console.print(legend(*summaries), style="dim", markup=False, highlight=False)
    for note in written.notes:
        console.print(f"note: {note}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    for file in written.files:
        console.print(f"wrote {file}", markup=False, highlight=False, soft_wrap=True)


def _show_paper(console: Console, paper: Comparison | None) -> None:
    if paper is None:
        return
    if paper.lines:
        headings, rows = paper.table()
        table = Table(*headings, box=SIMPLE_HEAD, pad_edge=False)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    style = "bold yellow" if paper.is_loud else "dim italic"
    console.print(paper.remark(), style=style, markup=False, highlight=False)
