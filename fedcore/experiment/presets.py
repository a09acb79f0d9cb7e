"""Presets: the package's TOML files and the user's, with their variants, grids and overrides."""

import copy
import inspect
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from fedcore import algorithms
from fedcore.arguments import expanded
from fedcore.errors import ConfigError, FedcoreError, UnknownNameError
from fedcore.experiment.changes import Changes, at_point, changes, combined
from fedcore.experiment.schema import Experiment, Method, unknown_key
from fedcore.registries import look_in
from fedcore.simulation import data
from fedcore.simulation.data import Dataset

Tables = dict[str, Any]
Choice = tuple[tuple[str, Tables], ...]
"""One entry of each table of a file's ``variants``, with its name."""

OF_VARIANTS = ("about", "varies")
"""The keys of an entry that are no configuration."""

FULL, QUICK = "full", "quick"
SCALES = (FULL, QUICK)
"""The paper's own size, and one for two cores: what the file's table ``quick`` changes."""
OF_FAMILIES = {"data", "objective", "partition", "participation"}
"""The tables in which the presets of a family differ."""
OF_SWEEP = ("name", "seeds")
"""Keys by which all points are known, so that no grid varies them."""
OF_METHODS = "algorithms."
"""What a key of the grid begins with where it is an option of those algorithms that have it."""
WARM_START = "warm_start"


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Tables:
    """Two tables as one: the values of ``above`` hold, key by key.

    A table with another ``name`` than the one below it replaces it, since options belong to the name; every other table
    is merged in turn.

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

    An entry's ``about`` goes into the title. One with ``varies = { p = 0.1 }`` is one of a family: the presets that
    differ only in this table.

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
        for _, entry in choice:
            chosen = merged(chosen, {key: value for key, value in entry.items() if key not in OF_VARIANTS})
        varying = [place for place, (_, entry) in enumerate(choice) if "varies" in entry]
        if len(varying) > 1 or any(len(choice[place][1]["varies"]) != 1 for place in varying):
            raise ConfigError(f"{file}: at most one table of variants may have 'varies', with one number in it")
        for place, (_, entry) in enumerate(choice):
            for label, value in entry.get("varies", {}).items():
                others = choice[:place] + choice[place + 1 :]
                family = {"family": _name(file, others), "title": _title(chosen["title"], others)}
                chosen = merged(chosen, {"pictures": {"varied": family | {"label": label, "value": value}}})
        found[_name(file, choice)] = chosen | ({"title": _title(chosen["title"], choice)} if "title" in chosen else {})
    return found


def _name(file: str, choice: Choice) -> str:
    return "-".join([file, *(name for name, _ in choice)])


def _title(title: str, choice: Choice) -> str:
    parts: list[str] = []
    for _, entry in choice:
        varied = [f"{label} = {value:g}" for label, value in entry.get("varies", {}).items()]
        parts += [entry["about"]] if "about" in entry else varied
    return f"{title}: {', '.join(parts)}" if parts else title


def at_scale(tables: Tables, scale: str) -> Tables | None:
    """The tables at one of the ``SCALES``; None if the file has no small one."""
    plain = {key: value for key, value in tables.items() if key != QUICK}
    if scale == FULL:
        return plain
    return merged(plain, tables[QUICK]) if QUICK in tables else None


def names() -> list[str]:
    """The names of all presets, ``quickstart`` first, then file by file, a file's variants in its own order.

    >>> names()[0]
    'quickstart'
    """
    return [name for presets in _presets().values() for name in presets]


def files() -> list[tuple[str, list[list[str]]]]:
    """The files, and the names of their variants, table by table; none if a file is one preset.

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
            return on_base(copy.deepcopy(presets[name]))
    if name in _presets():
        raise UnknownNameError(f"preset={name!r}: it stands for several: take one of {', '.join(_presets()[name])}")
    near, _, _ = str(UnknownNameError.of("preset", name, names())).partition(" (known")
    raise UnknownNameError(f"{near} (known: see `fedcore list`)")


def on_base(tables: Tables) -> Tables:
    """Tables with those of the preset that they name as their ``base`` below them.

    The family of the base is not theirs.

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
    """Every file's presets."""
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


def load_and_partition(experiment: Experiment, seed: int) -> tuple[Dataset, list[npt.NDArray[np.int64]]]:
    """The data set of an experiment, and the indices of the training examples that each client holds.

    Args:
        experiment: only its data and partition matter.
        seed: a trial's seed.

    Raises:
        FedcoreError: the data is missing, or cannot be divided so.

    Determinism: only the arguments matter, so that every algorithm of a comparison gets the same.
    """
    clients, partition = experiment.partition.clients, experiment.partition
    given = {"clients": clients, "seed": seed} if experiment.data.source.generated else {}
    dataset = load_once(experiment.data.name, tuple({**experiment.data.options, **given}.items()))
    return dataset, data.divide(dataset, partition.name, clients, seed=seed, **partition.options)


