"""Variants: many presets in one TOML file, the tables that lie on one another, and the names of the combinations."""

from collections.abc import Mapping
from itertools import product
from typing import Any

from fedcore.errors import ConfigError

Tables = dict[str, Any]
Choice = tuple[tuple[str, Tables], ...]
"""One entry of each table of a file's ``variants``, with its name."""

OF_VARIANTS = ("about", "varies")
"""The keys of an entry that are no configuration."""

FULL, QUICK = "full", "quick"
SCALES = (FULL, QUICK)
"""The paper's own size, and one for two cores: what the file's table ``quick`` changes."""


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Tables:
    """Two tables as one: what ``above`` says holds, key by key.

    A table that names something else than the one below it takes its place as a whole, since options belong to what
    is named; every other table is merged in turn.

    >>> merged({"rounds": 9, "local": {"batch": 4, "steps": 2}}, {"local": {"steps": 3}})
    {'rounds': 9, 'local': {'batch': 4, 'steps': 3}}
    >>> merged({"model": {"name": "mlp", "hidden": [8]}}, {"model": {"name": "lenet"}})
    {'model': {'name': 'lenet'}}
    """
    result = dict(below)
    for key, value in above.items():
        under = result.get(key)
        if isinstance(under, Mapping) and isinstance(value, Mapping):
            renamed = "name" in value and value["name"] != under.get("name")
            result[key] = dict(value) if renamed else merged(under, value)
        else:
            result[key] = value
    return result


def variants(file: str, tables: Tables) -> dict[str, Tables]:
    """The presets of one file: one for each way to take one entry from every table of its ``variants``.

    An entry's ``about`` goes into the title. One that ``varies`` something (``varies = { p = 0.1 }``) is one of a
    family: the presets that differ in this table alone.

    >>> both = variants("t", {"title": "T", "variants": [{"a": {"rounds": 1}, "b": {}}, {"x": {"about": "small"}}]})
    >>> both["t-a-x"]
    {'title': 'T: small', 'rounds': 1}
    >>> list(both)
    ['t-a-x', 't-b-x']
    >>> variants("t", {"title": "T", "variants": [{"p1": {"varies": {"p": 0.1}}}]})["t-p1"]["title"]
    'T: p = 0.1'
    """
    plain = {key: value for key, value in tables.items() if key != "variants"}
    found = {}
    for choice in product(*(axis.items() for axis in tables.get("variants", []))):
        chosen = plain
        for _, changes in choice:
            chosen = merged(chosen, {key: value for key, value in changes.items() if key not in OF_VARIANTS})
        varying = [place for place, (_, changes) in enumerate(choice) if "varies" in changes]
        if len(varying) > 1 or any(len(choice[place][1]["varies"]) != 1 for place in varying):
            raise ConfigError(
                f"{file}: expected one table of variants that varies, and one number in it, got more of them"
            )
        for place, (_, changes) in enumerate(choice):
            for label, value in changes.get("varies", {}).items():
                others = choice[:place] + choice[place + 1 :]
                family = {"family": _name(file, others), "title": _title(chosen["title"], others)}
                chosen = merged(chosen, {"pictures": {"varied": family | {"label": label, "value": value}}})
        found[_name(file, choice)] = chosen | ({"title": _title(chosen["title"], choice)} if "title" in chosen else {})
    return found


def _name(file: str, choice: Choice) -> str:
    return "-".join([file, *(name for name, _ in choice)])


def _title(title: str, choice: Choice) -> str:
    said: list[str] = []
    for _, changes in choice:
        varied = [f"{label} = {value:g}" for label, value in changes.get("varies", {}).items()]
        said += [changes["about"]] if "about" in changes else varied
    return f"{title}: {', '.join(said)}" if said else title


def at_scale(tables: Tables, scale: str) -> Tables | None:
    """The tables at one of the ``SCALES``; None where the file has none for the small one."""
    plain = {key: value for key, value in tables.items() if key != QUICK}
    if scale == FULL:
        return plain
    return merged(plain, tables[QUICK]) if QUICK in tables else None
