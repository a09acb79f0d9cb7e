"""Rounds in MLflow."""

from collections.abc import Mapping
from importlib.util import find_spec
from time import time
from typing import Any

from fedcore.callbacks.callback import Callback
from fedcore.callbacks.figures import Figures
from fedcore.errors import MissingDependencyError


class MLflow(Callback):
    """Metrics in MLflow, a run for each trial, with its preset, algorithm and seed as parameters.

    MLflow's global run and address are left alone.

    Args:
        address: of the tracking server or store, ``https://...`` or ``sqlite:///mlflow.db``; None for MLflow's own.
        experiment: the name of MLflow's experiment, which is made if there is none.
        run: the name of a server's run.

    Raises:
        MissingDependencyError: mlflow (or mlflow-skinny) is not installed.
    """

    def __init__(self, address: str | None = None, *, experiment: str = "fedcore", run: str = "server") -> None:
        if find_spec("mlflow") is None:
            raise MissingDependencyError.of("MLflow", "mlflow", extra="mlflow")
        from mlflow import MlflowClient

        self._client: Any = MlflowClient(address)
        found = self._client.get_experiment_by_name(experiment)
        self._experiment = self._client.create_experiment(experiment) if found is None else found.experiment_id
        self._server, self._runs = run, dict[str, str]()

    def write(self, run: str, round: int, figures: Figures, about: Mapping[str, str]) -> None:
        """Log the figures as one batch, the round as their step."""
        from mlflow.entities import Metric, Param

        if run not in self._runs:
            made = self._client.create_run(self._experiment, run_name=run or self._server)
            self._runs[run] = made.info.run_id
            self._client.log_batch(self._runs[run], params=[Param(name, value) for name, value in about.items()])
        now = int(1000 * time())
        metrics = [Metric(name, value, now, round) for name, value in figures.items()]
        self._client.log_batch(self._runs[run], metrics=metrics)

    def close(self) -> None:
        """Mark the runs as finished."""
        for run in self._runs.values():
            self._client.set_terminated(run)
        self._runs.clear()
