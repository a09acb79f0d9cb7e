"""A run's folder: what was run, by which build, and the records."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from fedcore.atomic_file import replacing, require_file
from fedcore.devices import CPU
from fedcore.errors import ConfigError, DeviceError, MissingDataError
from fedcore.experiment.schema.experiment import Experiment
from fedcore.runtime import build_info

CONFIG, BUILD = "config.json", "build.json"


def default_folder(experiment: Experiment) -> Path:
    """``runs/<preset>-<date>-<time>`` in the working directory."""
    return Path("runs", f"{experiment.name.replace('/', '-') or 'run'}-{datetime.now():%Y%m%d-%H%M%S}")


def runs_in(folder: Path) -> list[Path]:
    """The folder itself where it is a run's, else the runs below it, as a sweep has them.

    A folder without any counts as a run's, whose configuration may be lost.
    """
    if (folder / CONFIG).exists():
        return [folder]
    return sorted(path.parent for path in folder.rglob(CONFIG)) or [folder]


def begun_runs(folder: Path) -> list[Path]:
    """A folder's runs that have records.

    Raises:
        MissingDataError: there are none.
    """
    if found := [run for run in runs_in(folder) if any((run / "records").glob("*.jsonl"))]:
        return found
    raise MissingDataError(
        f"{folder}: expected the folder of a run or a sweep, found no records in it; fedcore run writes them"
    )


def prepare(
    folder: Path, experiment: Experiment, engine: Callable[..., object] | None = None, *, in_sweep: bool = False
) -> None:
    """Make the folder and write ``config.json`` (which can be run again) and ``build.json`` into it.

    Args:
        folder: where.
        experiment: what will run.
        engine: who will do the work, which the build names; None for processes of this machine. The run may go on with
            another one.
        in_sweep: whether other folders and reports may lie in it already. What a killed call has begun may in any case.

    Raises:
        ConfigError: the folder cannot be made, or something is in it already.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not in_sweep and {file.name for file in folder.iterdir()} - {"records", BUILD}:
            raise ConfigError(f"output folder: expected a new or empty folder, got {folder}, which holds files")
        _require_unfinished(folder)
        (folder / "records").mkdir(exist_ok=True)
        build = build_info() | {"engine": _named(engine), "device": _device(experiment)}
        with replacing(folder / BUILD) as file:
            file.write(json.dumps(build, indent=2) + "\n")
        write_config(folder, experiment)
    except OSError as error:
        raise ConfigError(f"output folder: cannot write to {folder}: {error}") from error


def check_device(folder: Path, experiment: Experiment) -> None:
    """See that trials go on on the kind of device on which they were begun, as ``build.json`` says: others round
    otherwise, and a record is of one kind.

    Raises:
        ConfigError: it is another kind.
    """
    begun: object = {}
    with suppress(OSError, ValueError):  # not there, or damaged
        begun = json.loads(require_file(folder / BUILD).read_text(encoding="utf-8"))
    device = begun.get("device") if isinstance(begun, dict) else None
    name = device.get("name") if isinstance(device, dict) else None
    was, now = ((one or CPU).partition(":")[0] for one in (name, experiment.device))  # older ones knew the CPU alone
    if was != now:
        raise ConfigError(
            f"device: expected {was!r}, on which the trials in {folder} were begun, got {now!r}, which rounds"
            " otherwise: go on there, or take another folder"
        )


def _device(experiment: Experiment) -> dict[str, str]:
    """The device of the clients' work: its name, and of a GPU that is here also what it is."""
    name = experiment.device or CPU
    if name == CPU:
        return {"name": name}
    from fedcore.local.torch_device import device_facts  # here, because it imports torch

    with suppress(DeviceError):  # it is where the workers are
        return device_facts(name)
    return {"name": name}


def _named(engine: Callable[..., object] | None) -> dict[str, object]:
    """An engine's name, and the options that it was given which JSON knows: how many workers, say."""
    if engine is None:
        return {"name": "process"}
    options: dict[str, object] = {}
    while isinstance(engine, partial):
        options, engine = engine.keywords | options, engine.func
    if is_dataclass(engine) and not isinstance(engine, type):
        options = {field.name: getattr(engine, field.name) for field in fields(engine)}
        engine = type(engine)
    plain = {key: value for key, value in options.items() if isinstance(value, (int, float, str))}
    return {"name": getattr(engine, "__name__", type(engine).__name__), **plain}


def write_config(folder: Path, experiment: Experiment) -> None:
    """Write ``config.json``, or put another one in its place, at once."""
    with replacing(folder / CONFIG) as file:
        file.write(experiment.model_dump_json(indent=2, exclude_none=True) + "\n")


def _require_unfinished(folder: Path) -> None:
    """Reject a ``build.json`` and records that no killed ``prepare`` has left: they stay as they are.

    Raises:
        ConfigError: there are such.
    """
    build, records = folder / BUILD, folder / "records"
    if records.is_symlink() or (records.exists() and any(records.iterdir())):
        raise ConfigError(f"{records}: expected no records yet, got some without a {CONFIG} beside them: move them")
    if os.path.lexists(build):
        found: object = None
        with suppress(OSError, ValueError):
            found = json.loads(require_file(build).read_text(encoding="utf-8"))
        if build.is_symlink() or not isinstance(found, dict) or not {"engine", "device"} <= set(found):
            raise ConfigError(f"{build}: expected none, or that of an unfinished run, got another file: move it")
