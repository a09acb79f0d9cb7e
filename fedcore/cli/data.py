"""``fedcore data``: the data sets and partitions, and who holds what in an experiment."""

import inspect
import os
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fedcore.cli.imports import load_all
from fedcore.cli.pairs import show_json
from fedcore.data import FILLED_IN, REGISTRY, holdings, partitions
from fedcore.errors import ConfigError
from fedcore.experiment import load_preset
from fedcore.experiment.datasets import load_and_partition
from fedcore.reports.holdings import draw_holdings, holdings_table


def list_data(imports: list[str], as_json: bool) -> None:
    """List the data sets and the ways to divide them."""
    load_all(imports)
    if as_json:
        show_json({"data": [_source(name) for name in REGISTRY.names()], "partitions": _partitions()})
        return
    console = Console()
    sets = _table("data", "example", "classes", "what it is", "options")
    for name in REGISTRY.names():
        source = REGISTRY.find(name)
        shape = "x".join(map(str, source.shape))
        sets.add_row(name, shape, str(source.classes), source.about, _options(source.load, FILLED_IN))
    console.print(sets)
    deals = _table("partition", "what it does", "options")
    for name in partitions.REGISTRY.names():
        deal = partitions.REGISTRY.find(name)
        deals.add_row(name, _about(deal), _options(deal, partitions.FILLED_IN))
    console.print(deals)
    directory = os.environ.get("FEDCORE_DATA_DIR")
    where = f"read from FEDCORE_DATA_DIR, {directory}" if directory else "downloaded once (FEDCORE_DATA_DIR is not set)"
    console.print(f"Files are {where}.", markup=False, highlight=False, soft_wrap=True)


def show(
    preset: str,
    out: Path | None,
    seed: int | None,
    changes: list[str],
    most: int | None,
    imports: list[str],
    as_json: bool,
) -> None:
    """Show who holds what; ``most`` is how many clients at most, None for all; JSON has all."""
    load_all(imports)
    if out is not None and out.suffix.lower() != ".png":
        raise ConfigError(f"--out: expected a file that ends in .png, got {str(out)!r}")
    experiment = load_preset(preset, changes)
    first = experiment.seeds[0] if seed is None else seed
    dataset, parts = load_and_partition(experiment, first)
    counts = holdings(dataset.train_y, parts, dataset.classes)
    options = ", ".join(f"{key}={value}" for key, value in experiment.partition.options.items())
    deal = f"{experiment.partition.name} ({options})" if options else experiment.partition.name
    title = f"{dataset.name}, {deal}, seed {first}"
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        draw_holdings(counts, out, title=title)
    if as_json:
        show_json({"data": dataset.name, "partition": deal, "seed": first, "counts": counts.tolist()})
        return
    console = Console()
    console.print(holdings_table(counts, title=title, most=most))
    if most is not None and len(counts) > most:
        console.print("--all shows all clients", markup=False, highlight=False)
    if out is not None:
        console.print(f"wrote {out}", markup=False, highlight=False, soft_wrap=True)


def _table(*headings: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, no_wrap=number == 0, overflow="fold")
    return table


def _source(name: str) -> dict[str, Any]:
    source = REGISTRY.find(name)
    told = {"name": name, "about": source.about, "shape": source.shape, "classes": source.classes}
    return told | {"options": _defaults(source.load, FILLED_IN)}


def _partitions() -> list[dict[str, Any]]:
    found = {name: partitions.REGISTRY.find(name) for name in partitions.REGISTRY.names()}
    return [
        {"name": name, "about": _about(deal), "options": _defaults(deal, partitions.FILLED_IN)}
        for name, deal in found.items()
    ]


def _about(deal: object) -> str:
    return (inspect.getdoc(deal) or "").split("\n")[0]


def _defaults(make: object, given: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """A function's own parameters by name, each with its default, if it has one."""
    return {
        parameter.name: {} if parameter.default is parameter.empty else {"default": parameter.default}
        for parameter in _own(make, given)
    }


def _options(make: object, given: tuple[str, ...]) -> str:
    """A function's own parameters as they can be written: ``alpha, least=1``."""
    return ", ".join(
        parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
        for parameter in _own(make, given)
    )


def _own(make: object, given: tuple[str, ...]) -> list[inspect.Parameter]:
    assert callable(make)
    return [parameter for name, parameter in inspect.signature(make).parameters.items() if name not in given]
