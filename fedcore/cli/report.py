"""``fedcore report``: the tables and plots of a run or sweep."""

from argparse import ArgumentTypeError
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcore.cli import terminal
from fedcore.cli.terminal import Options, Parser, print_plain
from fedcore.validation import expand_home

if TYPE_CHECKING:
    from rich.console import Console

    from fedcore.sim.reports import Report


def add_arguments(top: Parser) -> None:
    """Add the command."""
    parser = top.add_command("report", run, needs=terminal.SIMULATOR)
    add = parser.add_argument
    add("folder", type=expand_home, metavar="DIR", help="the folder of a run or sweep, complete or not")
    add("--format", type=_formats, metavar="FORMATS", help="write the plots also as pdf, svg or pdf,svg")
    add("--band", choices=("range", "se", "95%"), help="band of curves: seeds' range, standard error, 95 %% interval")
    add("--smooth", type=terminal.whole_number(1), metavar="N", help="smooth curves over N evaluated rounds")


def _formats(text: str) -> tuple[str, ...]:
    """Parse ``--format``."""
    formats = tuple(dict.fromkeys(filter(None, text.split(","))))
    if not formats or set(formats) - {"pdf", "svg"}:
        raise ArgumentTypeError(f"{text!r}: must be pdf, svg or pdf,svg")
    return formats


def run(options: Options) -> None:
    """Regenerate tables, plots and the HTML report of a run or sweep.

    The report of a sweep shows each algorithm at its best complete point. This is the point
    with the highest accuracy (mean over the last rounds, then over seeds). A trial's result
    is the mean over its last 10 rounds (report.window), as far as they were evaluated.
    --format, --band and --smooth override the table report of the configuration.

    Examples:
      fedcore report runs/quickstart-20260101-120000
      fedcore report runs/sweep-quick
      fedcore report runs/mine --format pdf --band 95% --smooth 5
    """
    from rich.console import Console

    from fedcore.sim.reports import is_sweep

    show = show_sweep if is_sweep(options.folder) else show_run
    settings = {"formats": options.format, "band": options.band, "smooth": options.smooth}
    show(Console(), options.folder, **{key: value for key, value in settings.items() if value is not None})


def show_run(console: "Console", folder: Path, **settings: Any) -> None:
    """Write a run's report, and print its tables and files."""
    from fedcore.sim.reports import write_report
    from fedcore.sim.reports.statistics import legend

    written = write_report(folder, **settings)
    _print(console, written, legend(written.summary))
    print_plain(console, (f"wrote {file}" for file in written.files))


def show_sweep(console: "Console", folder: Path, **settings: Any) -> None:
    """Write a sweep's reports, and print their tables and files."""
    from fedcore.sim.reports import write_overview
    from fedcore.sim.reports.statistics import legend
    from fedcore.sim.reports.sweeps import size

    written = write_overview(folder, **settings)
    for name, report in written.reports.items():
        print_plain(console, [f"{name}, {size(report)}"], "dim")
        _print(console, report)
        print_plain(console, [f"wrote {report.page}"])
    print_plain(console, [legend(*(report.summary for report in written.reports.values()))], "dim", soft_wrap=False)
    print_plain(console, (f"note: {note}" for note in written.notes), "yellow")
    print_plain(console, (f"wrote {file}" for file in written.files))


def _print(console: "Console", report: "Report", legend: str = "") -> None:
    from fedcore.sim.reports.report import summary_for_terminal, terminal_table

    summary, paper = report.summary, report.paper
    print_plain(console, [summary.title], "bold", soft_wrap=False)
    print_plain(console, [f"changed: {summary.changed}"] if summary.changed else [], "yellow", soft_wrap=False)
    print_plain(console, [summary.inherited] if summary.inherited else [], "dim", soft_wrap=False)
    if legend or not report.has_accuracies:
        console.print(summary_for_terminal(summary))
    print_plain(console, [legend] if legend else [], "dim", soft_wrap=False)
    if paper:
        if paper.lines:
            console.print(terminal_table(paper.table(), right=False))
        print_plain(console, [paper.remark()], "bold yellow" if paper.is_warning else "dim italic", soft_wrap=False)
    print_plain(console, (f"note: {note}" for note in summary.notes), "yellow", soft_wrap=False)
