"""Partitions, which say who holds which examples: one partition, one file, one row of ``REGISTRY``."""

from collections.abc import Callable
from typing import Any

from fedcore.data.dataset import Dataset
from fedcore.data.partitions.dirichlet import dirichlet
from fedcore.data.partitions.flower import from_flower
from fedcore.data.partitions.iid import iid, iid_pareto
from fedcore.data.partitions.label_k import label_k
from fedcore.data.partitions.labels import Indices
from fedcore.data.partitions.natural import natural
from fedcore.data.partitions.one_label import one_label
from fedcore.data.partitions.shards import shards
from fedcore.registries import Registry

__all__ = [
    "FILLED_IN",
    "REGISTRY",
    "dirichlet",
    "divide",
    "from_flower",
    "iid",
    "iid_pareto",
    "label_k",
    "natural",
    "one_label",
    "shards",
]

_ROWS: dict[str, Callable[..., list[Indices]]] = {
    "shards": shards,
    "label-k": label_k,
    "dirichlet": dirichlet,
    "one-label": one_label,
    "iid": iid,
    "iid-pareto": iid_pareto,
    "natural": natural,
}
REGISTRY: Registry[Callable[..., list[Indices]]] = Registry(
    "partition", _ROWS, due="a function of (labels, clients, *, seed)", fits=callable, group="fedcore.partitions"
)
"""The partitions by name."""
FILLED_IN = ("labels", "dataset", "clients", "seed")
"""Parameters that are no options of a partition's own: ``divide`` gives them."""


def divide(dataset: Dataset, name: str, clients: int, *, seed: int, **options: Any) -> list[Indices]:
    """Deal a data set's training examples by the partition of that name.

    Args:
        dataset: whose ``train_y``, or ``parts``, is what counts.
        name: a key of ``REGISTRY``, an entry point's, or ``module:Name`` of one's own.
        clients: N.
        seed: the run's seed.
        options: the partition's own arguments.

    Returns:
        N int64 arrays of indices into the training examples.

    Raises:
        UnknownNameError: there is no such partition.
        RangeError: an argument is outside its range, or the data set does not allow it.
    """
    deal = REGISTRY.find(name)
    if name == "natural":
        return natural(dataset, clients)
    return deal(dataset.train_y, clients, seed=seed, **options)
