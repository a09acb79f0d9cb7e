"""Execution of trials: in worker processes on this machine, on Ray, or in this process."""

import os
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

from fedcore.cluster.workers import MOST_TRIES, LostError, Pool, Processes, Session, Worker
from fedcore.errors import ClusterError, FedcoreError
from fedcore.files import read_bytes, write_text
from fedcore.profiling import Recorded, absorb, profile, room
from fedcore.runtime import hide_warnings_of_others, import_quietly, set_threads, threads
from fedcore.sim.checks import Checked, Real, Whole
from fedcore.sim.experiment import results
from fedcore.sim.experiment.results import SECONDS, Begun, Copy, Entry, FolderJournal, RoundRecord, SentJournal
from fedcore.sim.experiment.schema import Trial
from fedcore.validation import Represented, load_module

if TYPE_CHECKING:  # these modules import torch, which the process of a run does not need
    from fedcore.sim.experiment.trial import MakeEngine

SLICE = 0.25
"""Seconds that a worker computes per call. A call costs some milliseconds, but progress bars should move smoothly."""


@dataclass(frozen=True)
class Job:
    """A trial, its run's folder (see ``runner.prepare``), and its run's name for messages (``group``)."""

    trial: Trial
    folder: Path
    group: str = ""

    @property
    def name(self) -> str:
        """The job's name in messages."""
        return f"{self.group}, {self.trial.name}" if self.group else self.trial.name


@dataclass(frozen=True, repr=False)
class Event(Represented):
    """An event of a trial: its start, a finished round, or its end.

    Attributes:
        job: the trial and its folder.
        round: the finished round, or None.
        over: whether the trial ended, successfully or not.
        error: the reason of a failure, or None.
    """

    job: Job
    round: RoundRecord | None = None
    over: bool = False
    error: str | None = None

    @property
    def trial(self) -> Trial:
        """The trial."""
        return self.job.trial

    def _facts(self) -> dict[str, Any]:
        number = None if self.round is None else self.round.round
        return {"job": self.job.name, "round": number, "over": self.over or None, "error": self.error}


OnEvent = Callable[[Event], None]


@dataclass(frozen=True)
class Ended:
    """The end of a trial: the reason of a failure, with its traceback if it is not a ``FedcoreError``."""

    error: str | None
    trace: str | None = None

    def logged(self, trial: Trial, folder: Path) -> "Ended":
        """Write the traceback into a file next to the trial's record; return the end with the path of this file."""
        if self.trace is None:
            return self
        log = _traceback_file(trial, folder)
        try:
            write_text(log, self.trace)
        except OSError:  # for example a full disk, which may have caused the failure
            return Ended(self.error)
        return Ended(f"{self.error} (see {log})")


def run_in_this_process(jobs: Iterable[Job], make_engine: "MakeEngine | None", on_event: OnEvent) -> list[Event]:
    """Run trials in this process; restore the thread counts of torch and the kernels afterwards. See ``run_jobs``."""
    import_quietly("torch")
    import torch

    from fedcore.sim.experiment.trial import run_trial
    from fedcore.sim.in_process import InProcess

    raised: list[Exception] = []  # by on_event: the caller's errors end the run

    def run(task: _Task) -> None:
        def report(line: RoundRecord) -> None:
            try:
                task.report([line])
            except Exception as error:
                raised.append(error)
                raise

        task.delete_traceback()
        run_trial(task.job.trial, task.job.folder, report, make_engine=make_engine or InProcess)

    tasks = [_Task(job, on_event) for job in jobs]
    before = torch.get_num_threads(), threads()
    try:
        for task in tasks:
            torch.set_num_threads(1)  # torch's sums depend on the number, which must not depend on the machine
            set_threads(task.job.trial.experiment.threads)
            on_event(Event(task.job))
            ended = _outcome(run, task)
            if raised:
                raise raised[0]
            task.finish(ended)
    finally:
        torch.set_num_threads(before[0])
        set_threads(before[1])
    return _failed(tasks)


def run_in_processes(jobs: Iterable[Job], processes: int, imports: Sequence[str], on_event: OnEvent) -> list[Event]:
    """Run trials in processes on this machine. See ``run_jobs``."""
    tasks = [_Task(job, on_event) for job in jobs]
    if tasks:
        pool = Pool(Processes(), TrialWorker, min(processes, len(tasks)), arguments=(tuple(imports),))
        _Scheduler(pool, tasks, tries=1).run()
    return _failed(tasks)


