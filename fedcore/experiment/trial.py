"""One trial: one algorithm of an experiment with one seed, from the data to the last line of its record."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedcore.experiment.config import Experiment, Method
from fedcore.experiment.records import Header, RoundRecord, Writer
from fedcore.runtime import __version__


@dataclass(frozen=True)
class Trial:
    """Which algorithm (its place in ``experiment.algorithms``) and which seed."""

    experiment: Experiment
    order: int
    seed: int

    @property
    def method(self) -> Method:
        """The algorithm and its options."""
        return self.experiment.algorithms[self.order]

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.method.label}, seed {self.seed}"

    @property
    def file_name(self) -> str:
        """The name of its record; the number keeps labels apart that differ in punctuation alone."""
        label = re.sub(r"[^a-z0-9]+", "-", self.method.label.lower()).strip("-")
        return f"{self.order}-{label}-seed{self.seed}.jsonl"


def trials(experiment: Experiment) -> list[Trial]:
    """All trials, seed by seed, so that a run that is stopped early has whole comparisons to show."""
    return [Trial(experiment, order, seed) for seed in experiment.seeds for order in range(len(experiment.algorithms))]


def run_trial(trial: Trial, records: Path, on_round: Callable[[RoundRecord], None] = lambda _: None) -> None:
    """Run one trial and write its record.

    Args:
        trial: what to run.
        records: the folder for the record; it must not hold this trial's yet.
        on_round: called with each round after it was written.

    Raises:
        FedcoreError: the data is missing, the model diverged, ...; the rounds before it are in the record.

    Determinism: all but ``seconds`` depends on the trial alone, on one machine and for one number of torch's
    threads (which this function leaves as it is).
    """
    # Imported here, not above: these import torch, and who only lists trials should not wait for it.
    from fedcore.experiment.build import build
    from fedcore.experiment.loop import rounds

    experiment = trial.experiment
    header = Header(
        preset=experiment.name,
        title=experiment.title,
        algorithm=trial.method.label,
        order=trial.order,
        seed=trial.seed,
        rounds=experiment.rounds,
        version=__version__,
    )
    with Writer(records / trial.file_name, header) as record:
        server, engine, pattern = build(trial)
        for line in rounds(server, engine, pattern, count=experiment.rounds, evaluate_every=experiment.evaluate.every):
            record.add(line)
            on_round(line)
