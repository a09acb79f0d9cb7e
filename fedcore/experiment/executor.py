"""Trials in worker processes, on this machine or on Ray, or in this process."""

import os
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from fedcore.arguments import real, whole
from fedcore.atomic_file import inside, require_file, write_text
from fedcore.errors import ClusterError, FedcoreError
from fedcore.experiment.journal import SECONDS, Copy, Entry, FolderJournal, SentJournal
from fedcore.experiment.results import RoundRecord
from fedcore.experiment.schema import Trial
from fedcore.profiling import Recorded, absorb, profile, room
from fedcore.registries import load_module
from fedcore.representation import Represented
from fedcore.runtime import hide_warnings_of_others, set_threads, threads
from fedcore.simulation.executor import MOST_TRIES, LostError, Pool, Processes, Session, Worker

if TYPE_CHECKING:  # the modules below import torch, for which the process of a run need not wait
    from fedcore.experiment.trial import MakeEngine

SLICE = 0.25
"""Seconds of rounds that a worker sends together: a call costs some milliseconds, and a bar should move."""


@dataclass(frozen=True)
class Job:
    """A trial, and the folder in which it is recorded.

    Attributes:
        trial: what to run.
        folder: of a run, made by ``run_folder.prepare``.
        group: the run's name in messages, if there is more than one run.
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


OnEvent = Callable[[Event], None]


@dataclass(frozen=True)
class Ended:
    """A trial is over.

    Attributes:
        error: why, if it failed.
        trace: where, if that was none of fedcore's errors.
    """

    error: str | None
    trace: str | None = None

    def logged(self, trial: Trial, folder: Path) -> "Ended":
        """The same with the trace in a file beside the trial's record."""
        if self.trace is None:
            return self
        log = _log(trial, folder)
        try:
            write_text(log, self.trace)
        except OSError:  # a full disk, which may be why it failed
            return Ended(self.error)
        return Ended(f"{self.error} (see {log})")


def run_here(jobs: Iterable[Job], make_engine: "MakeEngine | None", on_event: OnEvent) -> list[Event]:
    """Run trials in this process; torch and the kernels have their threads back afterwards. See ``run_jobs``."""
    import torch

    from fedcore.experiment.trial import run_trial
    from fedcore.simulation.in_process import InProcess

    courses = [_Course(job, on_event) for job in jobs]
    before = torch.get_num_threads(), threads()
    try:
        for course in courses:
            trial, folder = course.job.trial, course.job.folder
            torch.set_num_threads(1)  # the order of torch's sums depends on it, and results must not on the machine
            set_threads(trial.experiment.threads)
            on_event(Event(course.job))

            def run(course: _Course = course, trial: Trial = trial, folder: Path = folder) -> None:
                course.forget_trace()
                run_trial(trial, folder, lambda line: course.report([line]), make_engine=make_engine or InProcess)

            course.finish(_outcome(run))
    finally:
        torch.set_num_threads(before[0])
        set_threads(before[1])
    return _failed(courses)


def run_in_processes(jobs: Iterable[Job], processes: int, imports: Sequence[str], on_event: OnEvent) -> list[Event]:
    """Run trials in processes of this machine. See ``run_jobs``."""
    courses = [_Course(job, on_event) for job in jobs]
    if courses:
        pool = Pool(Processes(), TrialWorker, min(processes, len(courses)), arguments=(tuple(imports),))
        _Run(pool, courses, tries=1).run()
    return _failed(courses)


