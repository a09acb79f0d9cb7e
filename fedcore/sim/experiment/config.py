"""Configurations of experiments: presets, configuration files, overrides, and grid points."""

import copy
import inspect
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import blake2b
from importlib import resources
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ValidationError

from fedcore import algorithms
from fedcore.arrays import I64, Vector
from fedcore.errors import ConfigError, FedcoreError, UnknownNameError
from fedcore.sim import data
from fedcore.sim.data import Dataset
from fedcore.sim.experiment.changes import NO_RESULT, Changes, at_point, changes, combined, value_at
from fedcore.sim.experiment.schema import Experiment, Key, Method, Trial, error_of, unknown_key
from fedcore.validation import add_to_path, expand_home, shallow

Tables = dict[str, Any]
Choice = tuple[tuple[str, Tables], ...]
"""The chosen entry of each table in ``variants``, with its name."""

FULL, QUICK = "full", "quick"
SCALES = (FULL, QUICK)
"""The size in the paper, and a size for two cores, whose changes the file's table ``quick`` lists."""
FAMILY_TABLES = {"data", "objective", "partition", "participation"}
"""The tables in which the presets of a family differ."""
METHODS = "algorithms."
"""The prefix of grid keys that are options of algorithms."""
WARM_START = "warm_start"


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Tables:
    """Return the tables merged; values of ``above`` override those of ``below``.

    Tables are merged recursively. But a table with a ``name`` replaces the one below, since options belong to the name.

    >>> merged({"rounds": 9, "local": {"batch": 4, "steps": 2}}, {"local": {"steps": 3}})
    {'rounds': 9, 'local': {'batch': 4, 'steps': 3}}
    >>> merged({"model": {"name": "mlp", "hidden": [8]}}, {"model": {"name": "mlp"}})
    {'model': {'name': 'mlp'}}
    """
    result = dict(below)
    for key, value in above.items():
        under = result.get(key)
        if isinstance(under, Mapping) and isinstance(value, Mapping) and "name" not in value:
            value = merged(under, value)
        result[key] = value
    return result


def variants(file: str, tables: Tables) -> dict[str, Tables]:
    """Return the presets of a file: one for each choice of one entry from every table in ``variants``.

    An entry's ``about`` is appended to the title. ``varies = { p = 0.1 }`` puts the preset into a family: the presets
    that differ only in the entry of this table.

    >>> both = variants("t", {"title": "T", "variants": [{"a": {"rounds": 1}, "b": {}}, {"x": {"about": "small"}}]})
    >>> both["t-a-x"]
    {'title': 'T: small', 'rounds': 1}
    >>> list(both)
    ['t-a-x', 't-b-x']
    >>> variants("t", {"title": "T", "variants": [{"p1": {"varies": {"p": 0.1}}}]})["t-p1"]["title"]
    'T: p = 0.1'
    """
    plain = {key: value for key, value in tables.items() if key != "variants"}
    presets = {}
    for choice in product(*(axis.items() for axis in tables.get("variants", []))):
        chosen = plain
        for _, entry in choice:
            chosen = merged(chosen, {key: value for key, value in entry.items() if key not in ("about", "varies")})
        varying = [position for position, (_, entry) in enumerate(choice) if "varies" in entry]
        if len(varying) > 1 or any(len(choice[position][1]["varies"]) != 1 for position in varying):
            raise ConfigError(f"{file}: 'varies' must be in one table of variants, with exactly one entry")
        for position in varying:
            others = choice[:position] + choice[position + 1 :]
            ((label, value),) = choice[position][1]["varies"].items()
            family = {"family": _name(file, others), "title": _title(chosen["title"], others)}
            chosen = merged(chosen, {"pictures": {"varied": family | {"label": label, "value": value}}})
        presets[_name(file, choice)] = chosen | (
            {"title": _title(chosen["title"], choice)} if "title" in chosen else {}
        )
    return presets


