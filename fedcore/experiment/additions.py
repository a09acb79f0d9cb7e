"""Additions to a run that is there: more rounds, seeds and algorithms, and the refusal of whatever else is new."""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from fedcore.atomic_file import require_file
from fedcore.errors import ConfigError, MissingDataError
from fedcore.experiment.records import read_header
from fedcore.experiment.run_folder import CONFIG, check_device, write_config
from fedcore.experiment.schema.changes import changes, combined, differences
from fedcore.experiment.schema.experiment import Experiment
from fedcore.experiment.schema.section import FromRegistry
from fedcore.experiment.together import settled
from fedcore.experiment.trial import lengthen, trials

ADDED = {"rounds", "seeds", "algorithms"}
"""The keys of which a run may have more than it was begun with."""
BESIDES = {"grid", "pictures", "changes", "device", "server_device"}
"""The keys that may change while it runs, since no figure depends on them; ``check_device`` sees to devices."""


def gone_on_with(folder: Path, experiment: Experiment, *, part: bool = False) -> Experiment:
    """The experiment of a run's folder with what another one has more of: rounds, seeds, algorithms.

    Its algorithms keep their places, by which their records are named, and new ones follow them. Nothing is written.

    Args:
        folder: of the run, which need not be there.
        experiment: what is asked for; it may have fewer seeds and algorithms, in any order.
        part: whether only the trials that are asked for will run, as in a sweep. Then seeds that no trial has begun are
            forgotten, unless they are asked for again; and trials that are not asked for stand against more rounds.

    Raises:
        ConfigError: it is another experiment in something else, has fewer rounds, has more where a figure depends on
            their number, or was begun on another kind of device.
    """
    if not (folder / CONFIG).exists():
        return experiment
    read = Experiment.model_validate_json(require_file(folder / CONFIG).read_text(encoding="utf-8"))
    check_device(folder, experiment)
    begun = settled(read, folder)
    if experiment.together is None:
        experiment = experiment.model_copy(update={"together": begun.together})
    _check_figures(folder, begun, experiment)
    recorded = _recorded(folder)
    _check_rounds(folder, begun, experiment, recorded if part else ())
    kept = [seed for seed in begun.seeds if not part or any(seed == own for _, own in recorded)]
    labels = [method.label for method in begun.algorithms]
    both = experiment.model_copy(
        update={
            "seeds": tuple(dict.fromkeys((*kept, *experiment.seeds))),
            "algorithms": (*begun.algorithms, *(one for one in experiment.algorithms if one.label not in labels)),
        }
    )
    more = changes(experiment.tables(), both.tables())
    return both.model_copy(update={"changes": combined(experiment.changes, more)})


def go_on(folder: Path, experiment: Experiment) -> None:
    """Write what ``gone_on_with`` gave into the folder of a run that is there: the configuration, then the records.

    A kill between the two costs nothing: a trial lengthens its own record before it goes on.
    """
    path = folder / CONFIG
    read = Experiment.model_validate_json(require_file(path).read_text(encoding="utf-8")) if path.exists() else None
    if read is None or read.tables() != experiment.tables():
        write_config(folder, experiment)
    if read is not None and read.rounds < experiment.rounds:
        for trial in trials(experiment):
            with suppress(ConfigError, MissingDataError):  # its own trial says so
                lengthen(trial, folder)


def _check_figures(folder: Path, begun: Experiment, experiment: Experiment) -> None:
    before, now = _figures(begun), _figures(experiment)
    own, asked = ({one.label: json.loads(one.model_dump_json()) for one in it.algorithms} for it in (begun, experiment))
    shared = [label for label in own if label in asked]
    before["algorithms"], now["algorithms"] = ({label: its[label] for label in shared} for its in (own, asked))
    if others := list(differences(before, now)):
        raise ConfigError(
            f"{folder}: expected the experiment that is to run, got another one in its {CONFIG} ("
            f"{', '.join(map(str, others))}): take another folder for other settings (only rounds, seeds and "
            "algorithms may be added)"
        )


def _check_rounds(folder: Path, begun: Experiment, experiment: Experiment, recorded: Iterable[tuple[str, int]]) -> None:
    was, now = begun.rounds, experiment.rounds
    if now < was:
        raise ConfigError(
            f"rounds: expected at least {was}, with which {folder} was begun, got {now}: take another folder for fewer"
        )
    if now == was:
        return
    if rates := _of_whole_run(experiment):
        raise ConfigError(
            f"rounds: expected {was}, with which {folder} was begun, got {now}: {', '.join(rates)} goes by the length "
            "of the whole run: take another folder"
        )
    labels = {method.label for method in experiment.algorithms}
    left = sorted({(label, seed) for label, seed in recorded if label not in labels or seed not in experiment.seeds})
    if left:
        label, seed = left[0]
        raise ConfigError(
            f"rounds: expected {was}, with which {folder} was begun, got {now} without {label}, seed {seed}, which is "
            f"there too and would stay at {was}: name all its seeds and algorithms, or take another folder"
        )


def _of_whole_run(experiment: Experiment) -> list[str]:
    """The parts of an experiment whose options say how long the run is, as ``rate.lr Horizon``."""
    rate = experiment.rate
    named: dict[str, FromRegistry | None] = {"rate.lr": rate.lr, "rate.server_lr": rate.server_lr}
    named |= {"rate.optimizer": rate.optimizer, "participation": experiment.participation}
    named |= {f"algorithms.{method.label}": method for method in experiment.algorithms}
    return [
        f"{key} {one.name}"
        for key, one in named.items()
        if one is not None and getattr(one.maker(), "of_whole_run", False)
    ]


def _recorded(folder: Path) -> set[tuple[str, int]]:
    """Label and seed of the trials that were begun."""
    found = set()
    for path in (folder / "records").glob("*.jsonl"):
        with suppress(MissingDataError):  # a damaged one: its own trial says so
            if (header := read_header(path)) is not None:
                found.add((header.algorithm, header.seed))
    return found


def _figures(experiment: Experiment) -> dict[str, object]:
    """The choices that a trial's figures depend on, except its algorithm, its seed and how long it is."""
    tables: dict[str, object] = json.loads(experiment.model_dump_json(exclude=BESIDES | ADDED))
    return tables
