"""A run's folder: its lock, its configuration, and additions to a run that is there."""

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, is_dataclass
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcore.arrays import CPU
from fedcore.atomic_file import replacing, require_file
from fedcore.errors import ConfigError, DeviceError, LockedError, MissingDataError
from fedcore.experiment.changes import changes, combined, differences
from fedcore.experiment.journal import lengthen
from fedcore.experiment.results import read, read_header, started
from fedcore.experiment.schema import Experiment, FromRegistry, trials
from fedcore.runtime import build_info

if TYPE_CHECKING:
    from fedcore.simulation.batching.batched_sgd import Way

CONFIG, BUILD = "config.json", "build.json"
ADDED = {"rounds", "seeds", "algorithms"}
"""The keys of which a run may have more than it was begun with."""
BESIDES = {"grid", "pictures", "changes", "device", "server_device"}
"""The keys that may change while it runs, since no result depends on them; ``check_device`` checks devices."""
_NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""The errors of a file system without locks of folders, such as NFS."""


@contextmanager
def locked(folders: Iterable[Path]) -> Iterator[None]:
    """Make folders, and lock them for this process; readers are not held off.

    A lock holds for all runs below that use ``locked_run``. It is no file in the folder, and ends with the process, or
    the last that it forked. A file system without locks holds nothing off.

    Raises:
        ConfigError: a folder cannot be made.
        LockedError: another process or call runs trials there.
    """
    with ExitStack() as held:
        for folder in dict.fromkeys(folders):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"output folder: cannot write to {folder}: {error}") from error
            _lock(folder, fcntl.LOCK_EX, held)
        yield


@contextmanager
def locked_run(folder: Path) -> Iterator[None]:
    """``locked`` for the folder of one run, which may be a point of a sweep: then its preset's folder lies above it.

    Raises: what ``locked`` does.
    """
    with locked([folder]), ExitStack() as held:
        with suppress(PermissionError):  # then it cannot be this user's sweep
            _lock(folder.parent, fcntl.LOCK_SH, held)
        yield


def _lock(folder: Path, how: int, held: ExitStack) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    held.callback(os.close, opened)
    try:
        fcntl.flock(opened, how | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LockedError(
            f"{folder}: it is in use by another run: wait for it, stop it, or take another folder"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    else:
        held.callback(fcntl.flock, opened, fcntl.LOCK_UN)  # a forked process has a copy


def default_folder(experiment: Experiment) -> Path:
    """``runs/<preset>-<date>-<time>`` in the working directory."""
    return Path("runs", f"{experiment.name.replace('/', '-') or 'run'}-{datetime.now():%Y%m%d-%H%M%S}")


def runs_in(folder: Path) -> list[Path]:
    """The folder itself if it is a run's, else the runs below it, as a sweep has them.

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
    raise MissingDataError(f"{folder}: expected the folder of a run or a sweep, found no records in it")


