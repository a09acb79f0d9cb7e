"""Runs of one experiment, and sweeps over many."""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedcore.arguments import absolute
from fedcore.arrays import CPU
from fedcore.atomic_file import inside, require_file
from fedcore.errors import ConfigError, MissingDataError
from fedcore.experiment.executor import Event, Job, OnEvent, run_here, run_in_processes
from fedcore.experiment.journal import CHECKPOINTS, is_complete
from fedcore.experiment.presets import points
from fedcore.experiment.run_folder import CONFIG, go_on, gone_on_with, locked, locked_run, prepare, settled
from fedcore.experiment.schema import Experiment, Trial, trials
from fedcore.simulation import data

if TYPE_CHECKING:
    from fedcore.experiment.trial import MakeEngine  # which imports torch, for which the process of a run need not wait

Runner = Callable[[Iterable[Job], Sequence[str], OnEvent], list[Event]]
"""Runs the trials of a sweep elsewhere, such as ``RayTrials``; called with the jobs, imports and on_event of
``run_jobs``."""


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
    """Run every trial and write its record into ``folder``.

    Args:
        experiment: what to run.
        folder: a new or empty folder.
        resume: go on with the run of ``experiment`` in ``folder``: its finished trials stay, the others go on from
            their last checkpoint and end as if nothing had stopped them. ``experiment`` may have more rounds, seeds and
            algorithms than the run was begun with: it ends with the bits of one that had them from the start.
        jobs: processes. Default: as many as there are cores, and trials; one if they train on a GPU. 0 is this process,
            as in a notebook, whose classes no other process knows.
        imports: modules, or paths of .py files, that each process imports first, for their additions to registries.
        make_engine: makes the engine; called as ``InProcess`` is, like ``partial(Ray, workers=8)``. The trials then run
            in this process, one after another. It is no part of the configuration: the results are the same, and a run
            that one engine began may go on with another. Default: ``InProcess`` in the process of the trial.
        on_event: called in this process, as things happen.

    Returns:
        The trials that failed, as their last events. They do not stop the others.

    Raises:
        ConfigError: the folder is not new or empty; or its run is another experiment's, was begun on another kind of
            device, or cannot have more rounds.
        MissingDataError, DeviceError: the data, the GPU, or the run to go on with is not there; nothing was made.
        LockedError: another run uses the folder, or the sweep that it is a point of.
        KeyboardInterrupt: after the processes were stopped; the records hold every finished round.
    """
    folder = absolute(folder)
    if resume and not (folder / CONFIG).exists():
        raise MissingDataError(f"{folder}: expected the folder of a run, found no {CONFIG} in it: begin without resume")
    known = gone_on_with(folder, experiment) if resume else experiment
    find_data([Job(trial, folder) for trial in trials(known)])
    find_device(known)
    with locked_run(folder):
        # Again, because a run that had the folder until now may have added to it.
        chosen = settled(gone_on_with(folder, experiment) if resume else experiment, folder)
        if resume:
            go_on(folder, chosen)
        else:
            prepare(folder, chosen, make_engine)
        work = [Job(trial, folder) for trial in trials(chosen)]
        processes = processes_for([chosen], jobs)
        return run_jobs(work, processes=processes, imports=imports, make_engine=make_engine, on_event=on_event)


@dataclass(frozen=True)
class Sweep:
    """The trials of a sweep, and the folders in which they are recorded.

    Args:
        experiments: the presets' experiments.
        folder: every point is a run's folder below it: ``PRESET`` or ``PRESET/POINT``.
    """

    experiments: Sequence[Experiment]
    folder: Path

    def jobs(self) -> list[Job]:
        """All trials: preset by preset, in each seed by seed over all its points.

        Raises:
            ConfigError: a grid does not fit its experiment, or two experiments have one name.
        """
        found, names = [], [experiment.name for experiment in self.experiments]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ConfigError(f"{twice[0]}: several experiments have this name, which is a folder's: rename one")
        for experiment in self.experiments:
            # A seed's trials come together, so that a sweep that is stopped has whole comparisons to show.
            own = [
                Job(trial, _place(self.folder / experiment.name, point.name), f"{experiment.name} {point.name}".strip())
                for point in points(experiment)
                for trial in trials(point.experiment)
            ]
            found += sorted(own, key=lambda job: experiment.seeds.index(job.trial.seed))
        return found


