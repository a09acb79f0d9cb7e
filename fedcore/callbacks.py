"""Loggers of rounds (TensorBoard, MLflow, Weights & Biases, Prometheus), log files, and progress bars.

Their constructors raise MissingDependencyError if the package is not installed.
"""

import json
import logging
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from io import StringIO
from time import monotonic, time
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

from fedcore.errors import MissingDependencyError
from fedcore.runtime import Closing
from fedcore.server import Report
from fedcore.validation import absolute

if TYPE_CHECKING:  # packages of the simulator, which a server does not need
    from rich.console import Console
    from rich.progress import TaskID

    from fedcore.sim.experiment.executor import Event
    from fedcore.sim.experiment.results import RoundRecord

__all__ = ["Callback", "JsonFormatter", "MLflow", "Progress", "Prometheus", "RejectionLog", "TensorBoard", "WandB"]

Figures = dict[str, float]

# The fields of a report that are logged unchanged.
REPORTED = ("steps", "gamma", "seconds", "bytes", "diversity", "staleness", "correction_norm")


def of_report(report: Report) -> Figures:
    """Return the finite numbers of a server's report by name.

    ``accepted`` and ``rejected`` count the updates of the round, ``pending`` the clients whose first update the server
    waits for. ``norm`` and ``largest_norm`` are the mean and the maximum of ``Report.norms``.

    >>> of_report(Report(3, accepted=(1, 2), steps=9))
    {'accepted': 2.0, 'rejected': 0.0, 'pending': 0.0, 'steps': 9.0, 'gamma': 0.0, 'seconds': 0.0, 'bytes': 0.0}
    """
    counts = len(report.accepted), len(report.rejected), report.waiting_for
    figures = dict(zip(("accepted", "rejected", "pending"), counts, strict=True))
    figures |= {name: getattr(report, name) for name in REPORTED}
    if len(report.norms):
        figures |= {"norm": report.norms.mean(), "largest_norm": report.norms.max()}
    return _finite(figures)


def of_record(record: "RoundRecord") -> Figures:
    """Return the finite numbers of an experiment's round by name, including the seconds of each phase."""
    figures = asdict(record) | {"active": len(record.active)}
    del figures["round"], figures["together"], figures["stopped"]
    seconds = figures.pop("seconds")
    return _finite(figures | {f"seconds_{part}": value for part, value in seconds.items()})


def _finite(figures: Mapping[str, Any]) -> Figures:
    return {name: float(value) for name, value in figures.items() if value is not None and math.isfinite(value)}


def _require(callback: object, package: str, extra: str) -> None:
    if find_spec(package) is None:
        raise MissingDependencyError.of(type(callback).__name__, package, extra=extra)


