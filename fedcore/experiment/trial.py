"""One trial: one algorithm of an experiment with one seed. Nothing here imports torch: listing trials must not wait."""

import re
from dataclasses import dataclass
from pathlib import Path

from fedcore.experiment.records import read, started
from fedcore.experiment.schema.experiment import Experiment, Method

CHECKPOINTS = "checkpoints"
"""The folder of a run in which its unfinished trials have their servers."""


@dataclass(frozen=True)
class Trial:
    """One algorithm (its place in ``experiment.algorithms``) with one seed."""

    experiment: Experiment
    order: int
    seed: int

    @property
    def method(self) -> Method:
        """The algorithm and its options."""
        return self.experiment.algorithms[self.order]

    @property
    def name(self) -> str:
        """The name in messages."""
        return f"{self.method.label}, seed {self.seed}"

    @property
    def file_name(self) -> str:
        """The name of its record; the number keeps labels apart that differ in punctuation alone."""
        label = re.sub(r"[^a-z0-9]+", "-", self.method.label.lower()).strip("-")
        return f"{self.order}-{label}-seed{self.seed}.jsonl"


def trials(experiment: Experiment) -> list[Trial]:
    """All trials, seed by seed, so that a run that is stopped early has whole comparisons to show."""
    return [Trial(experiment, order, seed) for seed in experiment.seeds for order in range(len(experiment.algorithms))]


def is_complete(trial: Trial, folder: Path) -> bool:
    """Tell whether a trial's record has all its rounds.

    Raises:
        MissingDataError: the record is damaged.
    """
    path = folder / "records" / trial.file_name
    return path.exists() and started(path) and len(read(path).rounds) == trial.experiment.rounds
