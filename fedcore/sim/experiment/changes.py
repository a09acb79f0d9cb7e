"""Differences between an experiment and its preset, key by key."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

NO_RESULT = (
    *("name", "title", "description", "source", "note", "pictures", "changes", "inherited"),
    *("threads", "together", "device", "server_device"),
)
"""Keys that affect at most the rounding of results."""
SIZES = ("rounds", "seeds")
GRID = "grid."
LONGEST = 24
"""The maximum number of characters of a value in messages. For longer values, messages show only the key."""

Tables = Mapping[str, Any]


class Change(BaseModel):
    """A key whose value differs.

    Attributes:
        key: the dotted key, such as ``participation.p``.
        was, now: the value (or its name) in the preset and in this experiment; None if missing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    key: str
    was: Any = None
    now: Any = None

    def __str__(self) -> str:
        was, now = self.was, self.now
        if self.key == "seeds" and len(was) != len(now):
            was, now = len(was), len(now)
        text = f"{_written(was)} -> {_written(now)}"
        return f"{self.key} {text}" if len(text) <= 2 * LONGEST and self.key != "algorithms" else self.key


Changes = tuple[Change, ...]


def changes(preset: Tables, experiment: Tables) -> Changes:
    """Return the changes from a preset to an experiment, both given as JSON tables, in the order of the keys."""

    def comparable(tables: Tables) -> Tables:
        own = {key: value for key, value in tables.items() if key not in NO_RESULT}
        return own | {"algorithms": {method["label"]: method for method in tables.get("algorithms", ())}}

    return tuple(differences(comparable(preset), comparable(experiment)))


def combined(first: Iterable[Change], second: Iterable[Change]) -> Changes:
    """Return the total of two successive series of changes.

    >>> both = combined([Change(key="rounds", was=9, now=5)], [Change(key="rounds", was=5, now=9)])
    >>> both, text_of(combined([], [Change(key="rounds", was=9, now=5)]))
    ((), 'rounds 9 -> 5')
    """
    result = {change.key: change for change in first}
    for change in second:
        before = result.pop(change.key, change)
        if before.was != change.now:
            result[change.key] = Change(key=change.key, was=before.was, now=change.now)
    return tuple(result.values())


def at_point(changed: Iterable[Change], experiment: Tables, point: Tables) -> Changes:
    """Return the changes of one grid point, given its experiment's changes and the JSON tables of both.

    The values of a grid that the preset defines are not changes; the values of any other grid are.
    """
    changed = tuple(changed)
    keys = [change.key.removeprefix(GRID) for change in changed if change.key.startswith(GRID) and change.was is None]
    own = [one for one in changes(experiment, point) if any(_belongs_to(one.key, key) for key in keys)]
    return combined([change for change in changed if not change.key.startswith(GRID)], own)


def text_of(changed: Iterable[Change]) -> str:
    """Return changes as text, such as ``participation.p 0.1 -> 0.3``, without those of a grid, which points list."""
    return ", ".join(dict.fromkeys(str(change) for change in changed if not change.key.startswith(GRID)))


def value_at(tables: Tables, key: str) -> Any:
    """Return the value at a dotted key, the labels of algorithms, and the number of a constant rate.

    >>> value_at({"local": {"batch": 4}, "grid": {"rate.lr": [0.1]}}, "grid.rate.lr")
    [0.1]
    """
    if key in tables:
        value = number_of(tables[key])
        return [method["label"] for method in value] if key == "algorithms" else value
    first, _, rest = key.partition(".")
    below = tables.get(first)
    return value_at(below, rest) if rest and isinstance(below, Mapping) else None


def inherited_text(tables: Tables) -> str:
    """Return what a configuration has from the preset that its file extends, such as ``from quickstart: rounds = 9``.

    A value that was changed since, as in an extended run, is left out. The name of a table stands for the table.
    """
    lists = {
        preset: [
            f"{key.removesuffix('.name')} = {_written(value)}"
            for key, value in values.items()
            if value is not None and value == value_at(tables, key)
        ]
        for preset, values in tables.get("inherited", {}).items()
    }
    return "; ".join(f"from {preset}: {', '.join(values)}" for preset, values in lists.items() if values)


def incomparable(changed: Iterable[Change]) -> Changes:
    """Return the changes that make results incomparable: all but sizes, algorithms, grids, evaluations and reports."""
    harmless = (*SIZES, "algorithms")
    tables = (GRID, "evaluate.", "report.")
    return tuple(one for one in changed if one.key not in harmless and not one.key.startswith(tables))


def differences(was: Tables, now: Tables, prefix: str = "") -> Iterator[Change]:
    """Yield the changes between two tables in the order of their keys. ``prefix`` precedes each key."""
    if prefix == "algorithms." and list(was) != list(now):
        yield Change(key="algorithms", was=list(was), now=list(now))
        now = {label: method for label, method in now.items() if label in was}
        was = {label: method for label, method in was.items() if label in now}
    for key in dict.fromkeys((*now, *was)):
        before, after = number_of(was.get(key)), number_of(now.get(key))
        if isinstance(before, Mapping) and isinstance(after, Mapping) and before.get("name") == after.get("name"):
            yield from differences(before, after, f"{prefix}{key}.")
        elif before != after:
            yield Change(key=prefix + key, was=_name(before), now=_name(after))


def number_of(value: Any) -> Any:
    """Return the number of a table that represents one, such as a constant rate; return any other value unchanged."""
    return value["value"] if isinstance(value, Mapping) and value.keys() == {"name", "value"} else value


def _name(value: Any) -> Any:
    return value.get("name", value) if isinstance(value, Mapping) else value


def _written(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)


def _belongs_to(key: str, grid_key: str) -> bool:
    """Whether a change belongs to a grid key, such as ``rate.lr`` or ``algorithms.beta``."""
    table, _, option = grid_key.partition(".")
    if table == "algorithms":
        return key.startswith("algorithms.") and key.endswith(f".{option}")
    return key == grid_key or key.startswith(f"{grid_key}.")


def of_tables(tables: Tables) -> Changes:
    """Return the changes that a ``config.json`` lists; older files list none. Damaged ones raise a ``ValueError``."""
    listed = tables.get("changes", ())
    if not isinstance(listed, Sequence):
        raise ValueError(f"changes: must be a list, got {listed!r}")
    return tuple(Change.model_validate(change) for change in listed)
