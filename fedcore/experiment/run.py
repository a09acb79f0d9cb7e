"""All trials of an experiment, over as many processes as there are cores for them."""

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

from fedcore.experiment.config import Experiment
from fedcore.experiment.folder import prepare
from fedcore.experiment.records import RoundRecord
from fedcore.experiment.trial import Trial, trials
from fedcore.experiment.worker import Ended, Worker


@dataclass(frozen=True)
class Event:
    """Something happened to a trial: it started, finished a round, or is over.

    Attributes:
        trial: which.
        round: the round that it finished, or None.
        over: whether it is done, well or not.
        error: why it failed, or None.
    """

    trial: Trial
    round: RoundRecord | None = None
    over: bool = False
    error: str | None = None


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_experiment(
    experiment: Experiment,
    folder: Path,
    *,
    resume: bool = False,
    jobs: int | None = None,
    on_event: Callable[[Event], None] = lambda _: None,
) -> list[Event]:
    """Run every trial and write its record into ``folder``.

    Args:
        experiment: what to run.
        folder: a new or empty folder.
        resume: go on with the run in ``folder``, which is ``experiment``'s: its finished trials stay, the others go on
            from their last checkpoint and end as if nothing had stopped them.
        jobs: processes; None for as many as there are cores, and trials.
        on_event: called in this process, as things happen.

    Returns:
        The trials that failed, as their last events. They do not stop the others.

    Raises:
        ConfigError: the folder is not new or empty.
        KeyboardInterrupt: after the processes were stopped; the records hold every finished round.
    """
    if not resume:
        prepare(folder, experiment)
    waiting = deque(trials(experiment))
    failed: list[Event] = []
    workers: list[Worker] = []

    def begin(worker: Worker) -> None:
        worker.start(waiting.popleft())
        on_event(Event(worker.trial))

    try:
        for _ in range(min(jobs or cores(), len(waiting))):
            workers.append(Worker(folder))
            begin(workers[-1])
        while workers:
            ready = wait([worker.pipe for worker in workers])
            for worker in [worker for worker in workers if worker.pipe in ready]:
                message = worker.receive()
                if not isinstance(message, Ended):
                    on_event(Event(worker.trial, round=message))
                    continue
                event = Event(worker.trial, over=True, error=message.error)
                on_event(event)
                if message.error is not None:
                    failed.append(event)
                if waiting and worker.alive:
                    begin(worker)
                    continue
                worker.stop()
                workers.remove(worker)
                if waiting:
                    workers.append(Worker(folder))
                    begin(workers[-1])
    finally:
        for worker in workers:
            worker.stop()
    return failed
