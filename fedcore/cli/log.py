"""The loggers of ``fedcore run --log``: they get each round while trials run."""

import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console

from fedcore.callbacks import Callback, MLflow, TensorBoard, WandB
from fedcore.errors import ConfigError, MissingDataError
from fedcore.experiment import Event
from fedcore.experiment.results import read, started

KINDS = ("tensorboard", "mlflow", "wandb")


class Loggers:
    """Passes the events of a run or a sweep to loggers, and prints at the end how to read their files.

    A context manager. A logger that fails is left out from then on: the run continues, and its records have all rounds.
    Rounds that were recorded before are not logged again.

    Args:
        asked: ``KIND`` or ``KIND=WHERE``, as on the command line.
        folder: of the run or the sweep; it need not exist yet.
        console: for messages.

    Raises:
        ConfigError: there is no such kind, or one comes twice.
        MissingDependencyError: its package is not installed.
    """

    def __init__(self, asked: Sequence[str], folder: Path, console: Console) -> None:
        self._folder, self._console = folder, console
        self._before = _recorded(folder) if asked else {}
        self._loggers: dict[str, Callback] = {}
        self._read: dict[str, str] = {}
        self._logged: set[str] = set()
        for text in asked:
            kind, _, where = text.partition("=")
            if kind not in KINDS:
                raise ConfigError(f"--log: expected one of {', '.join(KINDS)}, got {text!r}: KIND or KIND=WHERE")
            if kind in self._loggers:
                raise ConfigError(f"--log: expected each kind once, got {kind} twice: leave one out")
            self._loggers[kind], self._read[kind] = self._make(kind, where)

    def show(self, event: Event) -> None:
        """Pass an event to the loggers."""
        if event.round is None:
            return
        if event.round.round < self._before.get(event.job.folder / "records" / event.trial.file_name, 0):
            return
        for kind, logger in list(self._loggers.items()):
            try:
                logger.event(event)
                self._logged.add(kind)
            except Exception as error:
                self._drop(kind, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, logger in list(self._loggers.items()):
            try:
                logger.close()
            except Exception as failed:
                self._drop(name, failed)
                continue
            if name in self._logged:
                self._print(f"logged to {name}: {self._read[name]}")

    def _make(self, kind: str, where: str) -> tuple[Callback, str]:
        """Return a logger, and how to read its files."""
        if kind == "tensorboard":
            board = where or str(self._folder / "tensorboard")
            return TensorBoard(board), shlex.join(["tensorboard", "--logdir", board])
        if kind == "mlflow":
            return MLflow(where or None), where or "where MLFLOW_TRACKING_URI says, or else MLflow's own place"
        offline = self._folder / "wandb" / "offline-run-*"
        return WandB(where or "fedcore", folder=str(self._folder)), f"wandb sync {offline}"

    def _drop(self, kind: str, error: Exception) -> None:
        del self._loggers[kind]
        self._print(
            f"note: {kind} failed and is left out from here on ({type(error).__name__}: {error}); the run "
            f"continues, and fedcore.callbacks can replay({str(self._folder)!r}) later",
            style="yellow",
        )

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _recorded(folder: Path) -> dict[Path, int]:
    """Return the number of rounds in each record."""
    found = {}
    for path in folder.rglob("records/*.jsonl"):
        with suppress(MissingDataError):  # its trial raises the error
            found[path] = len(read(path).rounds) if started(path) else 0
    return found
