"""``fedcore list``."""

from typing import Any

from rich.console import Console

from fedcore import algorithms, data, optimizers, participation, rates
from fedcore.cli.imports import load_all
from fedcore.cli.pairs import show_json
from fedcore.experiment import presets
from fedcore.local import nets
from fedcore.registries import Registry

SAID = ("title", "rounds", "seeds")
"""What is listed of a preset."""


def folded(file: str, axes: list[list[str]]) -> str:
    """A file's presets in one line, as shells write several words in one.

    >>> folded("t", [["a", "b"], ["x"]])
    't-{a,b}-x'
    """
    return "-".join([file, *("{" + ",".join(axis) + "}" if len(axis) > 1 else axis[0] for axis in axes)])


REGISTRIES: dict[str, Registry[Any]] = {
    "algorithms": algorithms.REGISTRY,
    "participation": participation.REGISTRY,
    "rates": rates.REGISTRY,
    "server optimisers": optimizers.REGISTRY,
    "data": data.REGISTRY,
    "partitions": data.partitions.REGISTRY,
    "models": nets.REGISTRY,
}


def list_names(imports: list[str], as_json: bool) -> None:
    """List the presets, and the names that a configuration can use."""
    load_all(imports)
    if as_json:
        listed = [{"name": name} | {key: presets.read(name)[key] for key in SAID} for name in presets.names()]
        show_json({"presets": listed} | {what: registry.names() for what, registry in REGISTRIES.items()})
        return
    console = Console()
    console.print("[bold]presets[/bold] ({a,b} stands for one of them each, as shells expand it):", highlight=False)
    for file, axes in presets.files():
        tables = presets.read("-".join([file, *(axis[0] for axis in axes)]))
        title = tables["title"].rpartition(": ")[0] if axes else tables["title"]
        console.print(f"  {folded(file, axes)}", markup=False, highlight=False, soft_wrap=True)
        size = f"{tables['rounds']} rounds, {len(tables['seeds'])} seeds"
        console.print(f"      {title}; {size}", style="dim", markup=False, highlight=False, soft_wrap=True)
    for what, registry in REGISTRIES.items():
        console.print(f"[bold]{what}[/bold]: {', '.join(registry.names())}", highlight=False)
    console.print("\nMore on data and partitions: fedcore data list", highlight=False)
    console.print(f"Run one with: fedcore run {presets.names()[0]}", highlight=False)
