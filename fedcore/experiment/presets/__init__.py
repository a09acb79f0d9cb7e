"""The presets: the TOML files of this package, by their path without the ending, and the variants of each."""

import tomllib
from copy import deepcopy
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from fedcore.errors import UnknownNameError
from fedcore.experiment.presets.variants import merged, variants

Tables = dict[str, Any]


def names() -> list[str]:
    """The names of all presets, ``quickstart`` first, then file by file, a file's variants in its own order.

    >>> names()[0]
    'quickstart'
    """
    return [name for presets in _presets().values() for name in presets]


def files() -> list[tuple[str, list[list[str]]]]:
    """The files, and the names of their variants, table by table; none where a file is one preset.

    >>> dict(files())["mimic/table3"]
    [['tau20', 'tau50', 'tau100']]
    """
    return [(file, [list(axis) for axis in _read(file).get("variants", [])]) for file in _presets()]


def read(name: str) -> Tables:
    """The tables of one preset, with those of its base below them, not yet checked.

    Raises:
        UnknownNameError: there is no such preset.
    """
    for presets in _presets().values():
        if name in presets:
            return on_base(deepcopy(presets[name]))
    if name in _presets():
        raise UnknownNameError(
            f"preset: expected one, got {name!r}, which stands for several: take one of {', '.join(_presets()[name])}"
        )
    near, _, _ = str(UnknownNameError.of("preset", name, names())).partition(" (known")
    raise UnknownNameError(f"{near} (known: see `fedcore list`)")


def on_base(tables: Tables) -> Tables:
    """Tables with those of the preset that they name as their ``base`` below them.

    What the base's own family varies is not theirs.

    Raises:
        UnknownNameError: there is no such preset.
    """
    tables = dict(tables)
    base = tables.pop("base", None)
    if base is None:
        return tables
    below = read(base)
    below.get("pictures", {}).pop("varied", None)
    return merged(below, tables)


@cache
def _presets() -> dict[str, dict[str, Tables]]:
    """Every file's presets, as they stand there."""
    order = sorted(_files(), key=lambda name: (name != "quickstart", name))
    return {file: variants(file, _read(file)) for file in order}


def _read(file: str) -> Tables:
    return tomllib.loads(_files()[file].read_text(encoding="utf-8"))


def _files() -> dict[str, Traversable]:
    found: dict[str, Traversable] = {}
    folders = [("", resources.files("fedcore.experiment") / "presets")]
    while folders:
        prefix, folder = folders.pop()
        for entry in folder.iterdir():
            if entry.is_dir():
                folders.append((f"{prefix}{entry.name}/", entry))
            elif entry.name.endswith(".toml"):
                found[prefix + entry.name.removesuffix(".toml")] = entry
    return found
