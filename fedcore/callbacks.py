"""Loggers of rounds (TensorBoard, MLflow, Weights & Biases, Prometheus), and the progress of a run."""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from importlib.util import find_spec
from time import monotonic, time
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

from fedcore.arguments import absolute
from fedcore.errors import MissingDependencyError
from fedcore.server import Report

if TYPE_CHECKING:  # the simulator's, which a server need not have
    from rich.console import Console
    from rich.progress import TaskID

    from fedcore.experiment import Event
    from fedcore.experiment.results import RoundRecord

__all__ = ["Callback", "MLflow", "Progress", "Prometheus", "TensorBoard", "WandB"]

Figures = dict[str, float]

# The numbers of a report that are figures.
REPORTED = ("steps", "gamma", "seconds", "bytes", "diversity", "staleness", "correction_norm")


def of_report(report: Report) -> Figures:
    """Return the figures of a server's round: the finite numbers of its report, and counts of its clients.

    ``norm`` and ``largest_norm`` are the mean and the largest of ``Report.norms``; the others have its names.

    >>> of_report(Report(3, accepted=(1, 2), steps=9))
    {'heard': 2.0, 'refused': 0.0, 'awaited': 0.0, 'steps': 9.0, 'gamma': 0.0, 'seconds': 0.0, 'bytes': 0.0}
    """
    counts = len(report.accepted), len(report.rejected), report.waiting_for
    figures = dict(zip(("heard", "refused", "awaited"), counts, strict=True))
    figures |= {name: getattr(report, name) for name in REPORTED}
    if len(report.norms):
        figures |= {"norm": report.norms.mean(), "largest_norm": report.norms.max()}
    return _finite(figures)


def of_record(record: "RoundRecord") -> Figures:
    """Return the figures of an experiment's round: the numbers of its record, ``active`` counted, each part of
    ``seconds``."""
    figures = asdict(record) | {"active": len(record.active)}
    del figures["round"], figures["together"]
    seconds = figures.pop("seconds")
    return _finite(figures | {f"seconds_{part}": value for part, value in seconds.items()})


def _finite(figures: Mapping[str, Any]) -> Figures:
    return {name: float(value) for name, value in figures.items() if value is not None and math.isfinite(value)}


def _require(callback: object, package: str, extra: str) -> None:
    if find_spec(package) is None:
        raise MissingDependencyError.of(type(callback).__name__, package, extra=extra)


