"""Run one experiment, or a sweep over several experiments and grids; and the folder of a run."""

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import datetime
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcore.arrays import CPU
from fedcore.errors import ConfigError, DeviceError, LockedError, MissingDataError
from fedcore.files import inside, read_bytes, read_text, replacing
from fedcore.runtime import build_info
from fedcore.sim import data
from fedcore.sim.experiment import results
from fedcore.sim.experiment.changes import NO_RESULT, changes, combined, differences
from fedcore.sim.experiment.config import load_once, points
from fedcore.sim.experiment.executor import Event, Job, OnEvent, run_in_processes, run_in_this_process
from fedcore.sim.experiment.results import CONFIG, RECORDS, is_complete, parse_tables, rounds_before
from fedcore.sim.experiment.schema import Experiment, FromRegistry, Key, Trial, changed, error_of, trials
from fedcore.validation import absolute, shorten

if TYPE_CHECKING:  # these modules import torch, which the process of a run does not need
    from fedcore.sim.batching.batched_sgd import Way
    from fedcore.sim.experiment.trial import MakeEngine

BUILD = "build.json"
EXTENSIBLE = {"rounds", "seeds", "algorithms"}
"""The keys whose values may grow when a run is resumed."""
FREE = {"grid", "report", *NO_RESULT} - {"name", "title", "threads", "together"}
"""The keys that may change, since neither results nor headers of records have them; ``check_device`` checks devices."""
_NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""The errors of a file system that cannot lock folders, such as NFS."""


@contextmanager
def folder_lock(folders: Iterable[Path]) -> Iterator[None]:
    """Create folders, and lock them for this process; raise a LockedError if they are in use. Readers need no lock.

    A lock also excludes runs in the subfolders, which use ``run_lock``. It creates no file, and ends with this process
    and all its forks. On a file system without locks it has no effect.
    """
    with ExitStack() as stack:
        for folder in dict.fromkeys(folders):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"output folder: cannot write to {folder}: {error}") from error
            _lock(folder, fcntl.LOCK_EX, stack)
        yield


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Lock the folder of a run, and share the lock of its parent, which may be a sweep. See ``folder_lock``."""
    with folder_lock([folder]), ExitStack() as stack:
        with suppress(PermissionError):  # a parent that this user cannot open is not this user's sweep
            _lock(folder.parent, fcntl.LOCK_SH, stack)
        yield


def _lock(folder: Path, how: int, stack: ExitStack) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LockedError(f"{folder}: is in use by another run; wait, stop it, or choose another folder") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    else:
        # Closing the descriptor is not enough, since a forked process may have a copy of it.
        stack.callback(fcntl.flock, descriptor, fcntl.LOCK_UN)


def default_folder(experiment: Experiment) -> Path:
    """Return ``runs/PRESET-DATE-TIME``, relative to the working directory; if it exists, with -2, -3, ... added."""
    name = f"{experiment.name.replace('/', '-') or 'run'}-{datetime.now():%Y%m%d-%H%M%S}"
    folders = (Path("runs", f"{name}-{number}" if number > 1 else name) for number in count(1))
    return next(folder for folder in folders if not folder.exists())


def prepare(
    folder: Path, experiment: Experiment, engine: Callable[..., object] | None = None, *, in_sweep: bool = False
) -> None:
    """Create a run's folder, and write ``config.json`` (which can be run again) and ``build.json``.

    The folder may hold the files of a ``prepare`` that was killed.

    Args:
        engine: recorded in ``build.json``; the run may resume with a different one. Default: processes on this machine.
        in_sweep: whether the folder may hold other folders and reports.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not in_sweep and {file.name for file in folder.iterdir()} - {RECORDS, BUILD}:
            raise ConfigError(
                f"output folder: must be new or empty, but {folder} contains files; resume or extend it "
                "(resume=True, or fedcore run FOLDER --resume), or choose another folder"
            )
        _require_unfinished(folder)
        (folder / RECORDS).mkdir(exist_ok=True)
        build = build_info() | {"engine": _engine_facts(engine), "device": _device_facts(experiment)}
        build["working_folder"] = str(Path.cwd())  # relative paths in the configuration refer to it
        with replacing(folder / BUILD) as file:
            file.write(json.dumps(build, indent=2) + "\n")
        write_config(folder, experiment)
    except OSError as error:
        raise ConfigError(f"output folder: cannot write to {folder}: {error}") from error


def write_config(folder: Path, experiment: Experiment) -> None:
    """Write or replace ``config.json`` atomically."""
    with replacing(folder / CONFIG) as file:
        file.write(experiment.model_dump_json(indent=2, exclude_none=True) + "\n")


def _require_unfinished(folder: Path) -> None:
    """Raise a ``ConfigError`` if the folder holds files that a killed ``prepare`` cannot have left."""
    build, records = folder / BUILD, folder / RECORDS
    if records.is_symlink() or (records.exists() and any(records.iterdir())):
        raise ConfigError(f"{records}: contains records, but {folder} has no {CONFIG}; move the records elsewhere")
    if os.path.lexists(build) and (build.is_symlink() or not {"engine", "device"} <= _build(folder).keys()):
        raise ConfigError(f"{build}: was not written by an unfinished run; move the file elsewhere")


def _build(folder: Path) -> dict[str, Any]:
    """Return a run's ``build.json``, or an empty dictionary if it is missing or damaged."""
    with suppress(OSError, ValueError):
        return parse_tables(read_text(folder / BUILD))
    return {}