def _name(file: str, choice: Choice) -> str:
    return "-".join([file, *(name for name, _ in choice)])


def _title(title: str, choice: Choice) -> str:
    parts: list[str] = []
    for _, entry in choice:
        varied = [f"{label} = {value:g}" for label, value in entry.get("varies", {}).items()]
        parts += [entry["about"]] if "about" in entry else varied
    return f"{title}: {', '.join(parts)}" if parts else title


def at_scale(tables: Tables, scale: str) -> Tables | None:
    """Return the tables at a scale of ``SCALES``; None if the file has no quick scale."""
    plain = {key: value for key, value in tables.items() if key != QUICK}
    if scale == FULL:
        return plain
    return merged(plain, tables[QUICK]) if QUICK in tables else None


def names() -> list[str]:
    """Return the names of all presets: ``quickstart`` first, then by file, with variants in the order of the file.

    >>> names()[0]
    'quickstart'
    """
    return [name for presets in _presets().values() for name in presets]


def files() -> list[tuple[str, list[list[str]]]]:
    """Return each preset file with the names of its variants, table by table; the list is empty for a single preset.

    >>> dict(files())["mimic/table3"]
    [['tau20', 'tau50', 'tau100']]
    """
    return [(file, [list(axis) for axis in tables.get("variants", [])]) for file, tables in _files().items()]


def read(name: str) -> Tables:
    """Return the unvalidated tables of a preset, merged onto those of its base."""
    for presets in _presets().values():
        if name in presets:
            return on_base(copy.deepcopy(presets[name]))
    if name in _presets():
        raise UnknownNameError(f"preset={name!r}: has several variants; choose one of {', '.join(_presets()[name])}")
    near, _, _ = str(UnknownNameError.of("preset", name, names())).partition(" (known")
    raise UnknownNameError(f"{near} (known: see `fedcore list`)")


def on_base(tables: Tables) -> Tables:
    """Return the tables merged onto those of the preset that their ``base`` names, without the base's family."""
    tables = dict(tables)
    base = tables.pop("base", None)
    if base is None:
        return tables
    below = read(base)
    below.get("pictures", {}).pop("varied", None)
    data_of = [_as_table(one).get("name", one) for one in (below.get("data"), merged(below, tables).get("data"))]
    if data_of[0] != data_of[1]:
        below |= {"description": "", "source": ""}  # they describe the preset's data
    return merged(below, tables)


@cache
def _presets() -> dict[str, dict[str, Tables]]:
    return {file: variants(file, tables) for file, tables in _files().items()}


@cache
def _files() -> dict[str, Tables]:
    """Return the tables of every preset file in the package, ``quickstart`` first."""
    found: dict[str, Tables] = {}
    folders = [("", resources.files("fedcore.sim.experiment") / "presets")]
    while folders:
        prefix, folder = folders.pop()
        for entry in folder.iterdir():
            if entry.is_dir():
                folders.append((f"{prefix}{entry.name}/", entry))
            elif entry.name.endswith(".toml"):
                found[prefix + entry.name.removesuffix(".toml")] = tomllib.loads(entry.read_text(encoding="utf-8"))
    return {file: found[file] for file in sorted(found, key=lambda name: (name != "quickstart", name))}


def load_and_partition(experiment: Experiment, seed: int) -> tuple[Dataset, list[I64]]:
    """Return an experiment's data set, and the indices of each client's training examples, for a trial's seed.

    Only the data, the partition and ``validation`` of the experiment are used, so all algorithms of a comparison share
    the result.
    """
    clients, partition = experiment.partition.clients, experiment.partition
    dataset, _ = load_once(_data_key(experiment, seed))
    parts = data.divide(dataset, partition.name, clients, seed=seed, **partition.options)
    if experiment.validation is None:
        return dataset, parts
    return data.hold_out(dataset, parts, experiment.validation, seed=seed)