class Callback(ABC):
    """Base class of loggers; a subclass writes the figures of a round.

    ``Server(callbacks=[callback])`` logs a server's rounds, ``run_experiment(..., on_event=callback.event)`` and
    ``run_sweep`` those of each trial as it runs, ``callback.replay(DIR)`` those of an earlier run or sweep. A context
    manager, which closes it.
    """

    def __call__(self, report: Report) -> None:
        """Log a server's round."""
        self.write("", report.round, of_report(report), {})

    def event(self, event: "Event") -> None:
        """Log an experiment's round, if the event is one; its run is ``PRESET/POINT/ALGORITHM-seedN``."""
        if event.round is not None:
            trial, preset = event.trial, event.trial.experiment.name
            about = {"preset": preset, "algorithm": trial.method.label, "seed": str(trial.seed)}
            run = _run_name(event.job.group.replace(" ", "/") or preset, about)
            self.write(run, event.round.round, of_record(event.round), about)

    def replay(self, folder: str | os.PathLike[str]) -> None:
        """Log every round in the records of a run or a sweep.

        Raises:
            MissingDataError: there are none, or one is damaged.
        """
        from fedcore.experiment.results import read_folder
        from fedcore.experiment.run_folder import begun_runs

        place = absolute(folder)
        for run in begun_runs(place):
            below = run.relative_to(place).as_posix()
            for record in read_folder(run):
                header = record.header
                about = {"preset": header.preset, "algorithm": header.algorithm, "seed": str(header.seed)}
                name = _run_name(header.preset if below == "." else below, about)
                for line in record.rounds:
                    self.write(name, line.round, of_record(line), about)

    @abstractmethod
    def write(self, run: str, round: int, figures: Figures, about: Mapping[str, str]) -> None:
        """Write a round's figures.

        Args:
            run: the name of the trial; "" for a server.
            round: counted from 0.
            figures: by name.
            about: the trial's preset, algorithm and seed.
        """

    def close(self) -> None:  # noqa: B027  # many have nothing to close
        """Write the rest, and close files and connections."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _run_name(group: str, about: Mapping[str, str]) -> str:
    return f"{group}/{about['algorithm']}-seed{about['seed']}".replace("\\", "_").replace(" ", "_")


class _Runs(Callback):
    """A logger that opens a run for each trial at its first round."""

    def __init__(self) -> None:
        self._runs: dict[str, Any] = {}

    def write(self, run: str, round: int, figures: Figures, about: Mapping[str, str]) -> None:
        """Log the figures, the round as their step."""
        if run not in self._runs:
            self._runs[run] = self._open(run, about)
        self._log(self._runs[run], round, figures)

    def close(self) -> None:
        """End the runs."""
        for run in self._runs.values():
            self._end(run)
        self._runs.clear()

    @abstractmethod
    def _open(self, run: str, about: Mapping[str, str]) -> Any: ...

    @abstractmethod
    def _log(self, run: Any, round: int, figures: Figures) -> None: ...

    @abstractmethod
    def _end(self, run: Any) -> None: ...


class TensorBoard(_Runs):
    """Scalars in TensorBoard's event files, a folder for each trial: ``tensorboard --logdir FOLDER`` shows them.

    Args:
        folder: the folder of a server's files, and of a folder for each trial of an experiment.

    Raises:
        MissingDependencyError: tensorboard is not installed (neither TensorFlow nor torch is needed).

    Example:

        with TensorBoard("board") as board:
            server = fedcore.Server(..., callbacks=[board])
            ...
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        _require(self, "tensorboard", "tensorboard")
        super().__init__()
        self._folder = absolute(folder)

    def _open(self, run: str, about: Mapping[str, str]) -> Any:
        from tensorboard.summary import Writer

        return Writer(str(self._folder / run))

    def _log(self, run: Any, round: int, figures: Figures) -> None:
        for name, value in figures.items():
            run.add_scalar(f"fedcore/{name}", value, round)

    def _end(self, run: Any) -> None:
        run.close()

    def flush(self) -> None:
        """Give the written scalars to the operating system; TensorBoard's writer does so every two minutes."""
        for writer in self._runs.values():
            writer.flush()


class MLflow(_Runs):
    """Metrics in MLflow, a run for each trial, with its preset, algorithm and seed as parameters.

    MLflow's global run and address do not change.

    Args:
        address: of the tracking server or store, ``https://...`` or ``sqlite:///mlflow.db``. Default: MLflow's own.
        experiment: the name of MLflow's experiment, which is created if it does not exist.
        run: the name of a server's run.

    Raises:
        MissingDependencyError: mlflow (or mlflow-skinny) is not installed.
    """

    def __init__(self, address: str | None = None, *, experiment: str = "fedcore", run: str = "server") -> None:
        _require(self, "mlflow", "mlflow")
        from mlflow import MlflowClient

        super().__init__()
        self._client: Any = MlflowClient(address)
        found = self._client.get_experiment_by_name(experiment)
        self._experiment = self._client.create_experiment(experiment) if found is None else found.experiment_id
        self._server = run

    def _open(self, run: str, about: Mapping[str, str]) -> Any:
        from mlflow.entities import Param

        id = self._client.create_run(self._experiment, run_name=run or self._server).info.run_id
        self._client.log_batch(id, params=[Param(name, value) for name, value in about.items()])
        return id

    def _log(self, run: Any, round: int, figures: Figures) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time())
        self._client.log_batch(run, metrics=[Metric(name, value, now, round) for name, value in figures.items()])

    def _end(self, run: Any) -> None:
        self._client.set_terminated(run)


