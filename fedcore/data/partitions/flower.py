"""The partitioners of Flower Datasets, where they are installed."""

from typing import Any

import numpy as np

from fedcore.data.partitions.labels import Indices, Labels, check_labels
from fedcore.errors import MissingDependencyError, RangeError


def from_flower(partitioner: Any, labels: Labels) -> list[Indices]:
    """The partition of these labels that a ``flwr_datasets`` partitioner makes.

    Args:
        partitioner: a new one without a data set; where it asks for a column (``partition_by``), that is "label".
        labels: int[m], read-only.

    Returns:
        An ascending int64 array of indices into ``labels`` for each of its partitions.

    Raises:
        MissingDependencyError: flwr-datasets is not installed.
        RangeError: the partitioner has a data set already.
        DtypeError, ShapeError: ``labels`` is not int[m].

    Determinism: the partitioner's own; those that draw have a seed of theirs.

    Reference: https://flower.ai/docs/datasets
    """
    try:
        from datasets import Dataset
    except ImportError as error:
        raise MissingDependencyError("from_flower: need Flower Datasets; pip install flwr-datasets") from error
    labels = check_labels(labels)
    if partitioner.is_dataset_assigned():
        raise RangeError("partitioner: expected one without a data set, got one that has its own")
    partitioner.dataset = Dataset.from_dict({"label": labels, "index": np.arange(len(labels))})
    return [
        np.sort(np.array(partitioner.load_partition(part)["index"], np.int64))
        for part in range(partitioner.num_partitions)
    ]