@dataclass(frozen=True)
class RayTrials(Checked):
    """Runs the trials of a sweep in Ray workers, one trial per worker at a time: a ``runner`` of ``run_sweep``.

    This process writes the run's folder, with the same bytes as a local run. If a worker is lost, a different one
    resumes its trial from the last checkpoint; workers send checkpoints as bytes. Each machine needs the data.

    Args:
        workers: the number of worker processes.
        gpus: GPUs per worker, possibly a fraction. A worker also requests one core per thread of its experiment.
        address: as for ``fedcore.cluster.workers.Session``.
        checkpoint_seconds: the minimum time between two checkpoints of a trial.
    """

    workers: Annotated[int, Whole(1)] = 2
    gpus: Annotated[float, Real("[0, inf)")] = 0.0
    address: str | None = None
    checkpoint_seconds: Annotated[float, Real("[0, inf)")] = SECONDS

    def __call__(
        self, jobs: Iterable[Job], imports: Sequence[str] = (), on_event: OnEvent = lambda _: None
    ) -> list[Event]:
        """Run trials; see ``run_jobs``."""
        tasks = [_Task(job, on_event, self.checkpoint_seconds) for job in jobs]
        cpus = max((task.job.trial.experiment.threads for task in tasks), default=1)
        workers = max(1, min(self.workers, len(tasks)))
        with Session(self.address, cpus=workers * cpus) as session:
            pool = Pool(session, TrialWorker, workers, cpus=cpus, gpus=self.gpus, arguments=(tuple(imports),))
            _Scheduler(pool, tasks, tries=MOST_TRIES).run()
        return _failed(tasks)


@dataclass(eq=False)
class _Task:
    """A trial in progress.

    ``seconds`` (between checkpoints) and ``journal`` are None if the worker writes the folder. ``reported`` counts
    rounds: a trial that resumes in a new worker repeats the rounds after its checkpoint. ``lost`` counts workers since
    the last reported round. ``lines`` are the rounds of a trial that was already complete.
    """

    job: Job
    on_event: OnEvent
    seconds: float | None = None
    journal: FolderJournal | None = field(default=None, init=False)
    reported: int = field(default=0, init=False)
    lost: int = field(default=0, init=False)
    last: Event | None = field(default=None, init=False)
    lines: Sequence[RoundRecord] = field(default=(), init=False)

    def delete_traceback(self) -> None:
        """Delete the traceback file of an earlier attempt."""
        log = _traceback_file(self.job.trial, self.job.folder)
        with suppress(FileNotFoundError):
            if b"Traceback (most recent call last)" in read_bytes(log):
                log.unlink()

    def arguments(self) -> tuple[Any, ...] | None:
        """Return the arguments of ``TrialWorker.begin``; None if the trial is already complete."""
        if self.seconds is None:
            return self.job.trial, self.job.folder, room()
        self.close()
        journal = self.journal = FolderJournal(self.job.trial, self.job.folder, self.seconds)
        if journal.is_complete:
            journal.end()
            self.lines = journal.before
            return None
        return self.job.trial, (journal.before, journal.carried(), self.seconds), None

    def take(self, message: "Message") -> Sequence[RoundRecord]:
        """Process a worker's message; return the rounds that it contains."""
        if isinstance(message, Recorded):
            absorb(message)
        elif isinstance(message, Ended):
            if self.journal is not None and message.error is None:
                self.journal.end()
        else:
            if self.journal is not None:
                self.journal.put(message)
                if isinstance(message, Begun):
                    return self.journal.before[: message.rounds]
            if isinstance(message, RoundRecord):
                return (message,)
        return ()

    def report(self, lines: Iterable[RoundRecord]) -> None:
        """Report each round once, even if a new worker repeats it."""
        for line in lines:
            if line.round >= self.reported:
                self.reported, self.lost = line.round + 1, 0
                self.on_event(Event(self.job, round=line))

    def finish(self, ended: Ended) -> None:
        """Report the end of the trial."""
        self.close()
        self.last = Event(self.job, over=True, error=ended.logged(self.job.trial, self.job.folder).error)
        self.on_event(self.last)

    def close(self) -> None:
        if self.journal is not None:
            self.journal.close()


