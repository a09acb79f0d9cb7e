"""Run one experiment, or a sweep over several experiments and grids."""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedcore.arrays import CPU
from fedcore.errors import ConfigError, MissingDataError
from fedcore.files import inside, read_bytes
from fedcore.sim import data
from fedcore.sim.experiment.config import points
from fedcore.sim.experiment.executor import Event, Job, OnEvent, run_in_processes, run_in_this_process
from fedcore.sim.experiment.journal import CHECKPOINTS, is_complete
from fedcore.sim.experiment.results import CONFIG, RECORDS
from fedcore.sim.experiment.run_folder import choose_batching, extend, folder_lock, prepare, run_lock, with_additions
from fedcore.sim.experiment.schema import Experiment, Trial, trials
from fedcore.validation import absolute

if TYPE_CHECKING:
    from fedcore.sim.experiment.trial import MakeEngine  # imports torch, which the process of a run does not need

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
            exists = (folder / CONFIG).exists()
            chosen[folder] = choose_batching(experiment, folder)
            if exists:
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
            return run_in_this_process(waiting, make_engine, on_event)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return run_in_processes(waiting, processes or cores or 1, imports, on_event)
    finally:
        for folder in {job.folder for job in waiting}:
            with suppress(OSError):  # the folder is missing, or holds checkpoints
                (folder / CHECKPOINTS).rmdir()


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