@dataclass(frozen=True)
class RayTrials:
    """Runs trials in workers on Ray, one each at a time; the way of ``run_sweep`` over many machines.

    A run's folder is written here, with the bytes that a process of this machine would write. A trial whose worker is
    lost goes on in another one from its last checkpoint, which comes here as bytes. Each machine finds data itself.

    Args:
        workers: processes.
        gpus: that each asks for; a fraction, perhaps. Of cores each asks for as many as an experiment has threads.
        address: as for ``simulation.executor.Session``.
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
        self, jobs: Iterable[Job], imports: Sequence[str] = (), on_event: OnEvent = lambda _: None
    ) -> list[Event]:
        """Run them; see ``run_jobs``.

        Raises:
            MissingDependencyError, ClusterError: Ray, or the cluster, is not there; or workers end before they begin.
        """
        courses = [_SentCourse(job, on_event, self.checkpoint_seconds) for job in jobs]
        cpus = max((course.job.trial.experiment.threads for course in courses), default=1)
        workers = max(1, min(self.workers, len(courses)))
        with Session(self.address, cpus=workers * cpus) as session:
            pool = Pool(session, TrialWorker, workers, cpus=cpus, gpus=self.gpus, arguments=(tuple(imports),))
            _Run(pool, courses, tries=MOST_TRIES).run()
        return _failed(courses)


@dataclass(eq=False)
class _Course:
    """A trial on its way, whose worker writes the run's folder.

    Attributes:
        reported: the rounds so far: one that goes on in another worker repeats those after its checkpoint.
        lost: workers, since the last reported round.
        last: its last event.
        lines: the rounds of a trial that was complete before.
    """

    job: Job
    on_event: OnEvent
    reported: int = field(default=0, init=False)
    lost: int = field(default=0, init=False)
    last: Event | None = field(default=None, init=False)
    lines: Sequence[RoundRecord] = field(default=(), init=False)

    def forget_trace(self) -> None:
        """Delete the traceback of an earlier try."""
        log = _log(self.job.trial, self.job.folder)
        with suppress(FileNotFoundError):
            if "Traceback (most recent call last)" in require_file(log).read_text(encoding="utf-8", errors="replace"):
                log.unlink()

    def arguments(self) -> tuple[Any, ...] | None:
        """The arguments of ``TrialWorker.begin``; None if there is nothing left to do."""
        return self.job.trial, self.job.folder, room()

    def take(self, message: "Message") -> Sequence[RoundRecord]:
        """Take in a worker's message; return the rounds in it."""
        if isinstance(message, Recorded):
            absorb(message)
        return (message,) if isinstance(message, RoundRecord) else ()

    def report(self, lines: Iterable[RoundRecord]) -> None:
        """Report rounds, each once."""
        for line in lines:
            if line.round >= self.reported:
                self.reported, self.lost = line.round + 1, 0
                self.on_event(Event(self.job, round=line))

    def finish(self, ended: Ended) -> None:
        """Report that it is over."""
        self.close()
        self.last = Event(self.job, over=True, error=ended.logged(self.job.trial, self.job.folder).error)
        self.on_event(self.last)

    def close(self) -> None:
        """Close its files."""


@dataclass(eq=False)
class _SentCourse(_Course):
    """A trial whose worker is on another machine, perhaps, and sends what is written here."""

    seconds: float
    journal: FolderJournal | None = field(default=None, init=False)

    def arguments(self) -> tuple[Any, ...] | None:
        """See ``_Course``."""
        self.close()
        journal = self.journal = FolderJournal(self.job.trial, self.job.folder, self.seconds)
        if journal.is_complete:
            journal.end()
            self.lines = journal.before
            return None
        return self.job.trial, (journal.before, journal.carried(), self.seconds), None

    def take(self, message: "Message") -> Sequence[RoundRecord]:
        """See ``_Course``."""
        assert self.journal is not None, "arguments comes first"
        if isinstance(message, Ended):
            if message.error is None:
                self.journal.end()
            return ()
        assert not isinstance(message, Recorded), "it has no timeline"
        return self.journal.take(message)

    def close(self) -> None:
        """See ``_Course``."""
        if self.journal is not None:
            self.journal.close()


