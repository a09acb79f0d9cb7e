"""Jobs: trials, of one experiment or of many, over as many processes as there are cores for them."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fedcore import data, devices
from fedcore.atomic_file import require_file
from fedcore.errors import MissingDataError
from fedcore.experiment.records import RoundRecord
from fedcore.experiment.schema.experiment import Experiment
from fedcore.experiment.trial import CHECKPOINTS, Trial, is_complete
from fedcore.experiment.worker import Ended, Worker, run_here
from fedcore.representation import Represented

if TYPE_CHECKING:
    from fedcore.experiment.build import MakeEngine  # which imports torch: the run's own process need not wait for it


@dataclass(frozen=True)
class Job:
    """A trial, and the folder in which it is recorded.

    Attributes:
        trial: what to run.
        folder: of a run, made by ``run_folder.prepare``.
        group: what messages call the run, if there is more than one.
    """

    trial: Trial
    folder: Path
    group: str = ""

    @property
    def name(self) -> str:
        """The name in messages."""
        return f"{self.group}, {self.trial.name}" if self.group else self.trial.name


@dataclass(frozen=True, repr=False)
class Event(Represented):
    """An event of a trial: it started, finished a round, or is over.

    Attributes:
        job: which.
        round: the round that it finished, or None.
        over: whether it is done, well or not.
        error: why it failed, or None.
    """

    job: Job
    round: RoundRecord | None = None
    over: bool = False
    error: str | None = None

    @property
    def trial(self) -> Trial:
        """The trial itself."""
        return self.job.trial

    def _facts(self) -> dict[str, Any]:
        number = None if self.round is None else self.round.round
        return {"job": self.job.name, "round": number, "over": self.over or None, "error": self.error}


class Runner(Protocol):
    """The contract of who runs a sweep's trials elsewhere: ``ray_trials.RayTrials``, say."""

    def __call__(self, jobs: Iterable[Job], imports: Sequence[str], on_event: Callable[[Event], None]) -> list[Event]:
        """See ``run_jobs``."""


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_data(jobs: Iterable[Job]) -> None:
    """See that the files of all jobs' data are there, and download them where they have to be.

    Raises:
        MissingDataError: some are not, and a job is not complete yet; one line for each data set.
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
    """See that the device of an experiment's clients is here.

    Raises:
        DeviceError: torch has no such GPU.
    """
    if experiment.device not in (None, devices.CPU):
        from fedcore.local.torch_device import torch_device  # here, because it imports torch

        torch_device(experiment.device)


def processes_on(experiment: Experiment, asked: int | None) -> int | None:
    """The processes for trials, where nobody asked for a number: one for a GPU, which they would have to share."""
    return 1 if asked is None and experiment.device not in (None, devices.CPU) else asked


def run_jobs(
    jobs: Iterable[Job],
    *,
    processes: int | None = None,
    imports: Sequence[str] = (),
    make_engine: "MakeEngine | None" = None,
    runner: Runner | None = None,
    on_event: Callable[[Event], None] = lambda _: None,
) -> list[Event]:
    """Run trials, each into its folder; one that is complete there is only read.

    Args:
        jobs: in the order in which they begin; those that are complete are read before them, so that what is left is
            known early.
        processes: how many; None for as many as there are cores, and jobs; 0 for none but this one.
        imports: what each process imports first.
        make_engine: who does the clients' work; None for the process of the trial. With another one the trials run in
            this process, one after another.
        runner: who runs the trials; None for processes of this machine.
        on_event: called in this process, as things happen.

    Returns:
        The trials that failed, as their last events.

    Raises:
        KeyboardInterrupt: after the processes were stopped.
    """
    waiting = deque(sorted(jobs, key=lambda job: not _seems_complete(job)))
    folders = {job.folder for job in waiting}
    try:
        if runner is not None:
            return runner(waiting, imports, on_event)
        if processes == 0 or make_engine is not None:
            return _run_here(waiting, make_engine, on_event)
        return _run_apart(waiting, processes, imports, on_event)
    finally:
        for folder in folders:
            with suppress(OSError):  # not there, or it holds what the run goes on from
                (folder / CHECKPOINTS).rmdir()


def _seems_complete(job: Job) -> bool:
    """Tell whether a record has as many lines as there are rounds, behind its header; only an order hangs on it."""
    with suppress(OSError):
        record = job.folder / "records" / job.trial.file_name
        return require_file(record).read_bytes().count(b"\n") > job.trial.experiment.rounds
    return False


def _run_here(jobs: Iterable[Job], make_engine: "MakeEngine | None", on_event: Callable[[Event], None]) -> list[Event]:
    failed: list[Event] = []
    for job in jobs:

        def tell(message: RoundRecord | Ended, job: Job = job) -> None:
            if not isinstance(message, Ended):
                on_event(Event(job, round=message))
                return
            event = Event(job, over=True, error=message.error)
            if message.error is not None:
                failed.append(event)
            on_event(event)

        on_event(Event(job))
        run_here(job.trial, job.folder, tell, make_engine)
    return failed


def _run_apart(
    waiting: deque[Job], processes: int | None, imports: Sequence[str], on_event: Callable[[Event], None]
) -> list[Event]:
    failed: list[Event] = []
    workers: list[Worker] = []
    doing: dict[Worker, Job] = {}

    def begin(worker: Worker) -> None:
        job = doing[worker] = waiting.popleft()
        worker.start(job.trial, job.folder)
        on_event(Event(job))

    try:
        for _ in range(min(processes or cores(), len(waiting))):
            workers.append(Worker(imports))
            begin(workers[-1])
        while workers:
            ready = wait([worker.pipe for worker in workers])
            for worker in [worker for worker in workers if worker.pipe in ready]:
                message = worker.receive()
                if not isinstance(message, Ended):
                    on_event(Event(doing[worker], round=message))
                    continue
                event = Event(doing[worker], over=True, error=message.error)
                on_event(event)
                if message.error is not None:
                    failed.append(event)
                if waiting and worker.alive:
                    begin(worker)
                    continue
                worker.stop()
                workers.remove(worker)
                if waiting:
                    workers.append(Worker(imports))
                    begin(workers[-1])
    finally:
        for worker in workers:
            worker.stop()
    return failed