@lru_cache(maxsize=2)  # a process runs many trials on the same data
def load_once(name: str, options: tuple[tuple[str, Any], ...]) -> Dataset:
    """The data set of that name, or the one that was loaded before."""
    return data.load(name, **dict(options))


def load_preset(
    name_or_path: str | Path, overrides: Sequence[str] = (), *, scale: Literal["full", "quick"] = "full"
) -> Experiment:
    """Read an experiment and check all of it.

    Args:
        name_or_path: the name of a preset, or the path of a ``.toml`` or ``.json`` file. A file may have a
            preset as its ``base``, and change it. The modules that a ``.toml`` file names (``module:Name``) may lie
            beside it: its folder is then the last of ``sys.path``.
        overrides: ``"table.key=value"``. Values are TOML (``5``, ``0.1``, ``[0, 1]``, ``{p = 0.3}``); bare
            words are strings, and ``none`` removes a key. They come last, and ``Experiment.changes`` lists them.
        scale: "full" is the size that the file describes, "quick" has the changes of its table ``quick``.

    Raises:
        UnknownNameError: there is no such preset.
        ConfigError: the file cannot be read, or has unknown keys, missing ones or values out of range: one
            message has them all.

    >>> load_preset("quickstart", ["rounds=2", "local.batch=8"]).local.batch
    8
    >>> load_preset("mimic/table3-tau20", scale="quick").rounds
    60
    """
    where = str(name_or_path)
    if scale not in SCALES:
        raise UnknownNameError.of("scale", scale, SCALES)
    whole, titled = _of_file(expanded(where)) if where.endswith((".toml", ".json")) else (read(where), where)
    tables = at_scale(copy.deepcopy(whole), scale)
    if tables is None:
        raise ConfigError(f"{where}: expected a table 'quick' with the changes of the small scale, found none")
    name = Path(where.removesuffix(".toml").removesuffix(".json"))
    # A sweep has a folder of this name in its own, which the experiment's field keeps from leading out of there.
    tables.setdefault("name", name.name if name.is_absolute() or ".." in name.parts else name.as_posix())
    for override in overrides:
        _apply(tables, override)
    if where.endswith(".toml"):
        _find_modules_beside(Path(where), tables)
    if (clients := _natural_clients(where, tables)) is not None:
        for each in (tables, whole):
            each["partition"] = {"name": "natural", "clients": clients}
    changed = {re.split(r"[.=]", key.strip())[0].strip() for key in (*overrides, *_table(tables, "grid"))}
    if changed & OF_FAMILIES:  # then its value in the family is another one
        _table(tables, "pictures").pop("varied", None)
    try:
        experiment = Experiment.model_validate(tables | {"changes": ()})
        return experiment.model_copy(update={"changes": _changes(experiment, whole, titled)})
    except ValidationError as error:
        raise in_words(where, error) from None


def _find_modules_beside(file: Path, tables: dict[str, Any]) -> None:
    """Let the modules that a file's tables name be found in its folder.

    Raises:
        ConfigError: another module of the same name comes first.
    """
    folder = file.parent.resolve()
    for name in dict.fromkeys(re.findall(r'"([A-Za-z_]\w*)[\w.]*:[A-Za-z_]', json.dumps(tables, default=str))):
        beside = [folder / f"{name}.py", folder / name / "__init__.py", folder / name]
        beside = [place.resolve() for place in beside if place.exists()]
        if not beside:
            continue
        look_in(folder)
        spec = sys.modules[name].__spec__ if name in sys.modules else find_spec(name)
        found = (
            []
            if spec is None
            else [place for place in (spec.origin, *(spec.submodule_search_locations or ())) if place]
        )
        if not any(Path(place).resolve() in beside for place in found):
            raise ConfigError(
                f"{file}: there are two modules with the name {name!r}, {beside[0]} and "
                f"{', '.join(found) or 'one of the program'}: rename the first"
            )


