"""The points of a sweep: a preset's experiment with every combination of the values in its ``grid``."""

import copy
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from pydantic import ValidationError

from fedcore import algorithms
from fedcore.errors import ConfigError
from fedcore.experiment.presets.loading import in_words
from fedcore.experiment.schema.changes import at_point
from fedcore.experiment.schema.experiment import Experiment, Method
from fedcore.experiment.schema.section import unknown_key

OF_SWEEP = ("name", "seeds")
"""Keys by which all points are known, so that no grid varies them."""
OF_METHODS = "algorithms."
"""What a key of the grid begins with where it is an option of those algorithms that have it."""
WARM_START = "warm_start"


@dataclass(frozen=True)
class Point:
    """One combination.

    Attributes:
        name: the combination as the name of a folder, ``rate.lr=0.05,beta=0.2``; empty without a grid.
        experiment: the experiment with it, and with the algorithms that it concerns.
    """

    name: str
    experiment: Experiment


def points(experiment: Experiment) -> list[Point]:
    """All points of an experiment's grid; the experiment itself where it has none.

    A key is a dotted one, as ``--set`` takes it, or ``algorithms.OPTION``: then it is tried on the algorithms that have
    this option, and the others do not run again for each of its values.

    Raises:
        ConfigError: a key or a value is not one that the experiment takes.

    >>> from fedcore.experiment import load_preset
    >>> grid = "grid={'rate.lr'=[0.1, 0.2], 'algorithms.beta'=[0.5]}"
    >>> small = load_preset("quickstart", ["algorithms=['FedAvg', 'FedAvgM']", grid])
    >>> [(point.name, [method.label for method in point.experiment.algorithms]) for point in points(small)]
    [('rate.lr=0.1', ['FedAvg']), ('rate.lr=0.2', ['FedAvg']), ('rate.lr=0.1,beta=0.5', ['FedAvgM']), \
('rate.lr=0.2,beta=0.5', ['FedAvgM'])]
    """
    grid = {key: values for key, values in experiment.grid.items() if values}
    if fixed := [key for key in OF_SWEEP if key in grid]:
        raise ConfigError(f"grid: expected no {fixed[0]!r}, which all points share, got it: leave it out")
    _check_options([key for key in grid if key.startswith(OF_METHODS)], experiment.algorithms)
    groups: dict[tuple[str, ...], list[Method]] = {}
    for method in experiment.algorithms:
        groups.setdefault(tuple(key for key in grid if _concerns(key, method)), []).append(method)
    found: list[Point] = []
    for keys, methods in groups.items():
        for values in product(*(grid[key] for key in keys)):
            chosen = dict(zip(keys, values, strict=True))
            name = ",".join(f"{key.removeprefix(OF_METHODS)}={_written(value)}" for key, value in chosen.items())
            if name in (point.name for point in found):
                raise ConfigError(f"grid: expected points of different names, got {name} twice: leave one out")
            found.append(Point(name, _at(experiment, methods, chosen, name)))
    return found


def _check_options(keys: Iterable[str], methods: Iterable[Method]) -> None:
    """See that some algorithm has each option, one of the experiment's or not: they may be left out of it."""
    makers: list[Callable[..., Any]] = [*algorithms.REGISTRY.values(), *(method.maker() for method in methods)]
    known = {WARM_START, *(option for maker in makers for option in inspect.signature(maker).parameters)}
    for key in keys:
        if (option := key.removeprefix(OF_METHODS)) not in known:
            raise ConfigError(f"grid: {key}: {unknown_key(option, sorted(known))}")


def _concerns(key: str, method: Method) -> bool:
    if not key.startswith(OF_METHODS):
        return True
    option = key.removeprefix(OF_METHODS)
    if option == WARM_START:
        return method.make().takes_warm_start
    return option in inspect.signature(method.maker()).parameters


def _at(experiment: Experiment, methods: list[Method], chosen: Mapping[str, Any], name: str) -> Experiment:
    whole = experiment.tables()
    tables = copy.deepcopy(whole)
    del tables["grid"]
    tables["algorithms"] = [json.loads(method.model_dump_json(exclude_none=True)) for method in methods]
    for key, value in chosen.items():
        if key.startswith(OF_METHODS):
            for method in tables["algorithms"]:
                method[key.removeprefix(OF_METHODS)] = value
            continue
        *parents, last = key.split(".")
        table = tables
        for parent in parents:
            table = table.get(parent, {})
        if last not in table:
            raise ConfigError(f"grid: expected the key of a value that the experiment has, got {key!r}")
        table[last] = value
    try:
        point = Experiment.model_validate_json(json.dumps(tables))
    except ValidationError as error:
        raise in_words(f"grid: {experiment.name} at {name}", error) from None
    return point.model_copy(update={"changes": at_point(experiment.changes, whole, point.tables())})


def _written(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return "".join(letter if letter.isalnum() or letter in ".-_" else "_" for letter in text)