def check_device(folder: Path, experiment: Experiment) -> None:
    """Require the kind of device on which the run was begun, since rounding differs between kinds."""
    device = _build(folder).get("device")
    name = device.get("name") if isinstance(device, dict) else None
    was, now = ((one or CPU).partition(":")[0] for one in (name, experiment.device))  # older versions did not store it
    if was != now:
        raise ConfigError(f"device={now!r}: {folder} was begun on {was!r}, which rounds differently; use a new folder")


def _device_facts(experiment: Experiment) -> dict[str, str]:
    """Return the name of the clients' device; for a GPU of this machine, facts about it too."""
    name = experiment.device or CPU
    if name != CPU:
        from fedcore.sim.sgd import device_facts  # imports torch

        with suppress(DeviceError):  # only the workers' machines may have the GPU
            return device_facts(name)
    return {"name": name}


def _engine_facts(engine: Callable[..., object] | None) -> dict[str, object]:
    """Return an engine's name, and those of its options that are numbers or strings, such as the number of workers."""
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


def choose_batching(experiment: Experiment, folder: Path) -> Experiment:
    """Return the experiment with ``together`` set, from the experiment, else from the folder's records, else measured.

    The configuration stores the value, so that a run can be repeated bit for bit. Older versions of fedcore stored it
    only in the records. A measured value may differ between processes (see ``batched_sgd.fastest``).
    """
    model, device = experiment.model.key(experiment.data.source), experiment.device or CPU
    if experiment.together is not None or not _can_be_measured(model, device):
        return experiment
    recorded = _recorded_batching(folder) if device == CPU else None
    together = _fastest(model, experiment.local.batch, device) if recorded is None else recorded
    return experiment.model_copy(update={"together": together})


def _recorded_batching(folder: Path) -> bool | None:
    """Return ``together`` from the first record that has it, or None."""
    records = results.readable((folder / RECORDS).glob("*.jsonl"))
    return next((one.together for _, record in records for one in record.rounds[:1] if one.together is not None), None)


def _module(model: Key) -> Any:
    from fedcore.sim import nets

    _, name, options, _ = model
    return nets.build(name, seed=0, **options)


@cache
def _can_be_measured(model: Key, device: str) -> bool:
    from fedcore.sim.batching import batched_sgd
    from fedcore.sim.sgd import torch_device

    return batched_sgd.can_be_measured(_module(model), model[-1], torch_device(device))


@cache
def _fastest(model: Key, batch: int, device: str) -> "Way":
    import torch

    from fedcore.sim.batching import batched_sgd
    from fedcore.sim.sgd import torch_device

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the processes that run the trials
    try:
        return batched_sgd.fastest(_module(model), model[-1], batch=batch, device=torch_device(device))
    finally:
        torch.set_num_threads(before)


def with_additions(folder: Path, experiment: Experiment, *, part: bool = False) -> Experiment:
    """Return the experiment in a run's folder, extended by the rounds, seeds or algorithms of ``experiment``.

    The folder's algorithms keep their positions, which their records' names contain; new ones follow. ``experiment``
    may have fewer seeds and algorithms, in any order. Nothing is written. If the folder is missing, return
    ``experiment``.

    Args:
        part: whether only this experiment's trials will run, as in a sweep. Then seeds without records are dropped
            unless this experiment has them, and records of other trials forbid more rounds.

    Raises:
        ConfigError: other settings differ; the run was begun on a different kind of device; or the experiment has fewer
            rounds, or has more although a result depends on their number.
    """
    begun = _config(folder)
    if begun is None:
        return experiment
    check_device(folder, experiment)
    begun = choose_batching(begun, folder)
    if experiment.together is None:
        experiment = experiment.model_copy(update={"together": begun.together})
    _check_results(folder, begun, experiment)
    recorded = _recorded_trials(folder)
    _check_rounds(folder, begun, experiment, recorded if part else ())
    seeds = [seed for seed in begun.seeds if not part or any(seed == own for _, own in recorded)]
    labels = [method.label for method in begun.algorithms]
    methods = *begun.algorithms, *(one for one in experiment.algorithms if one.label not in labels)
    update = {"seeds": tuple(dict.fromkeys((*seeds, *experiment.seeds))), "algorithms": methods}
    both = experiment.model_copy(update=update)
    more = changes(experiment.tables(), both.tables())
    return both.model_copy(update={"changes": combined(experiment.changes, more)})


