"""The papers' experiments: a configuration, its trials, their records."""

from fedcore.experiment.executor import Event
from fedcore.experiment.frame import read_records
from fedcore.experiment.presets import load_preset
from fedcore.experiment.runner import Sweep, run_experiment, run_sweep
from fedcore.experiment.schema import Experiment

__all__ = ["Event", "Experiment", "Sweep", "load_preset", "read_records", "run_experiment", "run_sweep"]
