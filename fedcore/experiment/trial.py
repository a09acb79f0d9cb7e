"""One trial: one algorithm of an experiment with one seed. Nothing here imports torch: listing trials must not wait."""

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path

from fedcore.atomic_file import inside
from fedcore.errors import ConfigError
from fedcore.experiment.records import Header, RoundRecord, Writer, is_torn, read, started
from fedcore.experiment.schema.experiment import Experiment, Method
from fedcore.runtime import __version__

CHECKPOINTS = "checkpoints"
"""The folder of a run in which its unfinished trials have their servers."""
LONGEST = 100
"""Characters of a label in the name of a file; file systems take 255 in all."""
MODELS = "models"
"""The folder of a run in which its trials have the models that they keep."""


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
        label = re.sub(r"[^a-z0-9]+", "-", self.method.label.lower()).strip("-")[:LONGEST]
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


def header_of(trial: Trial) -> Header:
    """The header of a trial's record, by which it is known again."""
    experiment = trial.experiment
    return Header(
        preset=experiment.name,
        title=experiment.title,
        algorithm=trial.method.label,
        order=trial.order,
        seed=trial.seed,
        rounds=experiment.rounds,
        version=__version__,
    )


def lengthen(trial: Trial, folder: Path) -> None:
    """Give a trial's record the header of its experiment, where it was begun with fewer rounds.

    Raises:
        ConfigError: the record is another trial's.
        MissingDataError: the record is damaged.
    """
    rounds_before(
        inside(folder, folder / "records") / trial.file_name, header_of(trial), trial.experiment.evaluate.every
    )


def rounds_before(path: Path, header: Header, every: int) -> list[RoundRecord] | None:
    """The rounds of a trial that was begun before, or None.

    The last of fewer rounds was evaluated because it was the last; a longer run does so every ``every`` rounds alone.

    Raises:
        ConfigError: the record is another trial's.
    """
    if not path.exists():
        return None
    if not started(path):
        if not is_torn(path):
            raise ConfigError(f"{path}: expected this trial's record, got another file: move it")
        path.unlink()
        return None
    record = read(path)
    if record.header.rounds < header.rounds and replace(record.header, rounds=header.rounds) == header:
        last = record.header.rounds - 1
        unlike = [line.round == last and (last + 1) % every != 0 for line in record.rounds]
        lines = [
            replace(line, accuracy=None, loss=None) if other else line
            for line, other in zip(record.rounds, unlike, strict=True)
        ]
        Writer(path, header, lines).close()
        return lines
    if record.header != header:
        pairs = [(one.name, getattr(record.header, one.name), getattr(header, one.name)) for one in fields(Header)]
        told = ", ".join(f"{name} {there!r} and not {due!r}" for name, there, due in pairs if there != due)
        raise ConfigError(f"{path}: expected this trial's record, got one with {told}; another folder begins anew")
    return record.rounds
