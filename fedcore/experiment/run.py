"""The run of one experiment: every trial, into one folder."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedcore.arguments import absolute
from fedcore.errors import MissingDataError
from fedcore.experiment.additions import go_on, gone_on_with
from fedcore.experiment.folder_lock import locked_run
from fedcore.experiment.jobs import Event, Job, find_data, find_device, processes_on, run_jobs
from fedcore.experiment.run_folder import CONFIG, prepare
from fedcore.experiment.schema.experiment import Experiment
from fedcore.experiment.together import settled
from fedcore.experiment.trial import trials

if TYPE_CHECKING:
    from fedcore.experiment.build import MakeEngine


def run_experiment(
    experiment: Experiment,
    folder: Path,
    *,
    resume: bool = False,
    jobs: int | None = None,
    imports: Sequence[str] = (),
    make_engine: "MakeEngine | None" = None,
    on_event: Callable[[Event], None] = lambda _: None,
) -> list[Event]:
    """Run every trial and write its record into ``folder``.

    Args:
        experiment: what to run.
        folder: a new or empty folder.
        resume: go on with the run in ``folder``, which is ``experiment``'s: its finished trials stay, the others go on
            from their last checkpoint and end as if nothing had stopped them. ``experiment`` may have more rounds,
            seeds and algorithms than the run was begun with: it ends with the bits of one that had them from the start.
        jobs: processes; None for as many as there are cores, and trials, and for one where they train on a GPU; 0 for
            this one, as in a notebook, whose own classes no other process knows.
        imports: modules, or paths of .py files, that each process imports first, for what they add to the registries.
        make_engine: who does the clients' work; called as ``engines.InProcess`` is, like
            ``partial(engines.Ray, workers=8)``. The trials then run in this process, one after another. It is no part
            of the configuration: the figures are the same, and a run that one engine began may go on with another.
        on_event: called in this process, as things happen.

    Returns:
        The trials that failed, as their last events. They do not stop the others.

    Raises:
        ConfigError: the folder is not new or empty; or its run is another experiment's, was begun on another kind of
            device, or cannot have more rounds.
        MissingDataError, DeviceError: the data, the GPU, or the run that is to go on is not there; nothing was made.
        LockedError: somebody else runs trials in the folder, or in the sweep that it is a point of.
        KeyboardInterrupt: after the processes were stopped; the records hold every finished round.
    """
    folder = absolute(folder)
    if resume and not (folder / CONFIG).exists():
        raise MissingDataError(
            f"{folder}: expected the folder of a run, found no {CONFIG} in it: begin one without resume"
        )
    known = gone_on_with(folder, experiment) if resume else experiment
    find_data([Job(trial, folder) for trial in trials(known)])
    find_device(known)
    with locked_run(folder):
        # Again, because whoever had the folder until now may have added to it.
        chosen = settled(gone_on_with(folder, experiment) if resume else experiment, folder)
        if resume:
            go_on(folder, chosen)
        else:
            prepare(folder, chosen, make_engine)
        work = [Job(trial, folder) for trial in trials(chosen)]
        processes = processes_on(chosen, jobs)
        return run_jobs(work, processes=processes, imports=imports, make_engine=make_engine, on_event=on_event)
