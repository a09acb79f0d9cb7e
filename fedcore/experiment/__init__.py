"""The papers' experiments: a configuration, its trials, their records."""

from fedcore.experiment.config import Experiment
from fedcore.experiment.loading import load_preset
from fedcore.experiment.run import Event, run_experiment
from fedcore.experiment.sweep import Sweep, run_sweep

__all__ = ["Event", "Experiment", "Sweep", "load_preset", "run_experiment", "run_sweep"]
