"""``fedcore store``: what is in a store's folder, whether it is sound, and how to give back what it does not need."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fedcore.store import ClientStore

store = typer.Typer(
    help="Look after the folder of a client store: the clients' rows and the server's vectors.",
    epilog="Start with: fedcore store info PATH",
    no_args_is_help=True,
)
Folder = Annotated[Path, typer.Argument(help="The folder of a store.", metavar="PATH")]


@store.command()
def info(path: Folder) -> None:
    """Show what a store holds: clients, rows, vectors, the last round, and what it takes of the disk.

    It only reads, and may be used while a server writes to the store.

    Example:

        fedcore store info runs/mimic/store
    """
    with ClientStore.open(path, readonly=True) as opened:
        found = opened.info()
    table = Table(show_header=False, box=None)
    for name, value in (
        ("path", str(found.path)),
        ("format", str(found.format)),
        ("last round", "none yet" if found.round is None else str(found.round)),
        ("clients", f"{found.clients:,}"),
        ("rows", f"{found.rows:,} of {found.n:,} elements, {found.codec}, {_size(found.row_bytes)} each"),
        ("free slots", f"{found.free:,}"),
        ("on disk", _size(found.bytes)),
    ):
        table.add_row(f"[bold]{name}[/bold]", value)
    for name, (dtype, shape) in found.vectors.items():
        table.add_row(f"[bold]vector[/bold] {name}", f"{dtype}[{', '.join(map(str, shape))}]")
    Console().print(table)


@store.command()
def verify(path: Folder) -> None:
    """Read everything and compare it with its checksums; each damaged row is named with its client.

    Ends with status 0 if all is sound, and 1 if not. It only reads, and may be used while a server writes.

    Example:

        fedcore store verify runs/mimic/store
    """
    console = Console()
    with ClientStore.open(path, readonly=True) as opened:
        problems = opened.verify()
        rows, vectors = len(opened), len(opened.vector_names())
    for problem in problems:
        console.print(problem, style="red", markup=False, highlight=False, soft_wrap=True)
    if problems:
        raise typer.Exit(1)
    console.print(f"sound: {rows:,} rows and {vectors} vectors", highlight=False)


@store.command()
def compact(path: Folder) -> None:
    """Give back free slots: rows move down to fill them, and the files become shorter.

    No server may write to the store meanwhile. It is a transaction: interrupted, the store is as before.

    Example:

        fedcore store compact runs/mimic/store
    """
    with ClientStore.open(path) as opened:
        before = opened.info().bytes
        opened.compact()
        after = opened.info().bytes
    Console().print(f"{_size(before)} on disk before, {_size(after)} now", highlight=False)


def _size(size: float) -> str:
    """Bytes as people read them."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