@lru_cache(maxsize=2)  # one process runs many trials on the same data
def load_once(key: Key) -> tuple[Dataset, str]:
    """Return the data set of a source, a name and options, and its ``data_hash``.

    The last two data sets are cached. ``run_jobs`` clears the cache, because files may have changed.
    """
    _, name, options = key
    dataset = data.load(name, **options)
    return dataset, data_hash(dataset)


def data_hash(dataset: Dataset) -> str:
    """Return a BLAKE2b hash of a data set's examples, labels and clients: 32 hexadecimal digits.

    Cost: about a second per GB.
    """
    hashed = blake2b(digest_size=16)
    parts = (*(dataset.parts or ()), *(dataset.test_parts or ()))
    arrays: list[Vector] = [dataset.train_x, dataset.train_y, dataset.test_x, dataset.test_y, *parts]
    for array in arrays:
        hashed.update(repr((array.shape, array.dtype.str)).encode())
        hashed.update(np.ascontiguousarray(array).data)
    return hashed.hexdigest()


def hashes(trial: Trial) -> tuple[str, list[str]]:
    """Return the hash of a trial's data set, and of each file of traces in its participation and its clock."""
    experiment = trial.experiment
    found: list[str] = []
    table: Any = experiment.participation.options
    while isinstance(table, Mapping):
        source = table.get("traces")
        if isinstance(source, str) and source.endswith(".csv"):
            found.append(blake2b(Path(source).read_bytes(), digest_size=16).hexdigest())
        table = table.get("among")
    if (clock := trial.clock) is not None and clock.trace is not None:
        found.append(blake2b(Path(clock.trace).read_bytes(), digest_size=16).hexdigest())
    return load_once(_data_key(experiment, trial.seed))[1], found


def _data_key(experiment: Experiment, seed: int) -> Key:
    own, clients = experiment.data, experiment.partition.clients
    more = {"clients": clients, "seed": seed} if own.source.generated else {}
    return Key((own.source, own.name, {**own.options, **more}))


def load_preset(
    name_or_path: str | Path,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    scale: Literal["full", "quick"] = "full",
) -> Experiment:
    """Load and validate the configuration of an experiment.

    Args:
        name_or_path: a preset's name, or the path of a ``.toml`` or ``.json`` file. A file may name a preset as its
            ``base``, and change it. The modules that a ``.toml`` file names (``module:Name``) may be in the file's
            folder, which is then appended to ``sys.path``.
        overrides: changes of the form ``"table.key=value"``, applied last; ``Experiment.changes`` lists them. Values
            are TOML (``5``, ``0.1``, ``[0, 1]``, ``{p = 0.3}``) or bare words, which are strings. ``none`` removes a
            key. Or a mapping of dotted keys to values, in which None removes a key.
        scale: "full" for the size in the file, "quick" to apply the changes in its table ``quick``.

    Raises:
        UnknownNameError: no preset has this name.
        ConfigError: the file cannot be read, or has unknown keys, missing keys or values out of range. The message
            lists all problems.

    >>> load_preset("quickstart", ["rounds=2", "local.batch=8"]).local.batch
    8
    >>> load_preset("mimic/table3-tau20", scale="quick").rounds
    60
    """
    where = str(name_or_path)
    if scale not in SCALES:
        raise UnknownNameError.of("scale", scale, SCALES)
    base, titled, of_file = "", where, Tables()
    if where.endswith((".toml", ".json")):
        of_file = _read_file(expand_home(where))
        base = of_file.get("base", "")
        whole, titled = on_base(of_file), "" if "title" in of_file else base
    else:
        whole = read(where)
    tables = at_scale(copy.deepcopy(whole), scale)
    if tables is None:
        raise ConfigError(f"{where}: has no table 'quick' with the changes of the quick scale; use scale='full'")
    name = Path(where.removesuffix(".toml").removesuffix(".json"))
    # A sweep creates a subfolder with this name. It must not lead out of the sweep's folder.
    tables.setdefault("name", name.name if name.is_absolute() or ".." in name.parts else name.as_posix())
    _apply(tables, overrides)
    keys = [key.partition("=")[0].strip() for key in (*overrides, *_table(tables, "grid"))]
    if where.endswith(".toml"):
        _find_modules_beside(Path(where), tables)
    inherited = _inherited(tables, of_file, read(base), scale, keys) if base else ()
    if (clients := _natural_clients(where, tables)) is not None:
        for each in (tables, whole):
            each["partition"] = {"name": "natural", "clients": clients}
    if {key.split(".")[0] for key in keys} & FAMILY_TABLES:  # it no longer has its preset's place in the family
        _table(tables, "pictures").pop("varied", None)
    try:
        experiment = Experiment.model_validate(tables | {"changes": ()})
        update: Tables = {"changes": _changes(experiment, whole, titled)}
        if base:
            resolved = experiment.tables()
            update["inherited"] = {base: {key: value_at(resolved, key) for key in inherited}}
        return experiment.model_copy(update=update)
    except ValidationError as error:
        raise config_error(where, error) from None