def extend(folder: Path, experiment: Experiment) -> None:
    """Write the result of ``with_additions`` into the folder: the configuration, then the records.

    A kill between the two does no harm: a trial extends its own record when it resumes.
    """
    begun = _config(folder)
    if begun is None or begun.tables() != experiment.tables():
        write_config(folder, experiment)
    if begun is not None and begun.rounds < experiment.rounds:
        for trial in trials(experiment):
            with suppress(ConfigError, MissingDataError):  # the trial itself reports the error
                rounds_before(trial, folder)


def _config(folder: Path) -> Experiment | None:
    path = folder / CONFIG
    try:
        return Experiment.model_validate_json(read_text(path)) if path.exists() else None
    except ValueError as error:
        raise ConfigError(f"{path}: is damaged: {shorten(error_of(error)[0])}; restore the file") from None


def _check_results(folder: Path, begun: Experiment, experiment: Experiment) -> None:
    """Reject changed settings that results depend on, unless they are additions."""
    before, now = (json.loads(one.model_dump_json(exclude=FREE | EXTENSIBLE)) for one in (begun, experiment))
    own, new = ({one.label: json.loads(one.model_dump_json()) for one in it.algorithms} for it in (begun, experiment))
    shared = [label for label in own if label in new]
    before["algorithms"], now["algorithms"] = ({label: its[label] for label in shared} for its in (own, new))
    if others := list(differences(before, now)):
        raise ConfigError(
            f"{folder}: its {CONFIG} has different settings ({', '.join(map(str, others))}), and only rounds, seeds "
            "and algorithms may be added; choose a different folder"
        )


def _check_rounds(folder: Path, begun: Experiment, experiment: Experiment, recorded: Iterable[tuple[str, int]]) -> None:
    was, now = begun.rounds, experiment.rounds
    if now < was:
        raise ConfigError(f"rounds={now}: must be at least {was}, as in {folder}; choose a different folder")
    if now == was:
        return
    parts: dict[str, FromRegistry | None] = {"participation": experiment.participation}
    for prefix, own in (("", None), *((f"algorithms.{one.label}.", one.rate) for one in experiment.algorithms)):
        rate = changed(experiment.rate, own)
        parts |= {f"{prefix}rate.{key}": getattr(rate, key) for key in own or ("lr", "server_lr", "optimizer")}
    parts |= {f"algorithms.{method.label}": method for method in experiment.algorithms}
    if fixed := [
        f"{key} {one.name}" for key, one in parts.items() if one and getattr(one.maker(), "of_whole_run", None)
    ]:
        raise ConfigError(
            f"rounds={now}: must be {was}, as in {folder}, because {', '.join(fixed)} depends on the total number of "
            "rounds; choose a different folder"
        )
    labels = {method.label for method in experiment.algorithms}
    left = sorted((label, seed) for label, seed in recorded if label not in labels or seed not in experiment.seeds)
    if left:
        label, seed = left[0]
        raise ConfigError(
            f"rounds={now}: {folder} has {label}, seed {seed}, with {was} rounds; include all seeds and "
            "algorithms of that folder, or choose a different folder"
        )


def _recorded_trials(folder: Path) -> set[tuple[str, int]]:
    """Return the label and seed of each trial that was begun."""
    found = set()
    for path in (folder / RECORDS).glob("*.jsonl"):
        with suppress(MissingDataError):  # the trial reports its own damaged record
            if (header := results.read_header(path)) is not None:
                found.add((header.algorithm, header.seed))
    return found


Runner = Callable[[Iterable[Job], Sequence[str], OnEvent], list[Event]]
"""Runs the trials of a sweep, for example on Ray. Receives ``jobs``, ``imports`` and ``on_event`` of ``run_jobs``."""


