"""Many presets, each at every point of its grid, in one folder that can be gone on with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedcore.arguments import absolute
from fedcore.atomic_file import inside
from fedcore.errors import ConfigError
from fedcore.experiment.additions import go_on, gone_on_with
from fedcore.experiment.folder_lock import locked
from fedcore.experiment.jobs import Event, Job, Runner, find_data, find_device, processes_on, run_jobs
from fedcore.experiment.presets.grid import points
from fedcore.experiment.run_folder import CONFIG, prepare
from fedcore.experiment.schema.experiment import Experiment
from fedcore.experiment.together import settled
from fedcore.experiment.trial import Trial, trials


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
    on_event: Callable[[Event], None] = lambda _: None,
) -> list[Event]:
    """Run every trial of a sweep that is not complete.

    Nothing is lost when it is killed: the same call skips what is complete and goes on with the rest from the last
    checkpoints. More presets, grid points, seeds, algorithms or rounds may be added to a folder.

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
            another kind of device, or that cannot have more rounds; nothing was made or begun.
        MissingDataError, DeviceError: data, or the GPU, is not there; nothing was made or begun.
        LockedError: somebody else runs trials of one of the presets in the folder; nothing was begun.
        KeyboardInterrupt: after the processes were stopped; the records hold every finished round.
    """
    sweep = replace(sweep, folder=absolute(sweep.folder))
    find_data(_known(sweep)[0])
    for experiment in sweep.experiments if runner is None else ():
        find_device(experiment)
        jobs = processes_on(experiment, jobs)
    with locked(inside(sweep.folder, sweep.folder / experiment.name) for experiment in sweep.experiments):
        work, chosen = _known(sweep)  # again, because whoever had the folders until now may have added to them
        chosen = {folder: _prepare(folder, experiment, runner) for folder, experiment in chosen.items()}
        work = [_of(job, chosen[job.folder]) for job in work]
        return run_jobs(work, processes=jobs, imports=imports, runner=runner, on_event=on_event)


def _known(sweep: Sweep) -> tuple[list[Job], dict[Path, Experiment]]:
    """A sweep's trials, each of its folder's experiment with what the sweep has more of, and these by their folders."""
    work = sweep.jobs()
    experiments = {inside(sweep.folder, job.folder): job.trial.experiment for job in work}
    chosen = {folder: gone_on_with(folder, experiment, part=True) for folder, experiment in experiments.items()}
    return [_of(job, chosen[job.folder]) for job in work], chosen


def _place(preset: Path, point: str) -> Path:
    """The folder of a point, which is the same one where the keys of a grid came in another order before."""
    keys = sorted(point.split(","))
    there = (preset / point / CONFIG).exists() or not preset.is_dir()
    others = () if there else (path for path in preset.iterdir() if sorted(path.name.split(",")) == keys)
    return next((path for path in others if (path / CONFIG).exists()), preset / point)


def _of(job: Job, experiment: Experiment) -> Job:
    """The same trial of an experiment that has more of them."""
    labels = [method.label for method in experiment.algorithms]
    return replace(job, trial=Trial(experiment, labels.index(job.trial.method.label), job.trial.seed))


def _prepare(folder: Path, experiment: Experiment, runner: Runner | None) -> Experiment:
    """Make the folder of a point, or write into it what it has more of; and say whether clients train together."""
    is_there = (folder / CONFIG).exists()
    experiment = settled(experiment, folder)
    if is_there:
        go_on(folder, experiment)
    else:
        prepare(folder, experiment, runner, in_sweep=True)
    return experiment
