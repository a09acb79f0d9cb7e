"""The progress of a run: bars on a terminal and in a notebook; elsewhere a line a trial, and one now and then."""

from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Self

from fedcore.errors import MissingDependencyError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from fedcore.experiment import Event

EVERY = 30.0
"""Seconds between two lines in a log."""
MOST = 4
"""Trials that such a line names."""
_UNKNOWN = "-:--:--"


class Progress:
    """Shows the events of a run, or of a sweep, as they happen; a context manager, at whose end the bars are gone.

    ``run_experiment(experiment, folder, on_event=progress.event)``. On a terminal and in a notebook with ipywidgets
    there is a bar for each trial, elsewhere a line every half minute; of a trial that is over a line stays.

    Args:
        total: rounds of all trials together; None for those of the first event's experiment.
        console: rich's, where it is shown; None for standard output, or the notebook.
        clock: the seconds since some moment.

    Raises:
        MissingDependencyError: rich is not installed.
    """

    def __init__(
        self, total: int | None = None, *, console: "Console | None" = None, clock: Callable[[], float] = monotonic
    ) -> None:
        if find_spec("rich") is None:
            raise MissingDependencyError.of("Progress", "rich", extra="sim")
        from rich import get_console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bars

        self._console = console or get_console()
        self._total, self._clock, self._told = total, clock, clock()
        self._done: dict[str, int] = {}  # rounds of each trial, those that are over too
        self._seconds: dict[str, float] = {}  # that these took, by their records: those of an earlier call did, too
        self._all_done, self._all_seconds = 0, 0.0  # of all trials, of which there may be thousands
        self._never = 0  # rounds that trials that failed will not do
        self._bars: dict[str, TaskID] = {}
        self._accuracy: dict[str, float] = {}
        in_notebook = self._console.is_jupyter and find_spec("ipywidgets") is not None  # by which rich moves bars there
        self._has_bars = self._console.is_terminal or in_notebook
        self._progress = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}", style="progress.remaining"),
            TextColumn("{task.fields[accuracy]}"),
            console=self._console,
            transient=True,
            disable=not self._has_bars,
        )
        self._all = self._progress.add_task("[bold]all trials", total=total, left=_UNKNOWN, accuracy="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def event(self, event: "Event") -> None:
        """Take in one event."""
        from rich.markup import escape  # a label may look like rich's own signs

        trial = event.job.name
        if self._total is None:
            whole = event.trial.experiment
            self._total = whole.rounds * len(whole.seeds) * len(whole.algorithms)
            self._progress.update(self._all, total=self._total)
        if event.over:
            self._finish(event)
        elif event.round is None:
            rounds = event.trial.experiment.rounds
            self._bars[trial] = self._progress.add_task(escape(trial), total=rounds, left=_UNKNOWN, accuracy="")
        else:
            if event.round.accuracy is not None:
                self._accuracy[trial] = event.round.accuracy
            done = self._done[trial] = event.round.round + 1
            took = sum(event.round.seconds.values())
            self._seconds[trial] = self._seconds.get(trial, 0.0) + took
            self._all_done, self._all_seconds = self._all_done + 1, self._all_seconds + took
            own = timedelta(seconds=round(self._seconds[trial] / done * (event.trial.experiment.rounds - done)))
            shown = f"{100 * self._accuracy[trial]:.1f} %" if trial in self._accuracy else ""
            self._progress.update(self._bars[trial], advance=1, left=own, accuracy=shown)
            self._progress.update(self._all, advance=1, left=self._left(self._total))
            self._tell_now_and_then(self._total)

    def _left(self, total: int) -> timedelta:
        """About the time that the rounds left will take, while as many trials run at once as do now."""
        mean = self._all_seconds / self._all_done
        return timedelta(seconds=round(mean * (total - self._never - self._all_done) / len(self._bars)))

    def _tell_now_and_then(self, total: int) -> None:
        """Print a line where there are no bars, if the last is long ago: a log must not fall silent for an hour."""
        now = self._clock()
        if self._has_bars or now - self._told < EVERY:
            return
        self._told = now
        running = [self._where(trial) for trial in list(self._bars)[:MOST]]
        running += [f"{len(self._bars) - MOST} more"] if len(self._bars) > MOST else []
        line = f"{self._all_done:,} of {total:,} rounds, about {self._left(total)} left: {'; '.join(running)}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _where(self, trial: str) -> str:
        accuracy = f", {100 * self._accuracy[trial]:.1f} %" if trial in self._accuracy else ""
        return f"{trial}: {self._done.get(trial, 0)}{accuracy}"

    def _finish(self, event: "Event") -> None:
        name, rounds = event.job.name, event.trial.experiment.rounds
        self._progress.remove_task(self._bars.pop(name))
        if event.error is not None:
            self._never += rounds - self._done.get(name, 0)
            self._console.print(f"{name}: failed: {event.error}", style="red", markup=False)
        else:
            accuracy = 100 * self._accuracy[name]  # the last round is always evaluated
            self._console.print(f"{name}: {accuracy:.1f} % after {rounds} rounds", markup=False, highlight=False)
