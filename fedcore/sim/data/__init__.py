"""Data sets and their partitions among clients."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedcore.errors import RangeError
from fedcore.sim.data import datasets
from fedcore.sim.data.arrays import Dataset, from_arrays, from_hf, from_torch, holdings
from fedcore.sim.data.partitions import (
    dirichlet,
    divide,
    from_flower,
    hold_out,
    iid,
    iid_pareto,
    label_k,
    natural,
    one_label,
    shards,
)
from fedcore.validation import Registry

__all__ = ["REGISTRY", "Dataset", "Source", "dirichlet", "divide", "find", "from_arrays", "from_flower", "from_hf"]
__all__ += ["from_torch", "hold_out", "holdings", "iid", "iid_pareto", "label_k", "load", "natural", "one_label"]
__all__ += ["shards"]


@dataclass(frozen=True)
class Source:
    """A data set in ``REGISTRY``.

    Attributes:
        load: the function that loads it; its parameters are the data set's options.
        about: one line for listings.
        shape, classes: the shape of one example, and the number of classes.
        generated: whether ``load`` generates the data from ``clients`` and ``seed``, and assigns it to clients.
        find: the function that finds or downloads the files, without reading them. Default: the data set has no files.
    """

    load: Callable[..., Dataset]
    about: str
    shape: tuple[int, ...]
    classes: int
    generated: bool = False
    find: Callable[[], list[Path]] | None = None


def _source(name: str, published: datasets.Published) -> Source:
    reader = datasets.load_cifar10 if name == "cifar-10" else partial(datasets.load_idx, name)
    return Source(reader, published.about, published.shape, published.classes, find=partial(datasets.find_files, name))


_generated = partial(Source, shape=(datasets.FEATURES,), classes=datasets.CLASSES, generated=True)
_ROWS: dict[str, Source] = {
    "digits": Source(datasets.load_digits, "1,797 handwritten digits, in scikit-learn", (1, 8, 8), 10),
    **{name: _source(name, published) for name, published in datasets.PUBLISHED.items()},
    "synthetic": _generated(datasets.load_synthetic, "SYNTHETIC(alpha, beta), a law for each client"),
    "synthetic-iid": _generated(datasets.load_synthetic_iid, "SYNTHETIC, one law for all clients"),
}
REGISTRY: Registry[Source] = Registry(
    "data", _ROWS, expected="a fedcore.sim.data.Source", fits=lambda row: isinstance(row, Source), group="fedcore.data"
)
"""The data sets, keyed by name."""
FILLED_IN = ("clients", "seed")
"""The parameters of a generated data set that ``load`` sets and that are not options."""


def find(name: str) -> list[Path]:
    """Return the paths of a data set's files, without reading them; missing files are downloaded.

    For the argument and the errors see ``load``.

    >>> find("synthetic")
    []
    """
    source = REGISTRY.find(name)
    return [] if source.find is None else source.find()


def load(name: str, *, clients: int | None = None, seed: int | None = None, **options: Any) -> Dataset:
    """Load a data set.

    Args:
        name: a key of ``REGISTRY``, the name of an entry point, or ``module:Name`` of a custom ``Source``.
        clients, seed: for generated data sets; the others ignore them.
        options: the data set's own arguments.

    Raises:
        UnknownNameError, RangeError: the data set does not exist, or an argument is missing or out of range.
        MissingDataError, MissingDependencyError: a file or a package is missing.

    >>> load("synthetic", clients=3, seed=0, alpha=1.0, beta=1.0, largest=100).train_x.shape
    (237, 60)
    """
    source = REGISTRY.find(name)
    if source.generated:
        if clients is None or seed is None:
            raise RangeError(f"clients={clients}, seed={seed}: {name!r} is generated and needs both")
        options |= {"clients": clients, "seed": seed}
    loaded = source.load(**options)
    if not isinstance(loaded, Dataset):
        raise RangeError(f"data: {name!r} must return a fedcore.sim.data.Dataset, got {loaded!r:.200}")
    return loaded