def from_tables(where: str, tables: Mapping[str, Any]) -> Experiment:
    """Return the experiment of JSON tables; ``where`` names them in errors."""
    try:
        return Experiment.model_validate_json(json.dumps(tables))
    except ValidationError as error:
        raise config_error(where, error) from None


def with_overrides(experiment: Experiment, overrides: Sequence[str] | Mapping[str, Any]) -> Experiment:
    """Return an experiment with overrides (see ``load_preset``), which its changes list."""
    tables = experiment.tables()
    _apply(tables, overrides)
    new = from_tables(experiment.name, tables)
    return new.model_copy(update={"changes": combined(experiment.changes, changes(experiment.tables(), new.tables()))})


def _find_modules_beside(file: Path, tables: Tables) -> None:
    """Append a file's folder to ``sys.path`` if it contains modules that the tables name; reject ambiguous names."""
    folder = file.parent.resolve()
    for name in dict.fromkeys(re.findall(r'"([A-Za-z_]\w*)[\w.]*:[A-Za-z_]', json.dumps(tables, default=str))):
        own = [folder / f"{name}.py", folder / name / "__init__.py", folder / name]
        own = [path.resolve() for path in own if path.exists()]
        if not own:
            continue
        add_to_path(folder)
        spec = sys.modules[name].__spec__ if name in sys.modules else find_spec(name)
        others = [*filter(None, [spec.origin, *(spec.submodule_search_locations or ())])] if spec else []
        if not any(Path(path).resolve() in own for path in others):
            raise ConfigError(
                f"{file}: two modules have the name {name!r}: {own[0]} and "
                f"{', '.join(others) or 'a module of the running program'}; rename the first"
            )


