"""``fedcore report``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedcore.reports import write_report
from fedcore.reports.table import terminal_table


def report(
    folder: Annotated[Path, typer.Argument(help="A folder that `fedcore run` wrote, finished or not.", metavar="DIR")],
) -> None:
    """Make the table and the curves of a run anew from its records.

    Example:

        fedcore report runs/quickstart-20260101-120000
    """
    show_report(Console(), folder)


def show_report(console: Console, folder: Path) -> None:
    """Write a run's reports, print its table, and say where the files are."""
    written = write_report(folder)
    console.print(terminal_table(written.summary))
    for note in written.summary.notes:
        console.print(f"note: {note}", style="yellow", markup=False, highlight=False)
    for file in written.files:
        console.print(f"wrote {file}", markup=False, highlight=False, soft_wrap=True)