class Callback(Closing, ABC):
    """Base class of loggers, which are context managers. A subclass defines ``write``.

    - ``Server(callbacks=[callback])`` logs the rounds of a server.
    - ``run_experiment(..., on_event=callback.event)`` and ``run_sweep`` log the rounds of running trials.
    - ``callback.replay(DIR)`` logs a saved run or sweep.
    """

    def __call__(self, report: Report) -> None:
        """Log a server's round."""
        self.write("", report.round, of_report(report), {})

    def event(self, event: "Event") -> None:
        """Log the event's round, if any. The run's name is ``PRESET/POINT/ALGORITHM-seedN``."""
        if event.round is not None:
            trial, preset = event.trial, event.trial.experiment.name
            about = {"preset": preset, "algorithm": trial.method.label, "seed": str(trial.seed)}
            run = _run_name(event.job.group.replace(" ", "/") or preset, about)
            self.write(run, event.round.round, of_record(event.round), about)

    def replay(self, folder: str | os.PathLike[str]) -> None:
        """Log every recorded round of a run or a sweep.

        Raises:
            MissingDataError: the folder has no records, or a record is damaged.
        """
        from fedcore.sim.experiment.results import begun_runs, read_folder

        folder = absolute(folder, "folder")
        for run in begun_runs(folder):
            below = run.relative_to(folder).as_posix()
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
            figures: numbers by name.
            about: the trial's preset, algorithm and seed; empty for a server.
        """

    def close(self) -> None:  # a subclass may have nothing to close
        """Write the buffered figures and close all files and connections."""


def _run_name(group: str, about: Mapping[str, str]) -> str:
    return f"{group}/{about['algorithm']}-seed{about['seed']}".replace("\\", "_").replace(" ", "_")


Log = Callable[[int, Figures], object]
Close = Callable[[], object]


class _Runs(Callback):
    """Base class of loggers that open a run for each trial at its first round."""

    def __init__(self) -> None:
        self._runs: dict[str, tuple[Log, Close]] = {}

    def write(self, run: str, round: int, figures: Figures, about: Mapping[str, str]) -> None:
        """Log the figures; the round is their step."""
        if run not in self._runs:
            self._runs[run] = self._open(run, about)
        self._runs[run][0](round, figures)

    def close(self) -> None:
        """Close the runs."""
        for _, close in self._runs.values():
            close()
        self._runs.clear()

    @abstractmethod
    def _open(self, run: str, about: Mapping[str, str]) -> tuple[Log, Close]:
        """Open a run. Return a function that logs a round, and one that closes the run."""


class TensorBoard(_Runs):
    """A logger to TensorBoard event files. ``tensorboard --logdir FOLDER`` shows them.

    Args:
        folder: the folder for a server's files, or for one folder per trial of an experiment.

    The logger needs the package tensorboard, but neither TensorFlow nor torch.

    Example:

        with TensorBoard("board") as board:
            server = fedcore.Server(..., callbacks=[board])
            ...
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        _require(self, "tensorboard", "tensorboard")
        super().__init__()
        self._folder = absolute(folder, "folder")
        self._writers: list[Any] = []

    def _open(self, run: str, about: Mapping[str, str]) -> tuple[Log, Close]:
        from tensorboard.summary import Writer

        writer = Writer(str(self._folder / run))
        self._writers.append(writer)

        def log(round: int, figures: Figures) -> None:
            for name, value in figures.items():
                writer.add_scalar(f"fedcore/{name}", value, round)

        return log, writer.close

    def flush(self) -> None:
        """Flush the scalars to the operating system. TensorBoard's writer flushes them every two minutes."""
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        """Close the files."""
        super().close()
        self._writers.clear()


class MLflow(_Runs):
    """A logger to MLflow, with one run per trial. The run's parameters are the trial's preset, algorithm and seed.

    It needs mlflow or mlflow-skinny, and does not change MLflow's global run and address.

    Args:
        address: the address of the tracking server or store, for example ``https://...`` or ``sqlite:///mlflow.db``.
            Default: MLflow's default.
        experiment: the name of the MLflow experiment, which is created if it does not exist.
        run: the name of the run for a server.
    """

    def __init__(self, address: str | None = None, *, experiment: str = "fedcore", run: str = "server") -> None:
        _require(self, "mlflow", "mlflow")
        from mlflow import MlflowClient

        super().__init__()
        self._client: Any = MlflowClient(address)
        known = self._client.get_experiment_by_name(experiment)
        self._experiment = self._client.create_experiment(experiment) if known is None else known.experiment_id
        self._server = run

    def _open(self, run: str, about: Mapping[str, str]) -> tuple[Log, Close]:
        from mlflow.entities import Metric, Param

        client = self._client
        id = client.create_run(self._experiment, run_name=run or self._server).info.run_id
        client.log_batch(id, params=[Param(name, value) for name, value in about.items()])

        def log(round: int, figures: Figures) -> None:
            now = int(1000 * time())
            client.log_batch(id, metrics=[Metric(name, value, now, round) for name, value in figures.items()])

        return log, lambda: client.set_terminated(id)


