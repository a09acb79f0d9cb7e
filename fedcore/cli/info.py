"""``fedcore info``."""

from rich.console import Console
from rich.table import Table

from fedcore.experiment.folder import build


def info() -> None:
    """Show versions, compiler, instruction set and threads: what a bug report needs."""
    table = Table(show_header=False, box=None)
    for name, value in build().items():
        table.add_row(f"[bold]{name}[/bold]", str(value))
    Console().print(table)
