"""One trial: one algorithm of an experiment with one seed, from the data to the last line of its record."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedcore.errors import ConfigError
from fedcore.experiment.checkpoints import SECONDS, Checkpoints
from fedcore.experiment.config import Experiment, Method
from fedcore.experiment.records import Header, RoundRecord, Writer, read, started
from fedcore.runtime import __version__

CHECKPOINTS = "checkpoints"
"""The folder of a run in which its unfinished trials have their servers."""


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


def run_trial(
    trial: Trial,
    folder: Path,
    on_round: Callable[[RoundRecord], None] = lambda _: None,
    *,
    checkpoint_seconds: float = SECONDS,
) -> None:
    """Run one trial and write its record; one that was stopped goes on where its last checkpoint left it.

    Args:
        trial: what to run.
        folder: of the run, with ``records`` in it; ``checkpoints`` is made.
        on_round: called with each round after it was written, and with those that a record holds already.
        checkpoint_seconds: the least time between two checkpoints.

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
    path = folder / "records" / trial.file_name
    path.parent.mkdir(parents=True, exist_ok=True)
    before = _rounds_before(path, header)
    checkpoints = Checkpoints(folder / CHECKPOINTS / path.stem, checkpoint_seconds)
    if before is not None and len(before) == experiment.rounds:
        checkpoints.remove()  # a run that was killed at the very end leaves one
        for line in before:
            on_round(line)
        return
    if before is None:
        Writer(path, header).close()  # a trial that fails at once has a record too
    parts = build(trial, None if before is None else checkpoints.folder)
    if parts.server.round_number > len(before or []):  # a copy of rounds that the record has lost leads nowhere
        parts = build(trial, None)
    before = (before or [])[: parts.server.round_number]
    with Writer(path, header, before) as record:
        for line in before:
            on_round(line)
        uploads, every = before[-1].uploads if before else parts.uploads, experiment.evaluate.every
        for line in rounds(parts, count=experiment.rounds, evaluate_every=every, uploads=uploads):
            record.add(line)
            on_round(line)
            checkpoints.save_when_due(parts.server, record)
    checkpoints.remove()


def is_complete(trial: Trial, folder: Path) -> bool:
    """Whether a trial's record has all its rounds.

    Raises:
        MissingDataError: the record is damaged.
    """
    path = folder / "records" / trial.file_name
    return path.exists() and started(path) and len(read(path).rounds) == trial.experiment.rounds


def _rounds_before(path: Path, header: Header) -> list[RoundRecord] | None:
    """The rounds of a trial that was begun before, or None.

    Raises:
        ConfigError: the record is another trial's.
    """
    if not path.exists():
        return None
    if not started(path):
        path.unlink()
        return None
    record = read(path)
    if record.header != header:
        raise ConfigError(f"{path}: expected the record of {header}, got that of {record.header}")
    return record.rounds
