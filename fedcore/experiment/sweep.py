"""Many presets, each at every point of its grid, in one folder that can be gone on with."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedcore.errors import ConfigError
from fedcore.experiment.jobs import Event, Job, Runner, find_data, find_device, processes_on, run_jobs
from fedcore.experiment.presets.grid import points
from fedcore.experiment.run_folder import CONFIG, check_device, clear_unfinished, prepare, write_config
from fedcore.experiment.schema.changes import Change, combined
from fedcore.experiment.schema.experiment import Experiment
from fedcore.experiment.together import settled
from fedcore.experiment.trial import trials


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
            ConfigError: a grid is not one that its experiment takes, or two experiments have one name.
        """
        found, names = [], [experiment.name for experiment in self.experiments]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ConfigError(f"{twice[0]}: expected one experiment of this name, which is its folder's, got several")
        for experiment in self.experiments:
            # A seed's trials come together, so that a sweep that is stopped has whole comparisons to show.
            own = [
                Job(trial, self.folder / experiment.name / point.name, f"{experiment.name} {point.name}".strip())
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
    on_event: Callable[[Event], None] = lambda _: None,
) -> list[Event]:
    """Run every trial of a sweep that is not complete.

    Nothing is lost when it is killed: the same call skips what is complete and goes on with the rest from the last
    checkpoints. More presets, grid points or seeds may be added to a folder.

    Args:
        sweep: what to run, and where.
        jobs, imports: as for ``run_experiment``.
        runner: who runs the trials, such as ``experiment.ray_trials.RayTrials``; None for processes of this machine. It
            is no part of the configuration: the figures are the same, and what one began another one may go on with.
        on_event: called in this process, as things happen.

    Returns:
        The trials that failed, as their last events. They do not stop the others.

    Raises:
        ConfigError: the folder holds another experiment under the name of one of these, or one that was begun on
            another kind of device.
        MissingDataError, DeviceError: data, or the GPU, is not there; nothing was made or begun.
        KeyboardInterrupt: after the processes were stopped; the records hold every finished round.
    """
    work = sweep.jobs()
    find_data(work)
    for experiment in sweep.experiments if runner is None else ():
        find_device(experiment)
        jobs = processes_on(experiment, jobs)
    chosen = {
        folder: _prepare(folder, experiment, runner)
        for folder, experiment in {job.folder: job.trial.experiment for job in work}.items()
    }
    work = [replace(job, trial=replace(job.trial, experiment=chosen[job.folder])) for job in work]
    return run_jobs(work, processes=jobs, imports=imports, runner=runner, on_event=on_event)


def _prepare(folder: Path, experiment: Experiment, runner: Runner | None) -> Experiment:
    """Make the folder of a point, or see that it is this point's; and say whether its clients are trained together."""
    path = folder / CONFIG
    if not path.exists():
        clear_unfinished(folder)
        experiment = settled(experiment, folder)
        prepare(folder, experiment, runner)
        return experiment
    read = Experiment.model_validate_json(path.read_text(encoding="utf-8"))
    check_device(folder, experiment)
    before = settled(read, folder)
    if experiment.together is None:
        experiment = experiment.model_copy(update={"together": before.together})
    seeds = tuple(dict.fromkeys((*before.seeds, *experiment.seeds)))
    if _figures(before) != _figures(experiment):
        raise ConfigError(
            f"{folder}: expected the experiment that is to run, got another one in its {CONFIG}; "
            "take another folder for other settings (only more seeds may be added)"
        )
    more = (Change(key="seeds", was=list(experiment.seeds), now=list(seeds)),)
    both = experiment.model_copy(update={"seeds": seeds, "changes": combined(experiment.changes, more)})
    if _besides(both) != _besides(read):
        write_config(folder, both)
    return experiment


def _besides(experiment: Experiment) -> tuple[object, ...]:
    """The rest of a point's configuration, which may change while it runs."""
    where = experiment.device, experiment.server_device
    return experiment.seeds, experiment.pictures, experiment.changes, experiment.together, where


def _figures(experiment: Experiment) -> dict[str, object]:
    """The choices that a trial's figures depend on, except its seed."""
    besides = {"seeds", "grid", "pictures", "changes", "device", "server_device"}
    tables: dict[str, object] = json.loads(experiment.model_dump_json(exclude=besides))
    return tables
