"""The choice whether a run's clients are trained together: its experiment's, its folder's, or by a measurement."""

import json
from contextlib import suppress
from functools import cache
from pathlib import Path

from fedcore.errors import MissingDataError
from fedcore.experiment.records import read, started
from fedcore.experiment.schema.experiment import Experiment


def settled(experiment: Experiment, folder: Path) -> Experiment:
    """The experiment with ``together`` said where that has to be measured, so that it can be repeated bit for bit.

    Args:
        experiment: as it came; what it says itself stands.
        folder: of the run, which may have been begun by a fedcore that did not write the choice into its configuration:
            then its records have it.

    Determinism: none where it is measured (see ``local.together.gains``); in one process once for each model.
    """
    model, shape = experiment.model.model_dump_json(), experiment.data.source.shape
    if experiment.together is not None or not _can_be_measured(model, shape):
        return experiment
    recorded = _recorded(folder)
    together = _gains(model, shape, experiment.local.batch) if recorded is None else recorded
    return experiment.model_copy(update={"together": together})


def _recorded(folder: Path) -> bool | None:
    """The choice that a folder's rounds were trained by; None if there is no round, or none that says so."""
    for path in sorted((folder / "records").glob("*.jsonl")):
        with suppress(MissingDataError):  # a damaged one: its own trial says so
            rounds = read(path).rounds if started(path) else []
            if rounds and rounds[0].together is not None:
                return rounds[0].together
    return None


@cache
def _can_be_measured(model: str, shape: tuple[int, ...]) -> bool:
    from fedcore.local import nets, together  # here, because it imports torch, and not every reader has it

    options = json.loads(model)
    return together.can_be_measured(nets.build(options.pop("name"), seed=0, **options), shape)


@cache
def _gains(model: str, shape: tuple[int, ...], batch: int) -> bool:
    import torch

    from fedcore.local import nets, together

    options, before = json.loads(model), torch.get_num_threads()
    torch.set_num_threads(1)  # as in the processes that run the trials
    try:
        return together.gains(nets.build(options.pop("name"), seed=0, **options), shape, batch=batch)
    finally:
        torch.set_num_threads(before)
