"""Trials on Ray: each in one worker, here or on another machine, with all that it leaves in the run's folder here."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedcore.arguments import real, whole
from fedcore.engines.ray import Session
from fedcore.engines.ray.pool import MOST_TRIES, Pool, Worker
from fedcore.experiment.checkpoints import SECONDS
from fedcore.experiment.jobs import Event, Job
from fedcore.experiment.journal import FolderJournal
from fedcore.experiment.ray_worker import Begun, Copied, Kept, Message, TrialWorker
from fedcore.experiment.records import RoundRecord
from fedcore.experiment.worker import Ended, forget_trace, outcome
from fedcore.ray_session import LostError


@dataclass(frozen=True)
class RayTrials:
    """Runs trials in workers on Ray, one each at a time; the way of ``run_sweep`` over many machines.

    A run's folder is written here, as a trial in a process of this machine writes it. A trial whose worker is lost goes
    on in another one from its last checkpoint, which comes here as bytes, whole. Data is found by each machine itself.

    Args:
        workers: processes.
        gpus: that each asks for; a fraction, perhaps. Of cores each asks for as many as an experiment has threads.
        address: as for ``engines.ray.Session``.
        checkpoint_seconds: the least time between two checkpoints of a trial.

    Raises:
        RangeError: a number is out of range.
    """

    workers: int = 2
    gpus: float = 0.0
    address: str | None = None
    checkpoint_seconds: float = SECONDS

    def __post_init__(self) -> None:
        whole("workers", self.workers, 1)
        real("gpus", self.gpus, "[0, inf)")
        real("checkpoint_seconds", self.checkpoint_seconds, "[0, inf)")

    def __call__(
        self, jobs: Iterable[Job], imports: Sequence[str] = (), on_event: Callable[[Event], None] = lambda _: None
    ) -> list[Event]:
        """Run them; see ``jobs.run_jobs``.

        Raises:
            MissingDependencyError, ClusterError: Ray, or the cluster, is not there; or workers end before they begin.
        """
        courses = [_Course(job, on_event) for job in jobs]
        cpus = max((course.job.trial.experiment.threads for course in courses), default=1)
        workers = max(1, min(self.workers, len(courses)))
        with Session(self.address, cpus=workers * cpus) as session:
            pool = Pool(session, TrialWorker, workers, cpus=cpus, gpus=self.gpus, told=(tuple(imports),))
            try:
                _Run(pool, courses, self.checkpoint_seconds).run()
            finally:
                pool.close()
                for course in courses:
                    course.close()
        return [course.last for course in courses if course.last is not None and course.last.error is not None]


@dataclass(eq=False)
class _Course:
    """A trial on its way.

    Attributes:
        told: rounds that were told of: a trial that goes on in another worker does those past its copy again.
        lost: workers, since the last round that was told of.
        last: its last event.
    """

    job: Job
    on_event: Callable[[Event], None]
    journal: FolderJournal | None = field(default=None, init=False)
    told: int = field(default=0, init=False)
    lost: int = field(default=0, init=False)
    last: Event | None = field(default=None, init=False)

    def open(self, seconds: float) -> FolderJournal:
        """Find what is in the run's folder."""
        self.close()
        self.journal = FolderJournal(self.job.trial, self.job.folder, seconds)
        return self.journal

    def take(self, message: Message) -> Sequence[RoundRecord]:
        """Write here what the journal was told there; returns the rounds in it."""
        journal = self.journal
        assert journal is not None, "open comes first"
        if isinstance(message, Begun):
            before = journal.before[: message.rounds]
            journal.begin(before)
            return before
        if isinstance(message, RoundRecord):
            journal.add(message)
            return (message,)
        if isinstance(message, Copied):
            journal.put(message.copy)
        elif isinstance(message, Kept):
            journal.keep(message.round, message.tensors)
        elif message.error is None:
            journal.end()
        return ()

    def tell(self, lines: Iterable[RoundRecord]) -> None:
        """Tell the run of rounds, of each once."""
        for line in lines:
            if line.round >= self.told:
                self.told, self.lost = line.round + 1, 0
                self.on_event(Event(self.job, round=line))

    def finish(self, ended: Ended) -> None:
        """Tell the run that it is over."""
        self.close()
        self.last = Event(self.job, over=True, error=ended.logged(self.job.trial, self.job.folder).error)
        self.on_event(self.last)

    def close(self) -> None:
        """Close the record."""
        if self.journal is not None:
            self.journal.close()


class _Run:
    """The trials of one call: those that wait, and those that a worker is at."""

    def __init__(self, pool: Pool, courses: Iterable[_Course], seconds: float) -> None:
        self._pool, self._seconds = pool, seconds
        self._waiting = deque(courses)
        self._running: dict[Any, tuple[_Course, Worker]] = {}

    def run(self) -> None:
        """Do them all."""
        while self._waiting or self._running:
            while self._waiting and (worker := self._pool.free(1)) is not None:
                self._begin(self._waiting.popleft(), worker)
            if self._waiting or self._running:
                for reference in self._pool.ready(self._running):
                    self._take(reference, *self._running.pop(reference))

    def _begin(self, course: _Course, worker: Worker) -> None:
        """Give a worker a trial; one that is complete is only read."""
        if course.journal is None:
            course.on_event(Event(course.job))
            forget_trace(course.job.trial, course.job.folder)
        lines: list[RoundRecord] = []

        def do() -> None:
            journal = course.open(self._seconds)
            if journal.is_complete:
                journal.end()
                lines.extend(journal.before)
            else:
                asked = worker.actor.begin.remote(course.job.trial, journal.before, journal.carried(), self._seconds)
                self._gave(asked, course, worker)

        ended = outcome(do)
        course.tell(lines)
        if not worker.tasks:
            course.finish(ended)

    def _gave(self, reference: Any, course: _Course, worker: Worker) -> None:
        self._running[reference] = course, worker
        worker.tasks.append(0)

    def _take(self, reference: Any, course: _Course, worker: Worker) -> None:
        """Take in what a worker has done, and have it go on."""
        try:
            messages: list[Message] = self._pool.result(reference)
        except LostError as error:
            self._again(course, worker, error)
            return
        worker.tasks.clear()
        lines: list[RoundRecord] = []

        def do() -> None:
            for message in messages:
                lines.extend(course.take(message))

        ended = outcome(do)
        course.tell(lines)
        over = messages[-1] if messages and isinstance(messages[-1], Ended) else None
        if ended.error is None and over is None:
            self._gave(worker.actor.go_on.remote(), course, worker)
            return
        if over is None:  # what it has done cannot be written: it would go on for nobody
            self._pool.drop(worker)
            self._pool.fill()
        course.finish(over if over is not None and ended.error is None else ended)

    def _again(self, course: _Course, worker: Worker, error: LostError) -> None:
        """Have another worker go on with a trial whose worker is lost, before all that wait."""
        self._pool.lose(worker, error)
        self._pool.fill()
        course.lost += 1
        if course.lost < MOST_TRIES:
            self._waiting.appendleft(course)
            self._pool.stats.retried += 1
        else:
            course.finish(
                Ended(
                    f"the workers ended {MOST_TRIES} times while they ran it: {error}; see their machines' memory, and "
                    "Ray's logs"
                )
            )
