"""The partition that the data itself gives."""

from fedcore.data.dataset import Dataset
from fedcore.data.partitions.labels import Indices
from fedcore.errors import RangeError


def natural(dataset: Dataset, clients: int) -> list[Indices]:
    """The partition that the data set itself has.

    Args:
        dataset: one with ``parts``, as the SYNTHETIC ones have, and those that were made with ``clients``.
        clients: N, the number of these parts.

    Returns:
        N int64 arrays of indices into the training examples.

    Raises:
        RangeError: the data set says nothing of that, or has another number of clients.
    """
    if dataset.parts is None:
        raise RangeError(
            f"partition: expected a data set with a client for each example, got {dataset.name!r} without: make it by "
            "data.from_arrays(..., clients=...), or take another partition"
        )
    if len(dataset.parts) != clients:
        raise RangeError(f"clients: expected the {len(dataset.parts)} of {dataset.name!r}, got {clients}")
    return list(dataset.parts)
