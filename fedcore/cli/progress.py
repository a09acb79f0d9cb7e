"""The progress of a run: a bar for each trial on a terminal; in a log a line for each, and one now and then."""

from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedcore.experiment import Event

EVERY = 30.0
"""Seconds between two lines in a log."""
MOST = 4
"""Trials that such a line names."""


class RunProgress:
    """Shows the events of a run, or of a sweep; a context manager.

    Args:
        console: where.
        total: rounds of all trials together.
        clock: the seconds since some moment.
    """

    def __init__(self, console: Console, total: int, clock: Callable[[], float] = monotonic) -> None:
        self._console = console
        self._total, self._clock, self._begun, self._told = total, clock, clock(), clock()
        self._done: dict[str, int] = {}  # rounds of each trial, those that are over too
        self._bars: dict[str, TaskID] = {}
        self._accuracy: dict[str, float] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[accuracy]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._all = self._progress.add_task("[bold]all trials", total=total, accuracy="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, event: Event) -> None:
        """Take in one event."""
        trial = event.job.name
        if event.over:
            self._finish(event)
        elif event.round is None:
            self._bars[trial] = self._progress.add_task(trial, total=event.trial.experiment.rounds, accuracy="")
        else:
            if event.round.accuracy is not None:
                self._accuracy[trial] = event.round.accuracy
            shown = f"{100 * self._accuracy[trial]:.1f} %" if trial in self._accuracy else ""
            self._progress.update(self._bars[trial], advance=1, accuracy=shown)
            self._progress.advance(self._all)
            self._done[trial] = event.round.round + 1
            self._tell_now_and_then()

    def _tell_now_and_then(self) -> None:
        """Print a line off a terminal, if the last one is long ago: a log must not fall silent for an hour."""
        now = self._clock()
        if self._console.is_terminal or now - self._told < EVERY:
            return
        self._told = now
        done, gone = sum(self._done.values()), now - self._begun
        left = timedelta(seconds=round(gone / done * (self._total - done)))
        running = [self._where(trial) for trial in list(self._bars)[:MOST]]
        running += [f"{len(self._bars) - MOST} more"] if len(self._bars) > MOST else []
        line = f"{done:,} of {self._total:,} rounds, about {left} left: {'; '.join(running)}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _where(self, trial: str) -> str:
        accuracy = f", {100 * self._accuracy[trial]:.1f} %" if trial in self._accuracy else ""
        return f"{trial}: {self._done.get(trial, 0)}{accuracy}"

    def _finish(self, event: Event) -> None:
        name, rounds = event.job.name, event.trial.experiment.rounds
        self._progress.remove_task(self._bars.pop(name))
        if event.error is not None:
            self._console.print(f"{name}: failed: {event.error}", style="red", markup=False)
        else:
            accuracy = 100 * self._accuracy[name]  # the last round is always evaluated
            self._console.print(f"{name}: {accuracy:.1f} % after {rounds} rounds", markup=False, highlight=False)
