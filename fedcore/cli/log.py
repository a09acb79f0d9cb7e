"""The loggers of ``fedcore run --log``."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from rich.console import Console

from fedcore.callbacks import Callback, MLflow, TensorBoard, WandB
from fedcore.cli import terminal
from fedcore.errors import ConfigError
from fedcore.sim.experiment import Event
from fedcore.sim.experiment.results import RECORDS, readable

KINDS = ("tensorboard", "mlflow", "wandb")


class Loggers:
    """A context manager that passes the events of a run or sweep to loggers.

    At the end it prints how to read their files. If a logger fails, it is removed and the run continues. Rounds that
    an earlier run recorded are not logged again.

    Args:
        kinds: ``KIND`` or ``KIND=WHERE``, as on the command line.
        folder: the folder of the run or sweep; it need not exist yet.
        console: the console for messages.
    """

    def __init__(self, kinds: Sequence[str], folder: Path, console: Console) -> None:
        self._folder, self._console = folder, console
        records = readable(folder.rglob(f"{RECORDS}/*.jsonl")) if kinds else ()
        self._before = {path: len(record.rounds) for path, record in records}
        self._loggers: dict[str, Callback] = {}
        self._hints: dict[str, str] = {}
        self._logged: set[str] = set()
        for text in kinds:
            kind, _, where = text.partition("=")
            if kind not in KINDS:
                raise ConfigError(f"--log {text!r}: must be KIND or KIND=WHERE, with one of {', '.join(KINDS)}")
            if kind in self._loggers:
                raise ConfigError(f"--log {kind}: repeated; remove one")
            self._loggers[kind], self._hints[kind] = self._make(kind, where)

    def show(self, event: Event) -> None:
        """Pass an event to the loggers."""
        before = self._before.get(event.job.folder / RECORDS / event.trial.file_name, 0)
        if event.round is None or event.round.round < before:
            return
        for kind, logger in list(self._loggers.items()):
            try:
                logger.event(event)
                self._logged.add(kind)
            except Exception as error:
                self._drop(kind, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name, logger in list(self._loggers.items()):
            try:
                logger.close()
            except Exception as failed:
                self._drop(name, failed)
            if name in self._logged.intersection(self._loggers):
                terminal.print_plain(self._console, [f"logged to {name}: {self._hints[name]}"])

    def _make(self, kind: str, where: str) -> tuple[Callback, str]:
        """Return a logger, and how to read its files."""
        if kind == "tensorboard":
            board = where or str(self._folder / "tensorboard")
            return TensorBoard(board), shlex.join(["tensorboard", "--logdir", board])
        if kind == "mlflow":
            return MLflow(where or None), where or "MLFLOW_TRACKING_URI, or MLflow's default"
        offline = self._folder / "wandb" / "offline-run-*"
        return WandB(where or "fedcore", folder=str(self._folder)), f"wandb sync {offline}"

    def _drop(self, kind: str, error: Exception) -> None:
        del self._loggers[kind]
        failed = f"note: {kind} failed and is no longer used ({type(error).__name__}: {error}); the run continues"
        advice = f"the callback's replay({str(self._folder)!r}) can log all rounds later"
        terminal.print_plain(self._console, [f"{failed}; {advice}"], "yellow")
