"""The choice whether a run's clients are trained together: its experiment's, its folder's, or by a measurement."""

import json
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from fedcore.devices import CPU
from fedcore.errors import MissingDataError
from fedcore.experiment.records import read, started
from fedcore.experiment.schema.experiment import Experiment

if TYPE_CHECKING:
    from fedcore.local.together import Way


def settled(experiment: Experiment, folder: Path) -> Experiment:
    """The experiment with ``together`` said where that has to be measured, so that it can be repeated bit for bit.

    Args:
        experiment: as it came; what it says itself stands.
        folder: of the run, which may have been begun by a fedcore that did not write the choice into its configuration:
            then its records have it.

    Raises:
        DeviceError: it has to be measured on a device that is not here.

    Determinism: none where it is measured (see ``local.together.fastest``); in one process once for each model.
    """
    model, shape, device = experiment.model.model_dump_json(), experiment.data.source.shape, experiment.device or CPU
    if experiment.together is not None or not _can_be_measured(model, shape, device):
        return experiment
    recorded = _recorded(folder) if device == CPU else None
    together = _fastest(model, shape, experiment.local.batch, device) if recorded is None else recorded
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
def _can_be_measured(model: str, shape: tuple[int, ...], device: str) -> bool:
    from fedcore.local import nets, together  # here, because it imports torch, and not every reader has it
    from fedcore.local.torch_device import torch_device

    options = json.loads(model)
    return together.can_be_measured(nets.build(options.pop("name"), seed=0, **options), shape, torch_device(device))


@cache
def _fastest(model: str, shape: tuple[int, ...], batch: int, device: str) -> "Way":
    import torch

    from fedcore.local import nets, together
    from fedcore.local.torch_device import torch_device

    options, before = json.loads(model), torch.get_num_threads()
    torch.set_num_threads(1)  # as in the processes that run the trials
    try:
        module = nets.build(options.pop("name"), seed=0, **options)
        return together.fastest(module, shape, batch=batch, device=torch_device(device))
    finally:
        torch.set_num_threads(before)
