"""In what an experiment differs from its preset, key by key."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

BESIDES = (
    *("name", "title", "description", "source", "pictures", "changes"),
    *("threads", "together", "device", "server_device"),
)
"""The keys on which no result depends, except for its rounding."""
SIZES = ("rounds", "seeds")
"""The keys of its length."""
GRID = "grid."
"""The beginning of a key of the grid, which a sweep tries."""
LONGEST = 24
"""Characters of a value in messages; of longer ones only the key is named."""

Tables = Mapping[str, Any]


class Change(BaseModel):
    """One key that has another value.

    Attributes:
        key: dotted, ``participation.p``.
        was: the preset's value, or its name, or None.
        now: this experiment's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    key: str
    was: Any = None
    now: Any = None

    def __str__(self) -> str:
        was, now = self.was, self.now
        if self.key == "seeds" and len(was) != len(now):
            was, now = len(was), len(now)
        words = f"{_written(was)} -> {_written(now)}"
        return f"{self.key} {words}" if len(words) <= 2 * LONGEST and self.key != "algorithms" else self.key


Changes = tuple[Change, ...]


def changes(preset: Tables, experiment: Tables) -> Changes:
    """The changes of an experiment against a preset, in the order of its keys.

    Args:
        preset, experiment: two experiments, as JSON has them.
    """
    return tuple(differences(_comparable(preset), _comparable(experiment)))


def combined(first: Iterable[Change], second: Iterable[Change]) -> Changes:
    """Two changes one after the other as one.

    >>> both = combined([Change(key="rounds", was=9, now=5)], [Change(key="rounds", was=5, now=9)])
    >>> both, said(combined([], [Change(key="rounds", was=9, now=5)]))
    ((), 'rounds 9 -> 5')
    """
    found = {change.key: change for change in first}
    for change in second:
        before = found.pop(change.key, change)
        if before.was != change.now:
            found[change.key] = Change(key=change.key, was=before.was, now=change.now)
    return tuple(found.values())


def at_point(changed: Iterable[Change], experiment: Tables, point: Tables) -> Changes:
    """The changes of one point of an experiment's grid.

    The values of the preset's own grid are no changes; those of another grid are.

    Args:
        changed: the experiment's.
        experiment, point: as JSON has them.
    """
    changed = tuple(changed)
    tried = [change.key.removeprefix(GRID) for change in changed if change.key.startswith(GRID) and change.was is None]
    here = [one for one in changes(experiment, point) if any(_is_of(one.key, key) for key in tried)]
    return combined([change for change in changed if not change.key.startswith(GRID)], here)


def said(changed: Iterable[Change]) -> str:
    """Changes in words, ``participation.p 0.1 -> 0.3``, without those of a grid, which its points have."""
    return ", ".join(dict.fromkeys(str(change) for change in changed if not change.key.startswith(GRID)))


def other_figures(changed: Iterable[Change]) -> Changes:
    """The changes after which results are no longer comparable.

    Another size is none of them, nor are more algorithms, or how often they are evaluated.
    """
    harmless = (*SIZES, "algorithms")
    return tuple(one for one in changed if one.key not in harmless and not one.key.startswith((GRID, "evaluate.")))


def _comparable(experiment: Tables) -> dict[str, Any]:
    tables = {key: value for key, value in experiment.items() if key not in BESIDES}
    methods = {method["label"]: method for method in tables.get("algorithms", ())}
    return tables | {"algorithms": methods}


def differences(was: Tables, now: Tables, prefix: str = "") -> Iterator[Change]:
    """The changes from some tables to others, in the order of their keys, each key after this prefix."""
    if prefix == "algorithms." and list(was) != list(now):
        yield Change(key="algorithms", was=list(was), now=list(now))
        now = {label: method for label, method in now.items() if label in was}
        was = {label: method for label, method in was.items() if label in now}
    for key in dict.fromkeys((*now, *was)):
        before, after = plain(was.get(key)), plain(now.get(key))
        if isinstance(before, Mapping) and isinstance(after, Mapping) and before.get("name") == after.get("name"):
            yield from differences(before, after, f"{prefix}{key}.")
        elif before != after:
            yield Change(key=prefix + key, was=_name(before), now=_name(after))


def plain(value: Any) -> Any:
    """A value; of a number that was written as a table, such as a constant rate, the number."""
    return value["value"] if isinstance(value, Mapping) and value.keys() == {"name", "value"} else value


def _name(value: Any) -> Any:
    return value.get("name", value) if isinstance(value, Mapping) else value


def _is_of(key: str, tried: str) -> bool:
    """Whether a change belongs to a key of the grid, ``rate.lr`` or ``algorithms.beta``."""
    of, _, option = tried.partition(".")
    if of == "algorithms":
        return key.startswith("algorithms.") and key.endswith(f".{option}")
    return key == tried or key.startswith(f"{tried}.")


def _written(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def of_tables(tables: Tables) -> Changes:
    """The changes that an experiment's ``config.json`` names; older ones name none.

    Raises:
        ValueError: they are damaged.
    """
    found = tables.get("changes", ())
    if not isinstance(found, Sequence):
        raise ValueError(f"changes: expected a list, got {found!r}")
    return tuple(Change.model_validate(change) for change in found)