class WandB(_Runs):
    """Metrics in Weights & Biases, a run for each trial, with its preset, algorithm and seed as configuration.

    Args:
        project: the project's name.
        mode: "offline" writes files, which ``wandb sync`` sends later; "online" sends at once.
        folder: the folder of the files. Default: wandb's own, ``./wandb``.
        options: further arguments of ``wandb.init``.

    Raises:
        MissingDependencyError: wandb is not installed.
    """

    def __init__(
        self, project: str = "fedcore", *, mode: str = "offline", folder: str | None = None, **options: Any
    ) -> None:
        _require(self, "wandb", "wandb")
        super().__init__()
        self._options = {"project": project, "mode": mode, "dir": folder, "reinit": "create_new", **options}

    def _open(self, run: str, about: Mapping[str, str]) -> Any:
        import wandb

        named = {"name": run, "group": about["preset"]} if run else {}
        return wandb.init(**{**named, "config": dict(about), **self._options})

    def _log(self, run: Any, round: int, figures: Figures) -> None:
        run.log(dict(figures), step=round)

    def _end(self, run: Any) -> None:
        run.finish()


# Figures that are summed over rounds: counters, to whose names the client library adds ``_total``.
TOTALS = {
    "heard": ("clients_heard", "Updates that counted, of all rounds."),
    "refused": ("clients_refused", "Updates that were refused, of all rounds."),
    "steps": ("local_steps", "Local steps of the clients that were heard."),
    "bytes": ("received_bytes", "Bytes that clients sent."),
    "seconds": ("server_seconds", "Seconds spent in the server, the clients' own not counted."),
}
# Figures of the last round: gauges, NaN if the round has none.
LATEST = {
    "heard": ("round_clients_heard", "Updates that counted in the last round."),
    "refused": ("round_clients_refused", "Updates that were refused in the last round."),
    "awaited": ("clients_awaited", "Clients that were never heard and for which x waits."),
    "gamma": ("gamma", "The server's step of the last round; 0 where the model stayed."),
    "norm": ("update_norm", "Mean length of the clients' mean gradients in the last round."),
    "largest_norm": ("update_norm_largest", "The largest of these lengths."),
    "diversity": ("gradient_diversity", "The weighted gradient diversity of the last round."),
    "staleness": ("staleness_rounds", "Mean rounds since the rows of the clients heard were written."),
    "correction_norm": ("correction_norm", "The length of what the method adds to the cohort's mean."),
}
_MADE: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


class Prometheus:
    """Metrics of a server's rounds, as one of its ``callbacks``; the client library makes the text and serves it.

    No metric has a client's id as a label: a dishonest client could make any number of them.

    Args:
        server: the value of the label ``server``, which distinguishes several servers of one process.
        registry: of ``prometheus_client``. Default: its global one.

    Raises:
        MissingDependencyError: prometheus_client is not installed.

    Example:

        prometheus_client.start_http_server(9100, addr="127.0.0.1")
        server = fedcore.Server(..., callbacks=[Prometheus()])
    """

    def __init__(self, server: str = "server", *, registry: Any = None) -> None:
        _require(self, "prometheus_client", "prometheus")
        import prometheus_client as client

        registry = client.REGISTRY if registry is None else registry
        known = _MADE.setdefault(registry, {})

        def metric(kind: Any, name: str, about: str) -> Any:
            """The metric of that name, which another server of the process may have made."""
            if name not in known:
                known[name] = kind(f"fedcore_{name}", about, ["server"], registry=registry)
            return known[name].labels(server)

        self._totals = {figure: metric(client.Counter, *named) for figure, named in TOTALS.items()}
        self._latest = {figure: metric(client.Gauge, *named) for figure, named in LATEST.items()}
        self._rounds = metric(client.Counter, "rounds", "Rounds that counted since the process began.")
        self._round = metric(client.Gauge, "last_round", "The number of the last round that counted, from 0.")
        self._ended = metric(client.Gauge, "last_round_timestamp_seconds", "When the last round counted, in Unix time.")

    def __call__(self, report: Report) -> None:
        """Log a round."""
        figures = of_report(report)
        for name, counter in self._totals.items():
            counter.inc(figures.get(name, 0.0))
        for name, gauge in self._latest.items():
            gauge.set(figures.get(name, float("nan")))
        self._rounds.inc()
        self._round.set(report.round)
        self._ended.set_to_current_time()


EVERY = 30.0  # seconds between two lines in a log
MOST = 4  # trials that such a line names


