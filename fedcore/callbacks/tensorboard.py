"""Rounds in TensorBoard's files."""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from fedcore.arguments import absolute
from fedcore.callbacks.callback import Callback
from fedcore.callbacks.figures import Figures
from fedcore.errors import MissingDependencyError


class TensorBoard(Callback):
    """Scalars in TensorBoard's event files, a folder for each trial: ``tensorboard --logdir FOLDER`` shows them.

    Args:
        folder: where; of a server's rounds the files are in it, of an experiment's in a folder for each trial.

    Raises:
        MissingDependencyError: tensorboard is not installed (neither TensorFlow nor torch is needed).

    Example:

        with TensorBoard("board") as board:
            server = fedcore.Server(..., on_report=board)
            ...
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if find_spec("tensorboard") is None:
            raise MissingDependencyError.of("TensorBoard", "tensorboard", extra="tensorboard")
        self._folder = absolute(folder)
        self._writers: dict[str, Any] = {}

    def write(self, run: str, round: int, figures: Figures, about: Mapping[str, str]) -> None:
        """Add a scalar for each figure."""
        from tensorboard.summary import Writer

        if run not in self._writers:
            self._writers[run] = Writer(str(self._folder / run))
        for name, value in figures.items():
            self._writers[run].add_scalar(f"fedcore/{name}", value, round)

    def flush(self) -> None:
        """Hand what was written to the operating system; TensorBoard's own writer does so every two minutes."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Flush and close the files."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
