"""Experiments: configurations, their trials and the recorded results."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedcore.sim.experiment.config import load_preset
from fedcore.sim.experiment.executor import Event
from fedcore.sim.experiment.results import load_results
from fedcore.sim.experiment.runner import Sweep, run_experiment, run_sweep
from fedcore.sim.experiment.schema import Experiment

if TYPE_CHECKING:
    from fedcore.sim.experiment.notebook import Run, run

__all__ = ["Event", "Experiment", "Run", "Sweep", "load_preset", "load_results", "run", "run_experiment", "run_sweep"]


def __getattr__(name: str) -> Any:
    if name in ("Run", "run"):  # this module imports the reports, which import experiments
        return getattr(import_module("fedcore.sim.experiment.notebook"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