def _natural_clients(where: str, tables: Tables) -> int | None:
    """Load a user's data set and return its number of clients, if the natural partition does not set the number."""
    entries = [tables.get(key) for key in ("data", "partition")]
    options, partition = ({"name": one} if isinstance(one, str) else dict(_as_table(one)) for one in entries)
    name = options.pop("name", None)
    if partition != {"name": "natural"} or not isinstance(name, str) or name in data.REGISTRY.own:
        return None
    try:
        if data.REGISTRY.find(name).generated:
            return None
        dataset = data.load(name, **options)
        return len(data.natural(dataset, 1) if dataset.parts is None else dataset.parts)  # ``natural`` raises
    except UnknownNameError:
        return None  # the key's validator raises the error
    except (FedcoreError, OSError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: data {name!r}: {error}") from error


def config_error(where: str, error: ValidationError) -> ConfigError:
    """Return an error that lists all problems in an experiment's tables, one per line."""
    lines = error_of(error)
    if len(lines) == 1:
        return ConfigError(f"{where}: {lines[0]}")
    return ConfigError(f"{where}: {len(lines)} problems\n" + "\n".join(f"  {line}" for line in lines))


def _as_table(value: Any) -> Tables:
    """Return a table unchanged; for other values, which the validator rejects, return an empty table."""
    return value if isinstance(value, dict) else {}


def _table(tables: Tables, name: str) -> Tables:
    return _as_table(tables.get(name))


def _inherited(tables: Tables, of_file: Tables, base: Tables, scale: str, changed: Iterable[str]) -> list[str]:
    """Return the keys of ``tables`` that have their values from the file's base; ``changed`` are the overrides."""
    own = set(_keys(of_file))
    if scale == QUICK:
        own = own - set(_keys(_table(base, QUICK))) | set(_keys(_table(of_file, QUICK)))
    prefixes = tuple(f"{key}." for key in changed)
    return [key for key in _keys(tables) if key not in own and not f"{key}.".startswith(prefixes)]


def _keys(tables: Tables, prefix: str = "") -> Iterator[str]:
    """Yield the dotted key of each value on which results depend."""
    for key, value in tables.items():
        if isinstance(value, dict) and value and (prefix or key != QUICK):
            yield from _keys(value, f"{prefix}{key}.")
        elif prefix or key not in (*NO_RESULT, "base"):
            yield prefix + key


def _changes(experiment: Experiment, whole: Tables, titled: str) -> Changes:
    """Return an experiment's changes from its preset, or from its own file (``whole``) if it has no preset.

    The preset is the one with the experiment's name, to which reports compare it, else the one called ``titled``.
    """
    preset = experiment.name if experiment.name in names() else titled
    try:
        full = Experiment.model_validate(at_scale(read(preset) if preset else whole, FULL))
    except ValidationError:
        return ()
    return combined(full.changes, changes(full.tables(), experiment.tables()))


def _read_file(path: Path) -> Tables:
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows writes a mark
        tables = shallow(json.loads(text) if path.suffix == ".json" else tomllib.loads(text))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such TOML or JSON file") from None
    except (OSError, ValueError, RecursionError) as error:  # the ValueErrors of both parsers name the line
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(tables, dict):
        raise ConfigError(f"{path}: the top level must be a table, got {type(tables).__name__}")
    return tables


def _place(tables: Tables, key: str, where: str) -> tuple[Tables, str]:
    """Return the table that holds a dotted key, and the key in it; create missing tables."""
    *parents, last = key.split(".")
    for parent in parents:
        tables = tables.setdefault(parent, {})
        if not isinstance(tables, dict):
            raise ConfigError(f"{where}: {parent!r} must be a table, got {tables!r}")
    return tables, last


def _apply(tables: Tables, overrides: Sequence[str] | Mapping[str, Any]) -> None:
    """Apply overrides in place; their own tables do not change."""
    for key, value in overrides.items() if isinstance(overrides, Mapping) else map(_parsed, overrides):
        table, last = _place(tables, key, f"override {key!r}")
        if value is None:
            table.pop(last, None)
        else:
            table[last] = copy.deepcopy(value)


def _parsed(override: str) -> tuple[str, Any]:
    """Return the key and the value of an override."""
    key, sign, text = (part.strip() for part in override.partition("="))
    if not (key and sign and text):
        raise ConfigError(f"override {override!r}: must be KEY=VALUE, for example rate.lr=0.1")
    if text == "none":
        return key, None
    try:
        return key, shallow(tomllib.loads(f"value = {text}")["value"])
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, or a number of too many digits
        if not re.fullmatch(r"[A-Za-z][\w./-]*", text):
            raise ConfigError(f"override {override!r}: the value is neither TOML nor a bare word: {error}") from None
        return key, text


@dataclass(frozen=True)
class Point:
    """A grid point: its folder's name, and the experiment with its values and only the algorithms that they affect.

    The name is, for example, ``rate.lr=0.05,beta=0.2``; it is empty without a grid.
    """

    name: str
    experiment: Experiment


def points(experiment: Experiment) -> list[Point]:
    """Return all grid points of an experiment, or the experiment itself if it has no grid.

    A grid key is dotted, as in ``--set``. The values of a key ``algorithms.OPTION`` apply to the algorithms that have
    this option; the other algorithms run only once. A ConfigError reports keys or values that do not fit the
    experiment.

    >>> from fedcore.sim.experiment import load_preset
    >>> grid = "grid={'rate.lr'=[0.1, 0.2], 'algorithms.beta'=[0.5]}"
    >>> small = load_preset("quickstart", ["algorithms=['FedAvg', 'FedAvgM']", grid])
    >>> [(point.name, [method.label for method in point.experiment.algorithms]) for point in points(small)]
    [('rate.lr=0.1', ['FedAvg']), ('rate.lr=0.2', ['FedAvg']), ('rate.lr=0.1,beta=0.5', ['FedAvgM']), \
('rate.lr=0.2,beta=0.5', ['FedAvgM'])]
    """
    grid = {key: values for key, values in experiment.grid.items() if values}
    if fixed := [key for key in ("name", "seeds") if key in grid]:
        raise ConfigError(f"grid: {fixed[0]!r} cannot differ between points; remove it")
    _check_options([key for key in grid if key.startswith(METHODS)], experiment.algorithms)
    groups: dict[tuple[str, ...], list[Method]] = {}
    for method in experiment.algorithms:
        groups.setdefault(tuple(key for key in grid if _affects(key, method)), []).append(method)
    found: dict[str, Point] = {}
    for keys, methods in groups.items():
        for values in product(*(grid[key] for key in keys)):
            chosen = dict(zip(keys, values, strict=True))
            name = ",".join(f"{key.removeprefix(METHODS)}={_file_name(value)}" for key, value in chosen.items())
            if name in found:
                raise ConfigError(f"grid: two points have the name {name}; remove one of the two values")
            found[name] = Point(name, _at(experiment, methods, chosen, name))
    return list(found.values())


def _check_options(keys: Iterable[str], methods: Iterable[Method]) -> None:
    """Require that a registered algorithm, or one of the experiment's, has each option."""
    makers: list[Callable[..., Any]] = [*algorithms.REGISTRY.values(), *(method.maker() for method in methods)]
    known = {WARM_START, *(option for maker in makers for option in inspect.signature(maker).parameters)}
    for key in keys:
        if (option := key.removeprefix(METHODS)) not in known:
            raise ConfigError(f"grid: {key}: {unknown_key(option, sorted(known))}")


def _affects(key: str, method: Method) -> bool:
    if not key.startswith(METHODS):
        table, _, own = key.partition(".")
        return table not in ("rate", "local") or own.split(".")[0] not in (getattr(method, table) or {})
    option = key.removeprefix(METHODS)
    if option == WARM_START:
        return bool(method.make().takes_warm_start)
    return option in inspect.signature(method.maker()).parameters


def _at(experiment: Experiment, methods: list[Method], chosen: Mapping[str, Any], name: str) -> Experiment:
    whole = experiment.tables()
    tables = copy.deepcopy(whole)
    del tables["grid"]
    tables["algorithms"] = [json.loads(method.model_dump_json(exclude_none=True)) for method in methods]
    for key, value in chosen.items():
        if key.startswith(METHODS):
            for method in tables["algorithms"]:
                method[key.removeprefix(METHODS)] = value
            continue
        table, last = _place(tables, key, f"grid: {key}")
        table[last] = value
    point = from_tables(f"grid: {experiment.name} at {name}", tables)
    return point.model_copy(update={"changes": at_point(experiment.changes, whole, point.tables())})


def _file_name(value: Any) -> str:
    return re.sub(r"[^\w.-]", "_", value if isinstance(value, str) else json.dumps(value))