class WandB(_Runs):
    """A logger to Weights & Biases, with one run per trial. The run's config is the trial's preset, algorithm and seed.

    Args:
        project: the name of the project.
        mode: "offline" to write files, which ``wandb sync`` uploads later; "online" to upload immediately.
        folder: the folder for the files. Default: wandb's, ``./wandb``.
        options: further arguments of ``wandb.init``.
    """

    def __init__(
        self, project: str = "fedcore", *, mode: str = "offline", folder: str | None = None, **options: Any
    ) -> None:
        _require(self, "wandb", "wandb")
        super().__init__()
        self._options = {"project": project, "mode": mode, "dir": folder, "reinit": "create_new", **options}

    def _open(self, run: str, about: Mapping[str, str]) -> tuple[Log, Close]:
        import wandb

        named = {"name": run, "group": about["preset"]} if run else {}
        opened = wandb.init(**{**named, "config": dict(about), **self._options})
        return lambda round, figures: opened.log(dict(figures), step=round), opened.finish


# Counters, which sum over rounds. The client library adds ``_total`` to their names.
TOTALS = {
    "accepted": ("clients_accepted", "Accepted updates of all rounds."),
    "rejected": ("clients_rejected", "Rejected updates of all rounds."),
    "steps": ("local_steps", "Local steps of the accepted clients."),
    "bytes": ("received_bytes", "Bytes received from clients."),
    "seconds": ("server_seconds", "Seconds spent in the server, without client training."),
}
# Gauges of the last round, NaN if the round has no value.
LATEST = {
    "accepted": ("round_clients_accepted", "Accepted updates of the last round."),
    "rejected": ("round_clients_rejected", "Rejected updates of the last round."),
    "pending": ("clients_pending", "Clients whose first update the model waits for."),
    "gamma": ("gamma", "Step length of the last round; 0 if the model did not change."),
    "norm": ("update_norm", "Mean length of the clients' mean gradients in the last round."),
    "largest_norm": ("update_norm_largest", "Maximum length of the clients' mean gradients in the last round."),
    "diversity": ("gradient_diversity", "Weighted gradient diversity of the last round."),
    "staleness": ("staleness_rounds", "Mean age in rounds of the accepted clients' rows."),
    "correction_norm": ("correction_norm", "Length of the correction that the method adds to the cohort's mean."),
}
_METRICS: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


class Prometheus:
    """Prometheus metrics of a server's rounds, for ``Server(callbacks=)``. ``prometheus_client`` serves the metrics.

    Client ids are not labels, since a dishonest client could create any number of them.

    Args:
        server: the value of the label ``server``, which distinguishes the servers of a process.
        registry: a registry of ``prometheus_client``. Default: its global registry.

    Example:

        prometheus_client.start_http_server(9100, addr="127.0.0.1")
        server = fedcore.Server(..., callbacks=[Prometheus()])
    """

    def __init__(self, server: str = "server", *, registry: Any = None) -> None:
        _require(self, "prometheus_client", "prometheus")
        import prometheus_client as client

        registry = client.REGISTRY if registry is None else registry
        known = _METRICS.setdefault(registry, {})

        def metric(kind: Any, name: str, about: str) -> Any:
            """Return the metric with a name. Servers of one process share it."""
            if name not in known:
                known[name] = kind(f"fedcore_{name}", about, ["server"], registry=registry)
            return known[name].labels(server)

        self._totals = {figure: metric(client.Counter, *named) for figure, named in TOTALS.items()}
        self._latest = {figure: metric(client.Gauge, *named) for figure, named in LATEST.items()}
        self._rounds = metric(client.Counter, "rounds", "Finished rounds since the process began.")
        self._round = metric(client.Gauge, "last_round", "Number of the last finished round, from 0.")
        self._ended = metric(client.Gauge, "last_round_timestamp_seconds", "End of the last round, in Unix time.")

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


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


class JsonFormatter(logging.Formatter):
    """Log records as JSON, one object per line: ``handler.setFormatter(JsonFormatter())``.

    The keys are ``time`` (UTC, ISO 8601), ``level``, ``logger``, ``message``, and ``exception`` with the traceback.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = {
            "time": _utc(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class RejectionLog:
    """A file with one JSON object per rejected update, for ``Server(callbacks=)``.

    The keys are ``time`` (UTC, ISO 8601), ``round``, ``client`` and ``reason``. The lines are on disk when the round's
    callbacks return. The file is opened for each round, so another program may rotate it.

    Args:
        path: the file. Lines are appended.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = absolute(path)

    def __call__(self, report: Report) -> None:
        """Append the rejections of a round."""
        if not report.rejected:
            return
        head = {"time": _utc(time()), "round": report.round}
        lines = [json.dumps(head | {"client": client, "reason": reason}) + "\n" for client, reason in report.rejected]
        with open(self.path, "a", encoding="utf-8") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())