class _Run:
    """The trials of one call: those that wait, and those that a worker is at.

    Args:
        pool: the workers; ended afterwards.
        courses: the trials.
        tries: workers that a trial may lose in one round before it fails.
    """

    def __init__(self, pool: Pool, courses: Sequence[_Course], tries: int) -> None:
        self._pool, self._courses, self._tries = pool, courses, tries
        self._waiting = deque(courses)
        self._running: dict[Any, tuple[_Course, Worker]] = {}

    def run(self) -> None:
        """Run them all; on this machine, trials that no process could begin fail."""
        try:
            while self._waiting or self._running:
                while self._waiting and (worker := self._pool.free()) is not None:
                    self._begin(self._waiting.popleft(), worker)
                if self._waiting or self._running:
                    for reference in self._pool.wait(self._running):
                        self._take(reference, *self._running.pop(reference))
        except ClusterError as error:
            if self._tries > 1:
                raise
            for course in [*self._waiting, *(course for course, _ in self._running.values())]:
                course.finish(Ended(str(error)))
        finally:
            self._pool.close()
            for course in self._courses:
                course.close()

    def _begin(self, course: _Course, worker: Worker) -> None:
        """Give a worker a trial."""

        is_first = not course.reported and not course.lost
        if is_first:
            course.on_event(Event(course.job))

        def begin() -> None:
            if is_first:
                course.forget_trace()
            if (arguments := course.arguments()) is not None:
                self._submit(course, worker, "begin", *arguments)

        ended = _outcome(begin)
        if not worker.tasks:
            course.report(course.lines)
            course.finish(ended)

    def _submit(self, course: _Course, worker: Worker, method: str, *arguments: Any) -> None:
        self._running[self._pool.submit(worker, method, *arguments)] = course, worker
        worker.tasks.append(0)

    def _take(self, reference: Any, course: _Course, worker: Worker) -> None:
        """Take in a worker's messages, and let it go on."""
        try:
            messages: list[Message] = self._pool.result(reference)
        except LostError as error:
            self._lose(course, worker, error)
            return
        worker.tasks.clear()
        lines: list[RoundRecord] = []

        def take() -> None:
            for message in messages:
                lines.extend(course.take(message))

        ended = _outcome(take)
        course.report(lines)
        over = messages[-1] if messages and isinstance(messages[-1], Ended) else None
        if ended.error is None and over is None:
            self._submit(course, worker, "go_on")
            return
        if over is None or not self._waiting:  # its rounds cannot be written here, or it is needed no longer
            self._pool.drop(worker)
            self._pool.fill(len(self._waiting))
        course.finish(over if over is not None and ended.error is None else ended)

    def _lose(self, course: _Course, worker: Worker, error: LostError) -> None:
        """Let another worker go on with a trial whose worker is lost, before all that wait; or give it up."""
        self._pool.lose(worker, error)
        course.lost += 1
        if course.lost < self._tries:
            self._waiting.appendleft(course)
            self._pool.stats.retried += 1
        elif self._tries == 1:
            course.finish(Ended(str(error)))
        else:
            course.finish(
                Ended(
                    f"{self._tries} workers ended while they ran it: {error}; see the memory of their machines, and "
                    "Ray's logs"
                )
            )
        self._pool.fill(len(self._waiting))


Message = Entry | Recorded | Ended
"""A message of a worker about its trial."""


class TrialWorker:
    """The object of a worker's process, which runs one trial at a time."""

    def prepare(self, imports: Sequence[str]) -> int:
        """Take the modules, or paths of files, that trials need; return the number of this process."""
        hide_warnings_of_others()
        self._imports = imports
        self._messages: list[Message] = []
        return os.getpid()

    def begin(
        self, trial: Trial, journal: Path | tuple[Sequence[RoundRecord], Copy | None, float], timeline: int | None
    ) -> list[Message]:
        """Begin a trial, or go on with one, and do some rounds; see ``go_on``.

        Args:
            trial: what to run.
            journal: the run's folder; or the arguments of a ``SentJournal``, if the folder is on another machine.
            timeline: of the caller's traces; None without any.
        """
        self._lines = self._run(trial, journal, timeline)
        return self.go_on()

    def go_on(self) -> list[Message]:
        """Do some rounds; return messages about them, and at last one ``Ended``."""
        until, is_over = perf_counter() + SLICE, True

        def some() -> None:
            nonlocal is_over
            for _ in self._lines:
                if perf_counter() >= until:
                    is_over = False
                    return

        ended = _outcome(some)
        messages, self._messages = self._messages, []
        return [*messages, ended] if is_over else messages

    def _run(
        self, trial: Trial, journal: Path | tuple[Sequence[RoundRecord], Copy | None, float], timeline: int | None
    ) -> Generator[None, None, None]:
        import torch

        from fedcore.experiment.trial import trial_rounds

        torch.set_num_threads(1)  # the order of torch's sums depends on it, and results must not on the machine
        set_threads(trial.experiment.threads)
        for name in self._imports:
            load_module(name)
        with ExitStack() as held:
            if timeline is not None:
                own = held.enter_context(profile(timeline=timeline))
                held.callback(lambda: self._messages.append(own.recorded()))
            if isinstance(journal, Path):
                for line in trial_rounds(trial, held.enter_context(FolderJournal(trial, journal))):
                    self._messages.append(line)
                    yield
            else:
                sent = SentJournal(*journal, lambda entry: self._messages.append(entry))
                for _ in trial_rounds(trial, held.enter_context(sent)):
                    yield


def _failed(courses: Iterable[_Course]) -> list[Event]:
    return [course.last for course in courses if course.last is not None and course.last.error is not None]


def _log(trial: Trial, folder: Path) -> Path:
    return (inside(folder, folder / "records") / trial.file_name).with_suffix(".traceback.txt")


def _outcome(run: Callable[[], None]) -> Ended:
    """The end of a trial, or of a part of it, that is run here."""
    try:
        run()
    except FedcoreError as error:
        return Ended(str(error))
    except Exception as error:
        return Ended(f"{type(error).__name__}: {error}", traceback.format_exc())
    return Ended(None)