def run_experiment(
    experiment: Experiment,
    folder: Path,
    *,
    resume: bool = False,
    jobs: int | None = None,
    imports: Sequence[str] = (),
    make_engine: "MakeEngine | None" = None,
    on_event: OnEvent = lambda _: None,
) -> list[Event]:
    """Run every trial of an experiment, and write the records into ``folder``.

    Args:
        experiment: the configuration.
        folder: a new or empty folder.
        resume: whether to resume the run in ``folder``. Finished trials are skipped; the others continue from their
            last checkpoints, with the results of an uninterrupted run. ``experiment`` may add rounds, seeds and
            algorithms: the results are bit-identical to those of a run that had them from the start.
        jobs: the number of processes. Default: one per core, at most one per trial; one if the clients train on a GPU.
            0 runs the trials in this process, which is necessary if other processes cannot import a notebook's classes.
        imports: modules, or paths of .py files, that each process imports first. They may register methods, data sets
            and models.
        make_engine: makes the engine, with the arguments of ``InProcess``: for example ``partial(Ray, workers=8)``. The
            trials then run in this process, one after another. Results do not depend on the engine, and a run may
            resume with a different one. Default: ``InProcess`` in the process of the trial.
        on_event: called in this process with each ``Event`` of a trial: its start, a finished round, or its end.

    Returns:
        The last event of each trial that failed. A failure does not affect other trials.

    Raises:
        ConfigError: the folder exists and is not empty. On resuming: the run in the folder has different settings, was
            begun on a different kind of device, or cannot be extended.
        MissingDataError, DeviceError: the data, the GPU or the run to resume is missing. Nothing was written.
        LockedError: another process uses the folder, or the sweep that contains it. No trial was started.
        KeyboardInterrupt: raised after the processes have stopped; the records hold every finished round.
    """
    folder = absolute(folder, "folder")
    if resume and not (folder / CONFIG).exists():
        raise MissingDataError(f"{folder}: is not the folder of a run, because it has no {CONFIG}; use resume=False")
    known = with_additions(folder, experiment) if resume else experiment
    find_data([Job(trial, folder) for trial in trials(known)])
    find_device(known)
    with run_lock(folder):
        # Read the folder again: the run that had the lock may have extended it.
        chosen = choose_batching(with_additions(folder, experiment) if resume else experiment, folder)
        if resume:
            extend(folder, chosen)
        else:
            prepare(folder, chosen, make_engine)
        work = [Job(trial, folder) for trial in trials(chosen)]
        processes = processes_for([chosen], jobs)
        return run_jobs(work, processes=processes, imports=imports, make_engine=make_engine, on_event=on_event)


@dataclass(frozen=True)
class Sweep:
    """The trials of a sweep, from one experiment per preset.

    The run of each grid point is in ``PRESET/POINT`` below ``folder``, or in ``PRESET`` without a grid.
    """

    experiments: Sequence[Experiment]
    folder: Path

    def jobs(self) -> list[Job]:
        """Return all trials, preset by preset; within a preset, all points of one seed precede those of the next."""
        jobs: list[Job] = []
        names = [experiment.name for experiment in self.experiments]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ConfigError(f"{twice[0]}: several experiments have this name and would share a folder; rename one")
        for experiment in self.experiments:
            # Trials of one seed run together, so that a stopped sweep has complete comparisons.
            own: list[Job] = []
            for point in points(experiment):
                folder = _point_folder(self.folder / experiment.name, point.name)
                group = f"{experiment.name} {point.name}".strip()
                own += [Job(trial, folder, group) for trial in trials(point.experiment)]
            jobs += sorted(own, key=lambda job: experiment.seeds.index(job.trial.seed))
        return jobs


def run_sweep(
    sweep: Sweep,
    *,
    jobs: int | None = None,
    imports: Sequence[str] = (),
    runner: Runner | None = None,
    on_event: OnEvent = lambda _: None,
) -> list[Event]:
    """Run every incomplete trial of a sweep; return the last event of each trial that failed.

    If the process is killed, the same call skips complete trials and resumes the others from their last checkpoints. A
    later call may add presets, grid points, seeds, algorithms and rounds.

    Args:
        sweep: the experiments and the folder.
        runner: runs the trials, for example ``experiment.executor.RayTrials``. Results do not depend on it, and a sweep
            may resume with a different one. Default: processes on this machine.
        jobs, imports, on_event: as for ``run_experiment``.

    Raises:
        ConfigError: a preset's folder has different settings, was begun on a different kind of device, or cannot be
            extended. Nothing was written.
        MissingDataError, DeviceError, LockedError, KeyboardInterrupt: as for ``run_experiment``.
    """
    sweep = replace(sweep, folder=absolute(sweep.folder, "folder"))
    find_data(_known_jobs(sweep)[0])
    if runner is None:
        for experiment in sweep.experiments:
            find_device(experiment)
        jobs = processes_for(sweep.experiments, jobs)
    with folder_lock(inside(sweep.folder, sweep.folder / experiment.name) for experiment in sweep.experiments):
        work, chosen = _known_jobs(sweep)  # again, since the previous lock holder may have changed them
        for folder, experiment in chosen.items():
            chosen[folder] = choose_batching(experiment, folder)
            if (folder / CONFIG).exists():
                extend(folder, chosen[folder])
            else:
                prepare(folder, chosen[folder], runner, in_sweep=True)
        work = [_in_experiment(job, chosen[job.folder]) for job in work]
        return run_jobs(work, processes=jobs, imports=imports, runner=runner, on_event=on_event)


