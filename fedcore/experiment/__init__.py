"""Experiments: configurations, their trials and the recorded results."""

from fedcore.experiment.config import load_preset
from fedcore.experiment.executor import Event
from fedcore.experiment.results import load_results
from fedcore.experiment.runner import Sweep, run_experiment, run_sweep
from fedcore.experiment.schema import Experiment

__all__ = ["Event", "Experiment", "Sweep", "load_preset", "load_results", "run_experiment", "run_sweep"]
