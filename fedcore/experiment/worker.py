"""Workers, which run trials: a process of its own, or the run's; and the messages between a worker and the run."""

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

from fedcore.atomic_file import inside, require_file, write_text
from fedcore.errors import FedcoreError
from fedcore.experiment.records import RoundRecord
from fedcore.experiment.trial import Trial
from fedcore.registries import load_module
from fedcore.runtime import hide_warnings_of_others, set_threads, threads
from fedcore.tracing import Recorded, absorb, longest_timeline, trace

if TYPE_CHECKING:
    from fedcore.experiment.build import MakeEngine  # which imports torch: the run's own process need not wait for it

_GUARD = (
    " before its first round; a program of one's own is imported by each process: begin runs below "
    'if __name__ == "__main__", or with jobs=0'
)


class _RunIsGoneError(BaseException):
    """There is nobody to tell. No Exception, since it is not the trial that failed."""


@dataclass(frozen=True)
class Ended:
    """A trial is over.

    Attributes:
        error: why, if it failed.
        trace: where, if that was none of fedcore's own errors.
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


class Worker:
    """One process that runs trials.

    Spawned, not forked: a forked child inherits torch's threads as locks that nobody holds.

    Args:
        imports: modules, or paths of files, that it imports first.
    """

    def __init__(self, imports: Sequence[str] = ()) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, tuple(imports)), daemon=True)
        with _interrupts_ignored():  # what the child inherits: Ctrl-C is the run's business, also while it starts
            self.process.start()
        theirs.close()
        self.alive, self._is_new = True, True

    def start(self, trial: Trial, folder: Path) -> None:
        """Begin a trial that is recorded in ``folder``; the traces that are open are told of it when it is over."""
        with suppress(BrokenPipeError):  # a process that is gone shows when its messages are received
            self.pipe.send((trial, folder, longest_timeline()))

    def receive(self) -> RoundRecord | Ended:
        """The next message about the trial: its rounds, and at last one ``Ended``, whatever happens."""
        try:
            message: RoundRecord | Ended | Recorded = self.pipe.recv()
            while isinstance(message, Recorded):
                absorb(message)
                message = self.pipe.recv()
        except (EOFError, ConnectionResetError):  # killed, by the system's memory guard for instance
            self.alive = False
            self.process.join()
            unguarded = self._is_new and self.process.exitcode == 1
            return Ended(f"its process ended with exit status {self.process.exitcode}{_GUARD * unguarded}")
        self._is_new = False
        return message

    def stop(self) -> None:
        """End the process at once; every line of its record that was written stays."""
        self.process.terminate()
        self.process.join()
        self.pipe.close()


def run_here(
    trial: Trial,
    folder: Path,
    tell: Callable[[RoundRecord | Ended], None],
    make_engine: "MakeEngine | None" = None,
) -> None:
    """Run a trial in this process, and tell of it what a ``Worker`` would.

    Torch and the kernels have their threads back afterwards.
    """
    import torch

    before = torch.get_num_threads(), threads()
    try:
        _run(trial, folder, tell, make_engine=make_engine)
    finally:
        torch.set_num_threads(before[0])
        set_threads(before[1])


def _work(pipe: Connection, imports: Sequence[str]) -> None:
    hide_warnings_of_others()
    threading.Thread(target=_end_with_the_run, daemon=True).start()

    def tell(message: RoundRecord | Ended | Recorded) -> None:
        try:
            pipe.send(message)
        except (BrokenPipeError, ConnectionResetError):
            raise _RunIsGoneError from None

    with suppress(EOFError, ConnectionResetError, _RunIsGoneError):
        while True:
            received: tuple[Trial, Path, int | None] = pipe.recv()
            trial, folder, timeline = received
            if timeline is None:
                _run(trial, folder, tell, imports)
            else:
                _run_traced(trial, folder, tell, imports, timeline)


def _end_with_the_run() -> None:
    """End this process when the run's is gone, however that ended: a round may take hours, and nobody waits for it."""
    run = parent_process()
    if run is not None:
        wait([run.sentinel])
        os._exit(1)  # as a kill: every line of the record that was written stays


def _run_traced(
    trial: Trial,
    folder: Path,
    tell: Callable[[RoundRecord | Ended | Recorded], None],
    imports: Sequence[str],
    timeline: int,
) -> None:
    """Run a trial for a run whose process is traced, which takes this one's part in before it hears of the end."""
    with trace(timeline=timeline) as own:

        def tell_of_both(message: RoundRecord | Ended) -> None:
            if isinstance(message, Ended):
                tell(own.recorded())
            tell(message)

        _run(trial, folder, tell_of_both, imports)


def _run(
    trial: Trial,
    folder: Path,
    tell: Callable[[RoundRecord | Ended], None],
    imports: Sequence[str] = (),
    make_engine: "MakeEngine | None" = None,
) -> None:
    import torch

    from fedcore.engines import InProcess
    from fedcore.experiment.loop import run_trial  # which imports torch too: the run's own process need not wait for it

    torch.set_num_threads(1)  # the order of torch's sums depends on it, and the figures must not on the machine
    set_threads(trial.experiment.threads)
    forget_trace(trial, folder)

    def do() -> None:
        for module in imports:
            load_module(module)
        run_trial(trial, folder, tell, make_engine=make_engine or InProcess)

    tell(outcome(do).logged(trial, folder))


def forget_trace(trial: Trial, folder: Path) -> None:
    """Delete the traceback that a try before this one has left."""
    log = require_file(_log(trial, folder))
    with suppress(FileNotFoundError):
        if "Traceback (most recent call last)" in log.read_text(encoding="utf-8", errors="replace"):
            log.unlink()


def _log(trial: Trial, folder: Path) -> Path:
    return (inside(folder, folder / "records") / trial.file_name).with_suffix(".traceback.txt")


def outcome(do: Callable[[], None]) -> Ended:
    """The end of a trial, or of a part of it, that is done here."""
    try:
        do()
    except FedcoreError as error:
        return Ended(str(error))
    except Exception as error:
        return Ended(f"{type(error).__name__}: {error}", traceback.format_exc())
    return Ended(None)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may change, or would get, a signal
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