class Progress:
    """The progress of a run or a sweep: bars on a terminal and in a notebook with ipywidgets, elsewhere lines in a log.

    ``run_experiment(experiment, folder, on_event=progress.event)``. There is a bar for each trial, or a line every half
    minute, and a line for each trial that is over. A context manager, at whose end the bars disappear.

    Args:
        total: rounds of all trials together. Default: those of the first event's experiment.
        console: rich's. Default: standard output, or the notebook.
        clock: the seconds since some moment.

    Raises:
        MissingDependencyError: rich is not installed.
    """

    def __init__(
        self, total: int | None = None, *, console: "Console | None" = None, clock: Callable[[], float] = monotonic
    ) -> None:
        _require(self, "rich", "sim")
        from rich import get_console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bars

        self._console = console or get_console()
        self._total, self._clock, self._last_line = total, clock, clock()
        self._done: dict[str, int] = {}  # rounds of each trial, also of those that are over
        self._seconds: dict[str, float] = {}  # of these rounds, by their records, also of an earlier call
        self._all_done, self._all_seconds = 0, 0.0  # their sums: there may be thousands of trials
        self._cancelled = 0  # rounds that failed trials will not do
        self._bars: dict[str, TaskID] = {}
        self._accuracy: dict[str, float] = {}
        in_notebook = self._console.is_jupyter and find_spec("ipywidgets") is not None  # rich's bars need it there
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
        self._all = self._add("[bold]all trials", total)

    def _add(self, label: str, total: int | None) -> "TaskID":
        return self._progress.add_task(label, total=total, left="-:--:--", accuracy="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def event(self, event: "Event") -> None:
        """Show one event."""
        from rich.markup import escape  # a label may look like rich's markup

        trial, experiment = event.job.name, event.trial.experiment
        if self._total is None:
            self._total = experiment.rounds * len(experiment.seeds) * len(experiment.algorithms)
            self._progress.update(self._all, total=self._total)
        if event.over:
            self._finish(trial, event.error, experiment.rounds)
        elif event.round is None:
            self._bars[trial] = self._add(escape(trial), experiment.rounds)
        else:
            if event.round.accuracy is not None:
                self._accuracy[trial] = event.round.accuracy
            done = self._done[trial] = event.round.round + 1
            seconds = sum(event.round.seconds.values())
            self._seconds[trial] = self._seconds.get(trial, 0.0) + seconds
            self._all_done, self._all_seconds = self._all_done + 1, self._all_seconds + seconds
            own = timedelta(seconds=round(self._seconds[trial] / done * (experiment.rounds - done)))
            self._progress.update(self._bars[trial], advance=1, left=own, accuracy=self._percent(trial))
            # as many trials run at once as now
            rest = self._all_seconds / self._all_done * (self._total - self._cancelled - self._all_done)
            left = timedelta(seconds=round(rest / len(self._bars)))
            self._progress.update(self._all, advance=1, left=left)
            self._log(f"{self._all_done:,} of {self._total:,} rounds, about {left} left")

    def _percent(self, trial: str) -> str:
        return f"{100 * self._accuracy[trial]:.1f} %" if trial in self._accuracy else ""

    def _log(self, line: str) -> None:
        """Print a line if there are no bars and the last line is long ago: a log must not pause for an hour."""
        now = self._clock()
        if self._has_bars or now - self._last_line < EVERY:
            return
        self._last_line = now
        running = [
            ", ".join(filter(None, [f"{trial}: {self._done.get(trial, 0)}", self._percent(trial)]))
            for trial in list(self._bars)[:MOST]
        ]
        running += [f"{len(self._bars) - MOST} more"] if len(self._bars) > MOST else []
        self._console.print(f"{line}: {'; '.join(running)}", markup=False, highlight=False, soft_wrap=True)

    def _finish(self, trial: str, error: str | None, rounds: int) -> None:
        self._progress.remove_task(self._bars.pop(trial))
        if error is not None:
            self._cancelled += rounds - self._done.get(trial, 0)
            self._console.print(f"{trial}: failed: {error}", style="red", markup=False)
        else:  # the last round is always evaluated
            self._console.print(f"{trial}: {self._percent(trial)} after {rounds} rounds", markup=False, highlight=False)
