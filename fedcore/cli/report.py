"""``fedcore report``: the tables and pictures of a run or a sweep."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fedcore.arguments import expanded
from fedcore.cli import terminal
from fedcore.cli.terminal import Options, Parser

if TYPE_CHECKING:
    from rich.console import Console

    from fedcore.reports import Report


def add_arguments(top: Parser) -> None:
    """Add the command."""
    parser = top.add_command("report", run, needs=terminal.SIMULATOR)
    parser.add_argument("folder", type=expanded, metavar="DIR", help="a folder of `fedcore run`, complete or not")


def run(options: Options) -> None:
    """Regenerate tables, plots and the HTML report of a run or sweep.

    For a sweep, the report takes each algorithm's best complete point: the one with
    the highest accuracy (mean over the last 10 evaluated rounds, then over seeds).

    Examples:
      fedcore report runs/quickstart-20260101-120000
      fedcore report runs/sweep-quick
    """
    from rich.console import Console

    from fedcore.reports import is_sweep

    show = show_sweep if is_sweep(options.folder) else show_run
    show(Console(), options.folder)


def show_run(console: "Console", folder: Path) -> None:
    """Write a run's reports, and print its tables and the files."""
    from fedcore.reports import write_report
    from fedcore.reports.statistics import legend

    written = write_report(folder)
    _print(console, written, legend(written.summary))
    _print_lines(console, (f"wrote {file}" for file in written.files))


def show_sweep(console: "Console", folder: Path) -> None:
    """Write a sweep's reports, and print the tables of its presets and the files."""
    from fedcore.reports import write_overview
    from fedcore.reports.statistics import legend
    from fedcore.reports.sweeps import size

    written = write_overview(folder)
    for name, report in written.reports.items():
        _print_lines(console, [f"{name}, {size(report)}"], "dim")
        _print(console, report)
        _print_lines(console, [f"wrote {report.page}"])
    _print_lines(console, [legend(*(report.summary for report in written.reports.values()))], "dim", soft_wrap=False)
    _print_lines(console, (f"note: {note}" for note in written.notes), "yellow")
    _print_lines(console, (f"wrote {file}" for file in written.files))


def _print(console: "Console", report: "Report", legend: str = "") -> None:
    """Print the tables and notes of a run."""
    from fedcore.reports.report import summary_for_terminal, terminal_table

    summary, paper = report.summary, report.paper
    _print_lines(console, [summary.title], "bold", soft_wrap=False)
    _print_lines(console, [f"changed: {summary.changed}"] if summary.changed else [], "yellow", soft_wrap=False)
    if legend or not report.has_accuracies:
        console.print(summary_for_terminal(summary))
    _print_lines(console, [legend] if legend else [], "dim", soft_wrap=False)
    if paper:
        if paper.lines:
            console.print(terminal_table(paper.table(), right=False))
        _print_lines(console, [paper.remark()], "bold yellow" if paper.is_warning else "dim italic", soft_wrap=False)
    _print_lines(console, (f"note: {note}" for note in summary.notes), "yellow", soft_wrap=False)


def _print_lines(console: "Console", lines: Iterable[str], style: str = "", *, soft_wrap: bool = True) -> None:
    """Print plain text; by default the terminal wraps it, so that a path can be copied."""
    for line in lines:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=soft_wrap)