def _known_jobs(sweep: Sweep) -> tuple[list[Job], dict[Path, Experiment]]:
    """Return a sweep's jobs, and the experiment of each run's folder with the additions of the sweep."""
    work = sweep.jobs()
    experiments = {inside(sweep.folder, job.folder): job.trial.experiment for job in work}
    chosen = {folder: with_additions(folder, experiment, part=True) for folder, experiment in experiments.items()}
    return [_in_experiment(job, chosen[job.folder]) for job in work], chosen


def _point_folder(preset: Path, point: str) -> Path:
    """Return the folder of a grid point. The name of an existing folder may list the keys in a different order."""
    keys = sorted(point.split(","))
    if not (preset / point / CONFIG).exists() and preset.is_dir():
        for path in preset.iterdir():
            if sorted(path.name.split(",")) == keys and (path / CONFIG).exists():
                return path
    return preset / point


def _in_experiment(job: Job, experiment: Experiment) -> Job:
    """Return the job of the same trial in an extended experiment."""
    labels = [method.label for method in experiment.algorithms]
    return replace(job, trial=Trial(experiment, labels.index(job.trial.method.label), job.trial.seed))


def run_jobs(
    jobs: Iterable[Job],
    *,
    processes: int | None = None,
    imports: Sequence[str] = (),
    make_engine: "MakeEngine | None" = None,
    runner: Runner | None = None,
    on_event: OnEvent = lambda _: None,
) -> list[Event]:
    """Run each trial, and write its record into its folder; return the last event of each trial that failed.

    Complete trials are not run again; their records are read first, so that progress is known early. ``processes`` is
    by default one per core, at most one per job; 0 uses only this process. For the other arguments see
    ``run_experiment`` and ``run_sweep``.
    """
    waiting = sorted(jobs, key=lambda job: not _seems_complete(job))
    try:
        if runner is not None:
            return runner(waiting, imports, on_event)
        if processes == 0 or make_engine is not None:
            load_once.cache_clear()  # the files of data sets may have changed
            return run_in_this_process(waiting, make_engine, on_event)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return run_in_processes(waiting, processes or cores or 1, imports, on_event)
    finally:
        for folder in {job.folder for job in waiting}:
            with suppress(OSError):  # the folder is missing, or holds checkpoints
                (folder / results.CHECKPOINTS).rmdir()


def _seems_complete(job: Job) -> bool:
    """Whether a record has a line for each round and a header. Only the order of the trials depends on this."""
    with suppress(OSError):
        record = job.folder / RECORDS / job.trial.file_name
        return read_bytes(record).count(b"\n") > job.trial.experiment.rounds
    return False


def processes_for(experiments: Iterable[Experiment], jobs: int | None) -> int | None:
    """Return the requested number of processes. Default: one for a GPU, since processes would share it."""
    on_gpu = any(experiment.device not in (None, CPU) for experiment in experiments)
    return 1 if jobs is None and on_gpu else jobs


def find_data(jobs: Iterable[Job]) -> None:
    """Find or download the data of all jobs; raise a MissingDataError with one line per missing data set."""
    by_data: dict[str, list[Job]] = {}
    for job in jobs:
        by_data.setdefault(job.trial.experiment.data.name, []).append(job)
    missing = []
    for name, own in by_data.items():
        try:
            data.find(name)
        except MissingDataError as error:
            if not all(is_complete(job.trial, job.folder) for job in own):
                missing.append(str(error))
    if missing:
        raise MissingDataError("\n".join(missing))


def find_device(experiment: Experiment) -> None:
    """Check that torch has the device of an experiment's clients; raise a DeviceError if it is missing."""
    if experiment.device not in (None, CPU):
        from fedcore.sim.sgd import torch_device  # imports torch

        torch_device(experiment.device)