class _Scheduler:
    """Distributes trials over a pool's workers. A trial fails after ``tries`` lost workers in one round."""

    def __init__(self, pool: Pool, tasks: Sequence[_Task], tries: int) -> None:
        self._pool, self._tasks, self._tries = pool, tasks, tries
        self._waiting = deque(tasks)
        self._running: dict[Any, tuple[_Task, Worker]] = {}

    def run(self) -> None:
        """Run all trials. With one try, all remaining trials fail if no process can be started."""
        try:
            while self._waiting or self._running:
                while self._waiting and (worker := self._pool.free()) is not None:
                    self._begin(self._waiting.popleft(), worker)
                if self._waiting or self._running:
                    for reference in self._pool.wait(self._running):
                        self._continue(reference, *self._running.pop(reference))
        except ClusterError as error:
            if self._tries > 1:
                raise
            for task in [*self._waiting, *(task for task, _ in self._running.values())]:
                task.finish(Ended(str(error)))
        finally:
            self._pool.close()
            for task in self._tasks:
                task.close()

    def _begin(self, task: _Task, worker: Worker) -> None:
        """Start a trial in a worker, or finish it if it is complete or fails at once."""
        is_first = not task.reported and not task.lost
        if is_first:
            task.on_event(Event(task.job))

        def begin() -> None:
            if is_first:
                task.delete_traceback()
            if (arguments := task.arguments()) is not None:
                self._submit(task, worker, "begin", *arguments)

        ended = _outcome(begin)
        if not worker.tasks:
            task.report(task.lines)
            task.finish(ended)

    def _submit(self, task: _Task, worker: Worker, method: str, *arguments: Any) -> None:
        self._running[self._pool.submit(worker, method, *arguments)] = task, worker
        worker.tasks.append(0)

    def _continue(self, reference: Any, task: _Task, worker: Worker) -> None:
        """Process a worker's messages, and let it compute more rounds unless the trial has ended."""
        try:
            messages: list[Message] = self._pool.result(reference)
        except LostError as error:
            self._lose(task, worker, error)
            return
        worker.tasks.clear()
        lines: list[RoundRecord] = []

        def take() -> None:
            for message in messages:
                lines.extend(task.take(message))

        ended = _outcome(take)
        task.report(lines)
        over = messages[-1] if messages and isinstance(messages[-1], Ended) else None
        if ended.error is None and over is None:
            self._submit(task, worker, "proceed")
            return
        if over is None or not self._waiting:  # the rounds cannot be written, or the worker is no longer needed
            self._pool.drop(worker)
            self._pool.fill(len(self._waiting))
        task.finish(over if over is not None and ended.error is None else ended)

    def _lose(self, task: _Task, worker: Worker, error: LostError) -> None:
        """Put the trial of a lost worker in front of all waiting trials, or let it fail after the last try."""
        self._pool.lose(worker, error)
        task.lost += 1
        if task.lost < self._tries:
            self._waiting.appendleft(task)
            self._pool.stats.retried += 1
        else:
            advice = "check worker memory and the Ray logs"
            text = str(error) if self._tries == 1 else f"gave up after {self._tries} lost workers: {error}; {advice}"
            task.finish(Ended(text))
        self._pool.fill(len(self._waiting))


Message = Entry | Recorded | Ended
"""A message of a worker about its trial."""
JournalPlace = Path | tuple[Sequence[RoundRecord], Copy | None, float]
"""The run's folder, or the arguments of a ``SentJournal`` if the folder is on a different machine."""


class TrialWorker:
    """The object in a worker process, which runs one trial at a time."""

    def prepare(self, imports: Sequence[str]) -> int:
        """Store the modules, or paths of files, that trials need; return the process id."""
        hide_warnings_of_others()
        self._imports = imports
        self._messages: list[Message] = []
        return os.getpid()

    def begin(self, trial: Trial, journal: JournalPlace, timeline: int | None) -> list[Message]:
        """Begin or resume a trial, and compute some rounds; see ``proceed``. ``timeline`` is None without a profile."""
        self._rounds = self._run(trial, journal, timeline)
        return self.proceed()

    def proceed(self) -> list[Message]:
        """Compute some rounds; return their messages, with an ``Ended`` after the last round."""
        until, is_over = perf_counter() + SLICE, True

        def some() -> None:
            nonlocal is_over
            for _ in self._rounds:
                if perf_counter() >= until:
                    is_over = False
                    return

        ended = _outcome(some)
        messages, self._messages = self._messages, []
        return [*messages, ended] if is_over else messages

    def _run(self, trial: Trial, journal: JournalPlace, timeline: int | None) -> Generator[None, None, None]:
        import torch

        from fedcore.sim.experiment.trial import trial_rounds

        torch.set_num_threads(1)  # torch's sums depend on the number, which must not depend on the machine
        set_threads(trial.experiment.threads)
        for name in self._imports:
            load_module(name)
        with ExitStack() as stack:
            if timeline is not None:
                profiled = stack.enter_context(profile(timeline=timeline))
                stack.callback(lambda: self._send(profiled.recorded()))
            own = FolderJournal(trial, journal) if isinstance(journal, Path) else SentJournal(*journal, self._send)
            for line in trial_rounds(trial, stack.enter_context(own)):
                if isinstance(journal, Path):
                    self._send(line)
                yield

    def _send(self, message: Message) -> None:
        self._messages.append(message)


def _failed(tasks: Iterable[_Task]) -> list[Event]:
    return [task.last for task in tasks if task.last is not None and task.last.error is not None]


def _traceback_file(trial: Trial, folder: Path) -> Path:
    return results.record_of(trial, folder).with_suffix(".traceback.txt")


def _outcome(run: Callable[..., None], *arguments: Any) -> Ended:
    """Call ``run``; return its error, if any, as the end of the trial."""
    try:
        run(*arguments)
    except FedcoreError as error:
        return Ended(str(error))
    except Exception as error:
        return Ended(f"{type(error).__name__}: {error}", traceback.format_exc())
    return Ended(None)
