"""A preset or a file, with what the command line changes in it, as a checked ``Experiment``."""

import copy
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fedcore import data
from fedcore.arguments import expanded
from fedcore.errors import ConfigError, FedcoreError, UnknownNameError
from fedcore.experiment import presets
from fedcore.experiment.datasets import load_once
from fedcore.experiment.presets.variants import FULL, SCALES, at_scale
from fedcore.experiment.schema.changes import Changes, changes, combined
from fedcore.experiment.schema.experiment import Experiment
from fedcore.experiment.schema.section import said, unknown_key
from fedcore.registries import look_in

OF_FAMILIES = {"data", "objective", "partition", "participation"}
"""The tables in which the presets of a family differ."""


def load_preset(
    name_or_path: str | Path, overrides: Sequence[str] = (), *, scale: Literal["full", "quick"] = "full"
) -> Experiment:
    """Read an experiment and check all of it.

    Args:
        name_or_path: the name of a preset, or the path of a ``.toml`` or ``.json`` file. A file may stand on a preset
            (``base``), and change what it says. The modules that a ``.toml`` file names (``module:Name``) may lie
            beside it: its folder is then the last of ``sys.path``.
        overrides: ``"table.key=value"``. Values are TOML (``5``, ``0.1``, ``[0, 1]``, ``{p = 0.3}``); bare
            words are strings, and ``none`` takes a key out. They come last, and ``Experiment.changes`` tells of them.
        scale: "full" is the size that the file describes, "quick" what its table ``quick`` makes of it.

    Raises:
        UnknownNameError: there is no such preset.
        ConfigError: the file cannot be read, or has unknown keys, missing ones or values out of range: all of
            them in one message.

    >>> load_preset("quickstart", ["rounds=2", "local.batch=8"]).local.batch
    8
    >>> load_preset("mimic/table3-tau20", scale="quick").rounds
    60
    """
    where = str(name_or_path)
    if scale not in SCALES:
        raise UnknownNameError.of("scale", scale, SCALES)
    whole, titled = _of_file(expanded(where)) if where.endswith((".toml", ".json")) else (presets.read(where), where)
    tables = at_scale(copy.deepcopy(whole), scale)
    if tables is None:
        raise ConfigError(f"{where}: expected a table 'quick' with what the small scale changes, found none")
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
    if changed & OF_FAMILIES:  # then its value in the family is no longer what the preset says
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
                f"{file}: expected one module with the name {name!r}, got two, {beside[0]} and "
                f"{', '.join(found) or 'one of the program'}: rename the first"
            )


def _natural_clients(where: str, tables: dict[str, Any]) -> int | None:
    """The clients of data of one's own, where the partition is the data's and leaves their number out.

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
        return len(data.natural(dataset, 1) if dataset.parts is None else dataset.parts)  # the former refuses it
    except UnknownNameError:
        return None  # which is refused by its key later
    except (FedcoreError, OSError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: data {name!r}: {error}") from error


def in_words(where: str, error: ValidationError) -> ConfigError:
    """The error that says what is wrong with an experiment's tables, all of it, a line each."""
    found = [f"{key}: {problem}" if key else problem for key, problem in _problems(error)]
    if len(found) == 1:
        return ConfigError(f"{where}: {found[0]}")
    return ConfigError(f"{where}: {len(found)} problems\n" + "\n".join(f"  {line}" for line in found))


def _table(tables: dict[str, Any], name: str) -> dict[str, Any]:
    """A table of the file; empty where there is none, or where something else stands, which is refused later."""
    found = tables.get(name)
    return found if isinstance(found, dict) else {}


def _of_file(path: Path) -> tuple[dict[str, Any], str]:
    """The tables of a file on those of its base, and the name of the preset whose title it bears; empty for its own."""
    tables = _read(path)
    base = tables.get("base", "")
    return presets.on_base(tables), base if "title" not in tables else ""


def _changes(experiment: Experiment, whole: dict[str, Any], titled: str) -> Changes:
    """The changes of an experiment against the preset that it is called for.

    That is the package's preset of its name, with which reports compare it; else the one whose title it bears; else the
    file that it was read from, where that is an experiment as it stands.

    Args:
        whole: the file's tables, or the preset's, at their own size.
        titled: the name of the preset whose title it bears, or empty.
    """
    called = experiment.name if experiment.name in presets.names() else titled
    before = presets.read(called) if called else whole
    try:
        full = Experiment.model_validate(at_scale(before, FULL))
    except ValidationError:
        return ()
    return combined(full.changes, changes(full.tables(), experiment.tables()))


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        tables = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"{path}: expected a TOML or JSON file, found none") from None
    except (OSError, ValueError) as error:  # both parsers raise ValueErrors that name the line
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(tables, dict):
        raise ConfigError(f"{path}: expected tables at the top, got {type(tables).__name__}")
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
            raise ConfigError(f"override {override!r}: expected {parent!r} to be a table, got {inner!r}")
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


def _problems(error: ValidationError) -> Iterator[tuple[str, str]]:
    for one in error.errors():
        yield from _spread(one)


def _spread(error: ErrorDetails) -> Iterator[tuple[str, str]]:
    place = [str(part) for part in error["loc"]]
    if error["type"] == "problems":
        for key, problem in error["ctx"]["found"].items():
            yield ".".join([*place, key] if key else place), problem
    elif error["type"] == "extra_forbidden":
        yield ".".join(place), unknown_key(place[-1], _keys(place[:-1]))
    else:
        yield ".".join(place), said(cast(dict[str, Any], error))


def _keys(place: list[str]) -> list[str]:
    """The keys that the table at this place has."""
    table: type[BaseModel] = Experiment
    for part in place:
        kinds = [table.model_fields[part].annotation]
        kinds += getattr(kinds[0], "__args__", ())  # the table of "table or none"
        table = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    return list(table.model_fields)
