"""``fedcore report``: the tables and plots of a run or sweep."""

from pathlib import Path
from typing import TYPE_CHECKING

from fedcore.cli import terminal
from fedcore.cli.terminal import Options, Parser, print_plain
from fedcore.validation import expand_home

if TYPE_CHECKING:
    from rich.console import Console

    from fedcore.reports import Report


def add_arguments(top: Parser) -> None:
    """Add the command."""
    parser = top.add_command("report", run, needs=terminal.SIMULATOR)
    parser.add_argument("folder", type=expand_home, metavar="DIR", help="the folder of a run or sweep, complete or not")


def run(options: Options) -> None:
    """Regenerate tables, plots and the HTML report of a run or sweep.

    The report of a sweep shows each algorithm at its best complete point. This is the point
    with the highest accuracy (mean over the last rounds, then over seeds). A trial's result
    is the mean over its last 10 rounds (report.window), as far as they were evaluated.

    Examples:
      fedcore report runs/quickstart-20260101-120000
      fedcore report runs/sweep-quick
    """
    from rich.console import Console

    from fedcore.reports import is_sweep

    show = show_sweep if is_sweep(options.folder) else show_run
    show(Console(), options.folder)


def show_run(console: "Console", folder: Path) -> None:
    """Write a run's report, and print its tables and files."""
    from fedcore.reports import write_report
    from fedcore.reports.statistics import legend

    written = write_report(folder)
    _print(console, written, legend(written.summary))
    print_plain(console, (f"wrote {file}" for file in written.files))


def show_sweep(console: "Console", folder: Path) -> None:
    """Write a sweep's reports, and print their tables and files."""
    from fedcore.reports import write_overview
    from fedcore.reports.statistics import legend
    from fedcore.reports.sweeps import size

    written = write_overview(folder)
    for name, report in written.reports.items():
        print_plain(console, [f"{name}, {size(report)}"], "dim")
        _print(console, report)
        print_plain(console, [f"wrote {report.page}"])
    print_plain(console, [legend(*(report.summary for report in written.reports.values()))], "dim", soft_wrap=False)
    print_plain(console, (f"note: {note}" for note in written.notes), "yellow")
    print_plain(console, (f"wrote {file}" for file in written.files))


def _print(console: "Console", report: "Report", legend: str = "") -> None:
    from fedcore.reports.report import summary_for_terminal, terminal_table

    summary, paper = report.summary, report.paper
    print_plain(console, [summary.title], "bold", soft_wrap=False)
    print_plain(console, [f"changed: {summary.changed}"] if summary.changed else [], "yellow", soft_wrap=False)
    if legend or not report.has_accuracies:
        console.print(summary_for_terminal(summary))
    print_plain(console, [legend] if legend else [], "dim", soft_wrap=False)
    if paper:
        if paper.lines:
            console.print(terminal_table(paper.table(), right=False))
        print_plain(console, [paper.remark()], "bold yellow" if paper.is_warning else "dim italic", soft_wrap=False)
    print_plain(console, (f"note: {note}" for note in summary.notes), "yellow", soft_wrap=False)
