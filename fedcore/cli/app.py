"""The commands put together, and what becomes of their errors."""

import sys

import typer
from rich.console import Console
from rich.text import Text

from fedcore.cli.data import data
from fedcore.cli.info import info
from fedcore.cli.listing import list_names
from fedcore.cli.report import report
from fedcore.cli.run import run
from fedcore.cli.store import store
from fedcore.cli.sweep import sweep
from fedcore.errors import FedcoreError

app = typer.Typer(
    help="The server side of federated learning: run the papers' experiments and compare the algorithms.",
    epilog="Start with: fedcore run quickstart",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("run")(run)
app.command("sweep")(sweep)
app.command("list")(list_names)
app.add_typer(data, name="data")
app.command("report")(report)
app.command("info")(info)
app.add_typer(store, name="store")


def run_app() -> None:
    """Run the command line: 0 well, 1 a trial failed, 2 a mistake of the caller's, 130 interrupted."""
    try:
        app()
    except FedcoreError as error:
        Console(stderr=True).print(Text(f"error: {error}", style="red"), soft_wrap=True)
        sys.exit(2)