def prepare(
    folder: Path, experiment: Experiment, engine: Callable[..., object] | None = None, *, in_sweep: bool = False
) -> None:
    """Make the folder and write ``config.json`` (which can be run again) and ``build.json`` into it.

    Args:
        folder: where.
        experiment: what will run.
        engine: for the name in the build. Default: processes of this machine. The run may go on with another one.
        in_sweep: whether other folders and reports may lie in it. The files of a killed ``prepare`` always may.

    Raises:
        ConfigError: the folder cannot be made, or something is in it already.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not in_sweep and {file.name for file in folder.iterdir()} - {"records", BUILD}:
            raise ConfigError(f"output folder: must be new or empty, but {folder} holds files")
        _require_unfinished(folder)
        (folder / "records").mkdir(exist_ok=True)
        build = build_info() | {"engine": _named(engine), "device": _device(experiment)}
        with replacing(folder / BUILD) as file:
            file.write(json.dumps(build, indent=2) + "\n")
        write_config(folder, experiment)
    except OSError as error:
        raise ConfigError(f"output folder: cannot write to {folder}: {error}") from error


def write_config(folder: Path, experiment: Experiment) -> None:
    """Write or replace ``config.json`` at once."""
    with replacing(folder / CONFIG) as file:
        file.write(experiment.model_dump_json(indent=2, exclude_none=True) + "\n")


def _require_unfinished(folder: Path) -> None:
    """Reject a ``build.json`` and records that are not those of a killed ``prepare``: they stay as they are."""
    build, records = folder / BUILD, folder / "records"
    if records.is_symlink() or (records.exists() and any(records.iterdir())):
        raise ConfigError(f"{records}: it holds records without a {CONFIG} beside them: move them")
    if os.path.lexists(build) and (build.is_symlink() or not {"engine", "device"} <= _build(folder).keys()):
        raise ConfigError(f"{build}: it is not that of an unfinished run: move it")


def _build(folder: Path) -> dict[str, Any]:
    """A run's ``build.json``; empty if it is missing or damaged."""
    with suppress(OSError, ValueError):
        found = json.loads(require_file(folder / BUILD).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def check_device(folder: Path, experiment: Experiment) -> None:
    """Require the kind of device on which the run was begun: another one rounds otherwise, and a record is of one kind.

    Raises:
        ConfigError: it is another kind.
    """
    device = _build(folder).get("device")
    name = device.get("name") if isinstance(device, dict) else None
    was, now = ((one or CPU).partition(":")[0] for one in (name, experiment.device))  # older builds name no device
    if was != now:
        raise ConfigError(
            f"device={now!r}: the trials in {folder} were begun on {was!r}, which rounds otherwise: go on there or in"
            " another folder"
        )


def _device(experiment: Experiment) -> dict[str, str]:
    """The device of the clients' work: its name, and the facts about a GPU that is here."""
    name = experiment.device or CPU
    if name != CPU:
        from fedcore.simulation.torch_device import device_facts  # which imports torch

        with suppress(DeviceError):  # it is where the workers are
            return device_facts(name)
    return {"name": name}


def _named(engine: Callable[..., object] | None) -> dict[str, object]:
    """An engine's name, and those of its options that JSON can hold, such as the number of workers."""
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


def settled(experiment: Experiment, folder: Path) -> Experiment:
    """The experiment with its choice of ``together``: its own, that of the folder's records, or the faster one.

    The choice is written into the configuration, so that a run can be repeated bit for bit.

    Args:
        experiment: its own choice stands.
        folder: of the run. Older versions of fedcore have the choice only in their records.

    Raises:
        DeviceError: it has to be measured on a device that is not here.

    Determinism: none if it is measured (see ``local.together.fastest``); in one process once for each model.
    """
    model, shape, device = experiment.model.model_dump_json(), experiment.data.source.shape, experiment.device or CPU
    if experiment.together is not None or not _can_be_measured(model, shape, device):
        return experiment
    recorded = _recorded_choice(folder) if device == CPU else None
    together = _fastest(model, shape, experiment.local.batch, device) if recorded is None else recorded
    return experiment.model_copy(update={"together": together})


def _recorded_choice(folder: Path) -> bool | None:
    """The choice of a folder's rounds; None if no round has one."""
    for path in sorted((folder / "records").glob("*.jsonl")):
        with suppress(MissingDataError):  # a damaged record, which its own trial reports
            rounds = read(path).rounds if started(path) else []
            if rounds and rounds[0].together is not None:
                return rounds[0].together
    return None


@cache
def _can_be_measured(model: str, shape: tuple[int, ...], device: str) -> bool:
    from fedcore.simulation import nets
    from fedcore.simulation.batching import batched_sgd as together
    from fedcore.simulation.torch_device import torch_device

    options = json.loads(model)
    return together.can_be_measured(nets.build(options.pop("name"), seed=0, **options), shape, torch_device(device))


@cache
def _fastest(model: str, shape: tuple[int, ...], batch: int, device: str) -> "Way":
    import torch

    from fedcore.simulation import nets
    from fedcore.simulation.batching import batched_sgd as together
    from fedcore.simulation.torch_device import torch_device

    options, before = json.loads(model), torch.get_num_threads()
    torch.set_num_threads(1)  # as in the processes that run the trials
    try:
        module = nets.build(options.pop("name"), seed=0, **options)
        return together.fastest(module, shape, batch=batch, device=torch_device(device))
    finally:
        torch.set_num_threads(before)


def gone_on_with(folder: Path, experiment: Experiment, *, part: bool = False) -> Experiment:
    """The experiment of a run's folder with the additions of another one: rounds, seeds, algorithms.

    Its algorithms keep their places, by which their records are named, and new ones follow them. Nothing is written.

    Args:
        folder: of the run, which need not exist.
        experiment: with the additions; it may have fewer seeds and algorithms, in any order.
        part: whether only this experiment's trials will run, as in a sweep. Then seeds without records are dropped,
            unless this experiment has them; and records of other trials forbid more rounds.

    Raises:
        ConfigError: it is another experiment in something else, has fewer rounds, has more while a result depends on
            their number, or was begun on another kind of device.
    """
    begun = _config(folder)
    if begun is None:
        return experiment
    check_device(folder, experiment)
    begun = settled(begun, folder)
    if experiment.together is None:
        experiment = experiment.model_copy(update={"together": begun.together})
    _check_results(folder, begun, experiment)
    recorded = _recorded(folder)
    _check_rounds(folder, begun, experiment, recorded if part else ())
    kept = [seed for seed in begun.seeds if not part or any(seed == own for _, own in recorded)]
    labels = [method.label for method in begun.algorithms]
    both = experiment.model_copy(
        update={
            "seeds": tuple(dict.fromkeys((*kept, *experiment.seeds))),
            "algorithms": (*begun.algorithms, *(one for one in experiment.algorithms if one.label not in labels)),
        }
    )
    more = changes(experiment.tables(), both.tables())
    return both.model_copy(update={"changes": combined(experiment.changes, more)})


def go_on(folder: Path, experiment: Experiment) -> None:
    """Write the result of ``gone_on_with`` into the folder: the configuration, then the records.

    A kill between the two costs nothing: a trial lengthens its own record before it goes on.
    """
    begun = _config(folder)
    if begun is None or begun.tables() != experiment.tables():
        write_config(folder, experiment)
    if begun is not None and begun.rounds < experiment.rounds:
        for trial in trials(experiment):
            with suppress(ConfigError, MissingDataError):  # which the trial itself reports
                lengthen(trial, folder)


def _config(folder: Path) -> Experiment | None:
    """The experiment of a run's folder, if there is one."""
    path = folder / CONFIG
    return Experiment.model_validate_json(require_file(path).read_text(encoding="utf-8")) if path.exists() else None


def _check_results(folder: Path, begun: Experiment, experiment: Experiment) -> None:
    """Refuse other settings, apart from additions, that results depend on."""
    before, now = (json.loads(one.model_dump_json(exclude=BESIDES | ADDED)) for one in (begun, experiment))
    own, asked = ({one.label: json.loads(one.model_dump_json()) for one in it.algorithms} for it in (begun, experiment))
    shared = [label for label in own if label in asked]
    before["algorithms"], now["algorithms"] = ({label: its[label] for label in shared} for its in (own, asked))
    if others := list(differences(before, now)):
        raise ConfigError(
            f"{folder}: its {CONFIG} has other settings ({', '.join(map(str, others))}): take another folder for other "
            "settings (only rounds, seeds and algorithms may be added)"
        )


def _check_rounds(folder: Path, begun: Experiment, experiment: Experiment, recorded: Iterable[tuple[str, int]]) -> None:
    was, now = begun.rounds, experiment.rounds
    if now < was:
        raise ConfigError(f"rounds={now}: must be at least {was}, as in {folder}: take another folder for fewer")
    if now == was:
        return
    if rates := _of_whole_run(experiment):
        raise ConfigError(
            f"rounds={now}: must be {was}, as in {folder}, since {', '.join(rates)} depends on the length of the whole "
            "run: take another folder"
        )
    labels = {method.label for method in experiment.algorithms}
    left = sorted({(label, seed) for label, seed in recorded if label not in labels or seed not in experiment.seeds})
    if left:
        label, seed = left[0]
        raise ConfigError(
            f"rounds={now}: {label}, seed {seed}, is in {folder} with {was}, and is left out here: name all its "
            "seeds and algorithms, or take another folder"
        )


def _of_whole_run(experiment: Experiment) -> list[str]:
    """The parts of an experiment that depend on the length of the run, as ``rate.lr Horizon``."""
    rate = experiment.rate
    named: dict[str, FromRegistry | None] = {"rate.lr": rate.lr, "rate.server_lr": rate.server_lr}
    named |= {"rate.optimizer": rate.optimizer, "participation": experiment.participation}
    named |= {f"algorithms.{method.label}": method for method in experiment.algorithms}
    return [f"{key} {one.name}" for key, one in named.items() if one and getattr(one.maker(), "of_whole_run", False)]


def _recorded(folder: Path) -> set[tuple[str, int]]:
    """The labels and seeds of the trials that were begun."""
    found = set()
    for path in (folder / "records").glob("*.jsonl"):
        with suppress(MissingDataError):  # a damaged record, which its own trial reports
            if (header := read_header(path)) is not None:
                found.add((header.algorithm, header.seed))
    return found
