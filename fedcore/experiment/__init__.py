"""The papers' experiments: a configuration, its trials, their records."""

from fedcore.experiment.config import Experiment
from fedcore.experiment.loading import load_preset
from fedcore.experiment.run import Event, run_experiment

__all__ = ["Event", "Experiment", "load_preset", "run_experiment"]
