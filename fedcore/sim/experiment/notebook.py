"""Experiments in a program or a notebook: run one, and look at its results."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedcore.callbacks import Progress
from fedcore.errors import ConfigError
from fedcore.sim.experiment.config import load_preset
from fedcore.sim.experiment.executor import Event
from fedcore.sim.experiment.results import CONFIG, load_results
from fedcore.sim.experiment.runner import default_folder, run_experiment, with_additions
from fedcore.sim.experiment.schema import trials
from fedcore.validation import Represented, absolute, expand_home

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from fedcore.sim.reports.statistics import Summary


@dataclass(frozen=True, repr=False)
class Run(Represented):
    """The results of a run. In a notebook it shows its table.

    Args:
        folder: the folder of a run, complete or not. ``run`` returns a ``Run`` of a new one.
        failed: the last event of each trial that failed.
    """

    folder: Path
    failed: tuple[Event, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", absolute(self.folder, "folder"))

    @property
    def frame(self) -> "DataFrame":
        """The records, with one row per round and trial; see ``load_results``."""
        return load_results(self.folder)

    def table(self) -> "DataFrame":
        """Return the table of the report, with one row per algorithm. Its cells are text for readers."""
        from fedcore.sim.reports.statistics import summary_table

        return summary_table(self._summary)

    def plot(self, measure: Literal["accuracy", "loss"] = "accuracy", **settings: Any) -> "Figure":
        """Return a matplotlib figure of the test accuracy or loss over the rounds.

        Args:
            measure: "accuracy" or "loss".
            settings: ``band`` and ``smooth``, as in the configuration's table ``report``.
        """
        from fedcore.sim.reports.report import Drawing, curves, read_run

        records, config = read_run(self.folder, settings)
        return curves(records, None, Drawing(config.report, config.pictures.over, "", measure, config.shifts))

    def report(self, **settings: Any) -> Path:
        """Write the report into the folder; return the path of ``report.html``. See ``reports.write_report``."""
        from fedcore.sim.reports import write_report

        return write_report(self.folder, **settings).page

    @cached_property
    def _summary(self) -> "Summary":
        from fedcore.sim.experiment.changes import text_of
        from fedcore.sim.reports.report import read_run
        from fedcore.sim.reports.statistics import summarise

        records, config = read_run(self.folder)
        notes = [config.note] if config.note else []
        return summarise(records, text_of(config.changes), notes, config.inherited)

    def _lines(self) -> list[str]:
        """Return the lines around the table."""
        summary = self._summary
        changed = [*([f"changed: {summary.changed}"] if summary.changed else []), *filter(None, [summary.inherited])]
        failed = [f"{event.trial.name}: failed: {event.error}" for event in self.failed]
        return [*changed, *(f"note: {note}" for note in summary.notes), *failed, str(self.folder)]

    def __repr__(self) -> str:
        from rich.console import Console

        from fedcore.sim.reports.report import summary_for_terminal

        console = Console(file=StringIO(), width=200, color_system=None)
        with console.capture() as text:
            console.print(summary_for_terminal(self._summary))
        table = "\n".join(line.rstrip() for line in text.get().strip("\n").splitlines())
        return "\n".join([self._summary.title, table, *self._lines()])

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """Yield the rows of the table in notebooks; see ``Represented``."""
        table = self.table()
        yield from [(self._summary.title,), tuple(table.columns), *table.itertuples(index=False, name=None)]
        yield from ((line,) for line in self._lines())


def run(
    preset: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    scale: Literal["full", "quick"] = "full",
    workers: int | None = 0,
    progress: bool = True,
    check: bool = True,
    on_event: Callable[[Event], object] | None = None,
    **settings: Any,
) -> Run:
    """Run an experiment and return its results.

    Args:
        preset: a preset's name, or the path of a ``.toml`` or ``.json`` file.
        out: a new folder. Default: ``runs/PRESET-DATE-TIME``.
        resume: whether to resume or extend the run in ``out``, if that folder exists.
        scale: as for ``load_preset``.
        workers: the number of processes. 0 runs the trials in this process, which a notebook's own classes need. None:
            one per core; a program then needs the guard ``if __name__ == "__main__":``.
        progress: whether to show the progress.
        check: whether a failed trial raises an error.
        on_event: called with the ``Event`` of each trial and round, as in ``run_experiment``.
        settings: changes of the configuration: ``rounds=4``, ``seeds=3`` (seeds 0, 1, 2) or ``seeds=[0, 4]``,
            ``algorithms=["FedAvg"]``, tables such as ``rate={"lr": 0.1}``, whose keys are merged unless the table has a
            name, or dotted keys, ``**{"rate.lr": 0.1}``. None removes a key.

    Raises:
        ConfigError: a setting is wrong, the experiment has a grid (use ``run_sweep``), or a trial failed.
        MissingDataError, DeviceError, LockedError, KeyboardInterrupt: as for ``run_experiment``.

    Example:

        run = fedcore.sim.experiment.run("quickstart", rounds=4, seeds=1)
        run.plot()
    """
    if isinstance(seeds := settings.get("seeds"), int) and not isinstance(seeds, bool):
        settings["seeds"] = list(range(seeds))
    experiment = load_preset(str(expand_home(preset, "preset")), dict(_dotted(settings)), scale=scale)
    if any(experiment.grid.values()):
        raise ConfigError("grid: run() runs a single point; pass grid={}, or use run_sweep")
    folder = absolute(default_folder(experiment) if out is None else out, "out")
    if resumed := resume and (folder / CONFIG).exists():
        experiment = with_additions(folder, experiment)
    total = experiment.rounds * len(trials(experiment))
    bars = Progress(total) if progress else None
    with bars or nullcontext():
        listeners = [*([bars.event] if bars else []), *([on_event] if on_event else [])]

        def show(event: Event) -> None:
            for listener in listeners:
                listener(event)

        failed = run_experiment(experiment, folder, resume=resumed, jobs=workers, on_event=show)
    if failed and check:
        first, count = failed[0], len(trials(experiment))
        raise ConfigError(f"{first.trial.name}: failed: {first.error}; {len(failed)} of {count} trials failed")
    return Run(folder, tuple(failed))


def _dotted(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Return settings as pairs of a dotted key and a value. A table with a name, and a grid, is a value."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and "name" not in value and key != "grid":
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