INTERVAL = 30.0  # seconds between two lines in a log
REFRESH = 0.25  # seconds between two updates in a notebook without ipywidgets
MOST = 4  # the maximum number of trials in such a line


class Progress:
    """The progress of a run or sweep: ``run_experiment(experiment, folder, on_event=progress.event)``.

    A terminal or a notebook shows a bar for each running trial. Other output gets a line every 30
    seconds. A line is printed when a trial ends. A ``Progress`` is a context manager, which removes the bars on exit.

    Args:
        total: the number of rounds of all trials. Default: that of the first event's experiment.
        console: a console of rich. Default: standard output, or the notebook.
        clock: a function that returns seconds, like ``time.monotonic``.
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
        self._done: dict[str, int] = {}  # finished rounds of each trial, including ended trials
        self._seconds: dict[str, float] = {}  # recorded seconds of these rounds
        self._all_done, self._all_seconds = 0, 0.0  # kept as sums, since a sweep may have thousands of trials
        self._cancelled = 0  # remaining rounds of failed trials
        self._bars: dict[str, TaskID] = {}
        self._accuracy: dict[str, float] = {}
        # In a notebook, rich's live bars need ipywidgets. Without it, this class shows them as HTML.
        with_rich = self._console.is_terminal or (self._console.is_jupyter and find_spec("ipywidgets") is not None)
        self._has_bars = with_rich or self._console.is_jupyter
        self._output: Any = None  # the notebook's output area
        self._as_html, self._next_html = self._console.is_jupyter and not with_rich, clock()
        self._progress = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}", style="progress.remaining"),
            TextColumn("{task.fields[accuracy]}"),
            console=self._console,
            transient=True,
            disable=not with_rich,
        )
        self._all = self._add("[bold]all trials", total)

    def _add(self, label: str, total: int | None) -> "TaskID":
        return self._progress.add_task(label, total=total, left="-:--:--", accuracy="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        if self._output is not None:
            self._show("")

    def event(self, event: "Event") -> None:
        """Show an event."""
        self._update(event)
        if self._as_html and self._clock() >= self._next_html:
            from rich.console import Console

            console = Console(file=StringIO(), record=True, width=100, force_jupyter=False, color_system="truecolor")
            console.print(self._progress.get_renderable())
            self._show(console.export_html(inline_styles=True, code_format="<pre>{code}</pre>"))
            self._next_html = self._clock() + REFRESH

    def _show(self, html: str) -> None:
        """Show or replace HTML in the notebook."""
        from IPython.display import HTML, display

        if self._output is None:
            self._output = display(HTML(html), display_id=True)
        else:
            self._output.update(HTML(html))

    def _update(self, event: "Event") -> None:
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
            # The estimate assumes that the number of parallel trials stays the same.
            rest = self._all_seconds / self._all_done * (self._total - self._cancelled - self._all_done)
            left = timedelta(seconds=round(rest / len(self._bars)))
            self._progress.update(self._all, advance=1, left=left)
            self._log(f"{self._all_done:,} of {self._total:,} rounds, about {left} left")

    def _percent(self, trial: str) -> str:
        return f"{100 * self._accuracy[trial]:.1f} %" if trial in self._accuracy else ""

    def _log(self, line: str) -> None:
        """Print a line if there are no bars and the last line is old enough."""
        now = self._clock()
        if self._has_bars or now - self._last_line < INTERVAL:
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
        done = self._done.get(trial, 0)
        self._cancelled += rounds - done  # a trial may fail or stop early
        if error is not None:
            self._console.print(f"{trial}: failed: {error}", style="red", markup=False)
        else:  # the last round is always evaluated
            self._console.print(f"{trial}: {self._percent(trial)} after {done} rounds", markup=False, highlight=False)
