"""``fedcore list``."""

from rich.console import Console
from rich.table import Table

from fedcore import algorithms, data, participation
from fedcore.algorithms import rates
from fedcore.experiment import presets
from fedcore.local import nets


def list_names() -> None:
    """List the presets, and the names that a configuration can use."""
    console = Console()
    table = Table("preset", "what it is", "rounds", "seeds", title="Presets", title_style="bold")
    for name in presets.names():
        tables = presets.read(name)
        table.add_row(name, tables["title"], str(tables["rounds"]), str(len(tables["seeds"])))
    console.print(table)
    for what, registry in (
        ("algorithms", algorithms.REGISTRY),
        ("participation", participation.REGISTRY),
        ("rates", rates.REGISTRY),
        ("data", data.REGISTRY),
        ("partitions", data.partitions.REGISTRY),
        ("models", nets.REGISTRY),
    ):
        console.print(f"[bold]{what}[/bold]: {', '.join(registry)}", highlight=False)
    console.print("\nMore on data and partitions: fedcore data list", highlight=False)
    console.print(f"Run one with: fedcore run {presets.names()[0]}", highlight=False)