def run_sweep(
    sweep: Sweep,
    *,
    jobs: int | None = None,
    imports: Sequence[str] = (),
    runner: Runner | None = None,
    on_event: OnEvent = lambda _: None,
) -> list[Event]:
    """Run every trial of a sweep that is not complete.

    A kill loses nothing: the same call skips complete trials and goes on with the rest from the last checkpoints. More
    presets, grid points, seeds, algorithms or rounds may be added to a folder.

    Args:
        sweep: what to run, and where.
        jobs, imports: as for ``run_experiment``.
        runner: runs the trials, such as ``experiment.executor.RayTrials``. It is no part of the configuration: the
            results are the same, and another one may go on. Default: processes of this machine.
        on_event: called in this process, as things happen.

    Returns:
        The trials that failed, as their last events. They do not stop the others.

    Raises:
        ConfigError: the folder holds another experiment under the name of one of these, or one that was begun on
            another kind of device, or that cannot have more rounds; nothing was made or begun.
        MissingDataError, DeviceError: data, or the GPU, is not there; nothing was made or begun.
        LockedError: another run uses the folder of one of the presets; nothing was begun.
        KeyboardInterrupt: after the processes were stopped; the records hold every finished round.
    """
    sweep = replace(sweep, folder=absolute(sweep.folder))
    find_data(_known(sweep)[0])
    if runner is None:
        for experiment in sweep.experiments:
            find_device(experiment)
        jobs = processes_for(sweep.experiments, jobs)
    with locked(inside(sweep.folder, sweep.folder / experiment.name) for experiment in sweep.experiments):
        work, chosen = _known(sweep)  # again, because a run that had the folders until now may have added to them
        chosen = {folder: _prepare(folder, experiment, runner) for folder, experiment in chosen.items()}
        work = [_of(job, chosen[job.folder]) for job in work]
        return run_jobs(work, processes=jobs, imports=imports, runner=runner, on_event=on_event)


def _known(sweep: Sweep) -> tuple[list[Job], dict[Path, Experiment]]:
    """A sweep's trials, with the experiments of their folders and the sweep's additions; and these by folder."""
    work = sweep.jobs()
    experiments = {inside(sweep.folder, job.folder): job.trial.experiment for job in work}
    chosen = {folder: gone_on_with(folder, experiment, part=True) for folder, experiment in experiments.items()}
    return [_of(job, chosen[job.folder]) for job in work], chosen


def _place(preset: Path, point: str) -> Path:
    """The folder of a point; the same one if the keys of the grid came in another order before."""
    keys = sorted(point.split(","))
    there = (preset / point / CONFIG).exists() or not preset.is_dir()
    others = () if there else (path for path in preset.iterdir() if sorted(path.name.split(",")) == keys)
    return next((path for path in others if (path / CONFIG).exists()), preset / point)


def _of(job: Job, experiment: Experiment) -> Job:
    """The same trial of an experiment that has more of them."""
    labels = [method.label for method in experiment.algorithms]
    return replace(job, trial=Trial(experiment, labels.index(job.trial.method.label), job.trial.seed))


def _prepare(folder: Path, experiment: Experiment, runner: Runner | None) -> Experiment:
    """Make the folder of a point, or write additions into it; return the experiment with its choice of ``together``."""
    is_there = (folder / CONFIG).exists()
    experiment = settled(experiment, folder)
    if is_there:
        go_on(folder, experiment)
    else:
        prepare(folder, experiment, runner, in_sweep=True)
    return experiment


def run_jobs(
    jobs: Iterable[Job],
    *,
    processes: int | None = None,
    imports: Sequence[str] = (),
    make_engine: "MakeEngine | None" = None,
    runner: Runner | None = None,
    on_event: OnEvent = lambda _: None,
) -> list[Event]:
    """Run trials, each into its folder; one that is complete there is only read.

    Args:
        jobs: in the order in which they begin; complete ones are read before them, so that the rest is known early.
        processes: how many. Default: as many as there are cores, and jobs. 0 is this one only.
        imports, make_engine, runner, on_event: as for ``run_experiment`` and ``run_sweep``.

    Returns:
        The trials that failed, as their last events.

    Raises:
        KeyboardInterrupt: after the processes were stopped.
    """
    waiting = sorted(jobs, key=lambda job: not _seems_complete(job))
    try:
        if runner is not None:
            return runner(waiting, imports, on_event)
        if processes == 0 or make_engine is not None:
            return run_here(waiting, make_engine, on_event)
        return run_in_processes(waiting, processes or _cores(), imports, on_event)
    finally:
        for folder in {job.folder for job in waiting}:
            with suppress(OSError):  # it is missing, or holds checkpoints to go on from
                (folder / CHECKPOINTS).rmdir()


def _seems_complete(job: Job) -> bool:
    """Whether a record has as many lines as there are rounds, behind its header; only an order depends on it."""
    with suppress(OSError):
        record = job.folder / "records" / job.trial.file_name
        return require_file(record).read_bytes().count(b"\n") > job.trial.experiment.rounds
    return False


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processes_for(experiments: Iterable[Experiment], asked: int | None) -> int | None:
    """The number of processes that was asked for. Default: one for a GPU, which they would share."""
    on_gpu = any(experiment.device not in (None, CPU) for experiment in experiments)
    return 1 if asked is None and on_gpu else asked


def find_data(jobs: Iterable[Job]) -> None:
    """Find, or download, the files of all jobs' data.

    Raises:
        MissingDataError: some are missing, and a job is not complete yet; one line for each data set.
    """
    waiting: dict[str, list[Job]] = {}
    for job in jobs:
        waiting.setdefault(job.trial.experiment.data.name, []).append(job)
    missing = []
    for name, own in waiting.items():
        try:
            data.find(name)
        except MissingDataError as error:
            if not all(is_complete(job.trial, job.folder) for job in own):
                missing.append(str(error))
    if missing:
        raise MissingDataError("\n".join(missing))


def find_device(experiment: Experiment) -> None:
    """Find the device of an experiment's clients.

    Raises:
        DeviceError: torch has no such GPU.
    """
    if experiment.device not in (None, CPU):
        from fedcore.simulation.torch_device import torch_device  # which imports torch

        torch_device(experiment.device)