def _natural_clients(where: str, tables: dict[str, Any]) -> int | None:
    """The number of clients of a user's data set, if the partition is the data's and leaves it out.

    Cost: the data is loaded.
    """
    options, partition = (
        {"name": named} if isinstance(named := tables.get(key), str) else dict(_table(tables, key))
        for key in ("data", "partition")
    )
    name = options.pop("name", None)
    if partition != {"name": "natural"} or not isinstance(name, str) or name in data.REGISTRY.own:
        return None
    try:
        if data.REGISTRY.find(name).generated:
            return None
        dataset = load_once(name, tuple(options.items()))
        return len(data.natural(dataset, 1) if dataset.parts is None else dataset.parts)  # ``natural`` refuses it
    except UnknownNameError:
        return None  # which its key's validator refuses
    except (FedcoreError, OSError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: data {name!r}: {error}") from error


def in_words(where: str, error: ValidationError) -> ConfigError:
    """The error with all problems of an experiment's tables, a line each."""
    found = []
    for one in error.errors():
        text = one["msg"] if one["type"] in ("problem", "missing") else f"{one['msg']}, got {one['input']!r:.100}"
        found.append(": ".join([*filter(None, [".".join(map(str, one["loc"]))]), text]))
    if len(found) == 1:
        return ConfigError(f"{where}: {found[0]}")
    return ConfigError(f"{where}: {len(found)} problems\n" + "\n".join(f"  {line}" for line in found))


def _table(tables: dict[str, Any], name: str) -> dict[str, Any]:
    """A table of the file; empty if it is missing, or no table, which its validator refuses."""
    found = tables.get(name)
    return found if isinstance(found, dict) else {}


def _of_file(path: Path) -> tuple[dict[str, Any], str]:
    """The tables of a file on those of its base, and the name of the preset whose title it bears; empty for its own."""
    tables = _read_file(path)
    base = tables.get("base", "")
    return on_base(tables), base if "title" not in tables else ""


def _changes(experiment: Experiment, whole: dict[str, Any], titled: str) -> Changes:
    """The changes of an experiment against the preset that it is called for.

    That is the package's preset of its name, with which reports compare it; else the one whose title it bears; else its
    file, if that is an experiment without changes.

    Args:
        whole: the file's tables, or the preset's, at their own size.
        titled: the name of the preset whose title it bears, or empty.
    """
    called = experiment.name if experiment.name in names() else titled
    before = read(called) if called else whole
    try:
        full = Experiment.model_validate(at_scale(before, FULL))
    except ValidationError:
        return ()
    return combined(full.changes, changes(full.tables(), experiment.tables()))


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        tables = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such TOML or JSON file") from None
    except (OSError, ValueError) as error:  # both parsers raise ValueErrors that name the line
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(tables, dict):
        raise ConfigError(f"{path}: must hold tables at the top, got {type(tables).__name__}")
    return tables


def _apply(tables: dict[str, Any], override: str) -> None:
    key, sign, text = (part.strip() for part in override.partition("="))
    if not (key and sign and text):
        raise ConfigError(f"override: expected KEY=VALUE, like rate.lr=0.1, got {override!r}")
    *parents, last = key.split(".")
    table = tables
    for parent in parents:
        inner = table.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override {override!r}: {parent!r} must be a table, got {inner!r}")
        table = inner
    if text == "none":
        table.pop(last, None)
    else:
        table[last] = _value(override, text)


def _value(override: str, text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        if re.fullmatch(r"[A-Za-z][\w./-]*", text):
            return text
        raise ConfigError(f"override {override!r}: the value is neither TOML nor a bare word: {error}") from None


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
    """All points of an experiment's grid; the experiment itself if it has none.

    A key is a dotted one, as ``--set`` takes it, or ``algorithms.OPTION``: then it is tried on the algorithms that have
    this option, and the others do not run again for each of its values.

    Raises:
        ConfigError: a key or a value does not fit the experiment.

    >>> from fedcore.experiment import load_preset
    >>> grid = "grid={'rate.lr'=[0.1, 0.2], 'algorithms.beta'=[0.5]}"
    >>> small = load_preset("quickstart", ["algorithms=['FedAvg', 'FedAvgM']", grid])
    >>> [(point.name, [method.label for method in point.experiment.algorithms]) for point in points(small)]
    [('rate.lr=0.1', ['FedAvg']), ('rate.lr=0.2', ['FedAvg']), ('rate.lr=0.1,beta=0.5', ['FedAvgM']), \
('rate.lr=0.2,beta=0.5', ['FedAvgM'])]
    """
    grid = {key: values for key, values in experiment.grid.items() if values}
    if fixed := [key for key in OF_SWEEP if key in grid]:
        raise ConfigError(f"grid: all points share {fixed[0]!r}: leave it out")
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
                raise ConfigError(f"grid: two points have the name {name}: leave one out")
            found.append(Point(name, _at(experiment, methods, chosen, name)))
    return found


def _check_options(keys: Iterable[str], methods: Iterable[Method]) -> None:
    """Require that some algorithm has each option; the experiment may leave it out."""
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
        return bool(method.make().takes_warm_start)
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
            raise ConfigError(f"grid: the experiment has no key {key!r}")
        table[last] = value
    try:
        point = Experiment.model_validate_json(json.dumps(tables))
    except ValidationError as error:
        raise in_words(f"grid: {experiment.name} at {name}", error) from None
    return point.model_copy(update={"changes": at_point(experiment.changes, whole, point.tables())})


def _written(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return "".join(letter if letter.isalnum() or letter in ".-_" else "_" for letter in text)
