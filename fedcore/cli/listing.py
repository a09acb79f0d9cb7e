"""``fedcore list``: the presets and the names for configurations."""

import inspect
import os
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedcore.cli import terminal
from fedcore.cli.terminal import Options, Parser
from fedcore.server.compatibility import combines, table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MODULES = {"methods": "algorithms", "data": "sim.data", "partitions": "sim.data.partitions", "models": "sim.nets"}
MODULES |= {"participation": "sim.participation", "attacks": "sim.attacks", "rates": "algorithms.rates"}
MODULES |= {"optimizers": "algorithms.optimizers", "rules": "rules"}
KINDS = ("presets", *MODULES)


def add_arguments(top: Parser) -> None:
    """Add the command."""
    parser = top.add_command("list", run, needs=terminal.SIMULATOR)
    parser.add_argument("kind", nargs="?", choices=(*KINDS, "combinations"), metavar="KIND", help="one of these kinds")
    terminal.add_imports(parser)
    terminal.add_json(parser)


def run(options: Options) -> None:
    """List presets, the names for configurations, and what does not combine.

    The kinds are presets, methods, data, partitions, models, participation, attacks,
    rates, optimizers, rules and combinations. With a KIND, show each name with its
    options. A name can be used in a configuration or on the command line:
      fedcore run quickstart --set 'partition={name="dirichlet", clients=30, alpha=0.3}'

    Data is read from $FEDCORE_DATA_DIR/NAME if that variable is set; otherwise it is
    downloaded once.

    Examples:
      fedcore list
      fedcore list partitions
      fedcore list combinations
    """
    from rich.console import Console

    terminal.load_imports(options.imports)
    console, kind = Console(), options.kind
    if options.json:
        terminal.print_json(_as_json(kind))
        return
    if kind in (None, "presets"):
        _print_presets(console)
    if kind is None:
        for one in KINDS[1:]:
            console.print(f"[bold]{one}[/bold]: {', '.join(_names(one))}", highlight=False)
        console.print("\nDetails: fedcore list KIND\nRun a preset: fedcore run quickstart", highlight=False)
    elif kind == "combinations":
        terminal.print_plain(console, (f"{a}: not with {b}, because {why}; {do}" for a, b, why, do in table()))
    elif kind != "presets":
        console.print(_table(kind))
    if kind == "data":
        folder = os.environ.get("FEDCORE_DATA_DIR")
        where = f"read from FEDCORE_DATA_DIR, {folder}" if folder else "downloaded once (FEDCORE_DATA_DIR is not set)"
        terminal.print_plain(console, [f"Files are {where}."])


def _module(kind: str) -> Any:
    """Return the module with the registry of a kind."""
    return import_module(f"fedcore.{MODULES[kind]}")


def _names(kind: str) -> list[str]:
    registry = _module(kind).REGISTRY
    return [*registry.names(), *registry.composed]


def _as_json(kind: str | None) -> dict[str, Any]:
    from fedcore.sim.experiment import config as presets

    if kind == "combinations":
        return {kind: [asdict(conflict) for conflict in combines().conflicts]}
    if kind not in (None, "presets"):
        return {kind: _described(kind)}
    found = [(name, presets.read(name)) for name in presets.names()]
    listed = [{"name": name} | {key: tables[key] for key in ("title", "rounds", "seeds")} for name, tables in found]
    return {"presets": listed} | {one: _names(one) for one in KINDS[1:] if kind is None}


def _print_presets(console: "Console") -> None:
    """Print the presets of each file as a shell pattern, such as ``t-{a,b}``."""
    from fedcore.sim.experiment import config as presets

    console.print("[bold]presets[/bold] (use one of the names in {a,b}):", highlight=False)
    for file, axes in presets.files():
        tables = presets.read("-".join([file, *(axis[0] for axis in axes)]))
        title = tables["title"].rpartition(": ")[0] if axes else tables["title"]
        name = "-".join([file, *("{" + ",".join(axis) + "}" if len(axis) > 1 else axis[0] for axis in axes)])
        size = f"{tables['rounds']} rounds, {len(tables['seeds'])} seeds"
        terminal.print_plain(console, [f"  {name}"])
        terminal.print_plain(console, [f"      {title}; {size}"], "dim")


def _described(kind: str) -> list[dict[str, Any]]:
    from fedcore.sim.data import Source

    filled_in = getattr(_module(kind), "FILLED_IN", ("clients", "seed", "first_round"))  # set by experiments
    registry, found = _module(kind).REGISTRY, []
    for name in registry.names():
        row = registry.find(name)
        about = row.about if isinstance(row, Source) else (inspect.getdoc(row) or "").split("\n")[0]
        one = {"name": name, "about": about}
        if isinstance(row, Source):
            one |= {"shape": row.shape, "classes": row.classes}
        own = list(inspect.signature(row.load if isinstance(row, Source) else row).parameters.values())
        own = [option for option in own if option.name not in filled_in]
        options = {one.name: {} if one.default is one.empty else {"default": one.default} for one in own}
        found.append(one | {"options": options})
    return found + [{"name": name, "about": how, "options": {}} for name, how in registry.composed.items()]


def _table(kind: str) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    grid = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in (kind, *(("example", "classes") if kind == "data" else ()), "description", "options"):
        grid.add_column(heading, no_wrap=heading == kind, overflow="fold")
    for one in _described(kind):
        shape = ("x".join(map(str, one["shape"])), str(one["classes"])) if kind == "data" else ()
        options = (f"{name}={option['default']!r}" if option else name for name, option in one["options"].items())
        grid.add_row(one["name"], *shape, one["about"], ", ".join(options))
    return grid
