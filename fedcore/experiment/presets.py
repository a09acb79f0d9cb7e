"""The presets: the TOML files of this package, by their path without the ending."""

import tomllib
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from fedcore.errors import UnknownNameError


def names() -> list[str]:
    """The names of all presets, ``quickstart`` first, then by name.

    >>> names()[0]
    'quickstart'
    """
    return sorted(_files(), key=lambda name: (name != "quickstart", name))


def read(name: str) -> dict[str, Any]:
    """The tables of one preset, not yet checked.

    Raises:
        UnknownNameError: there is no such preset.
    """
    files = _files()
    if name not in files:
        raise UnknownNameError.of("preset", name, files)
    return tomllib.loads(files[name].read_text(encoding="utf-8"))


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
