"""An experiment's examples, and which client holds which of them."""

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore import data
from fedcore.data import Dataset
from fedcore.experiment.schema.experiment import Experiment


def load_and_partition(experiment: Experiment, seed: int) -> tuple[Dataset, list[npt.NDArray[np.int64]]]:
    """The data set of an experiment, and the indices of the training examples that each client holds.

    Args:
        experiment: its data and its partition are what counts.
        seed: a trial's seed.

    Raises:
        FedcoreError: the data is missing, or cannot be divided so.

    Determinism: the arguments alone, so that every algorithm of a comparison gets the same.
    """
    clients, partition = experiment.partition.clients, experiment.partition
    given = {"clients": clients, "seed": seed} if experiment.data.source.generated else {}
    dataset = load_once(experiment.data.name, tuple({**experiment.data.options, **given}.items()))
    return dataset, data.divide(dataset, partition.name, clients, seed=seed, **partition.options)


@lru_cache(maxsize=2)  # a process runs many trials on the same data
def load_once(name: str, options: tuple[tuple[str, Any], ...]) -> Dataset:
    """The data set of that name, or the one that was loaded before."""
    return data.load(name, **dict(options))
