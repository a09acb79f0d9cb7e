"""The papers' experiments: a configuration, its trials, their records."""

from fedcore.experiment.jobs import Event
from fedcore.experiment.presets.loading import load_preset
from fedcore.experiment.run import run_experiment
from fedcore.experiment.schema.experiment import Experiment
from fedcore.experiment.sweep import Sweep, run_sweep

__all__ = ["Event", "Experiment", "Sweep", "load_preset", "run_experiment", "run_sweep"]
