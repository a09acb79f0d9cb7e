"""The progress of a run: a bar for each trial on a terminal, a line for each in a log."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedcore.experiment import Event


class RunProgress:
    """Shows the events of a run, or of a sweep; a context manager.

    Args:
        console: where.
        total: rounds of all trials together.
    """

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
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

    def _finish(self, event: Event) -> None:
        name, rounds = event.job.name, event.trial.experiment.rounds
        self._progress.remove_task(self._bars.pop(name))
        if event.error is not None:
            self._console.print(f"{name}: failed: {event.error}", style="red", markup=False)
        else:
            accuracy = 100 * self._accuracy[name]  # the last round is always evaluated
            self._console.print(f"{name}: {accuracy:.1f} % after {rounds} rounds", markup=False, highlight=False)
