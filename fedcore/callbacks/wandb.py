"""Rounds in Weights & Biases."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from fedcore.callbacks.callback import Callback
from fedcore.callbacks.figures import Figures
from fedcore.errors import MissingDependencyError


class WandB(Callback):
    """Metrics in Weights & Biases, a run for each trial, with its preset, algorithm and seed as configuration.

    Args:
        project: the project's name.
        mode: "offline" writes files, which ``wandb sync`` sends later; "online" sends at once.
        folder: where the files lie; None for wandb's own, ``./wandb``.
        options: further arguments of ``wandb.init``.

    Raises:
        MissingDependencyError: wandb is not installed.
    """

    def __init__(
        self, project: str = "fedcore", *, mode: str = "offline", folder: str | None = None, **options: Any
    ) -> None:
        if find_spec("wandb") is None:
            raise MissingDependencyError.of("WandB", "wandb", extra="wandb")
        self._options = {"project": project, "mode": mode, "dir": folder, "reinit": "create_new", **options}
        self._runs: dict[str, Any] = {}

    def write(self, run: str, round: int, figures: Figures, about: Mapping[str, str]) -> None:
        """Log the figures, the round as their step."""
        import wandb

        if run not in self._runs:
            named = {"name": run, "group": about["preset"]} if run else {}
            self._runs[run] = wandb.init(**{**named, "config": dict(about), **self._options})
        self._runs[run].log(dict(figures), step=round)

    def close(self) -> None:
        """Finish the runs."""
        for run in self._runs.values():
            run.finish()
        self._runs.clear()
