"""Data sets by name, and how their examples are divided among clients."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedcore.data import cifar10, digits, emnist, mnist, synthetic
from fedcore.data.arrays import from_arrays, from_torch
from fedcore.data.dataset import Dataset
from fedcore.data.holdings import holdings
from fedcore.data.hugging_face import from_hf
from fedcore.data.partitions import (
    dirichlet,
    divide,
    from_flower,
    iid,
    iid_pareto,
    label_k,
    natural,
    one_label,
    shards,
)
from fedcore.errors import RangeError
from fedcore.registries import Registry

__all__ = [
    "REGISTRY",
    "Dataset",
    "Source",
    "dirichlet",
    "divide",
    "find",
    "from_arrays",
    "from_flower",
    "from_hf",
    "from_torch",
    "holdings",
    "iid",
    "iid_pareto",
    "label_k",
    "load",
    "natural",
    "one_label",
    "shards",
]


@dataclass(frozen=True)
class Source:
    """A data set that can be loaded by name.

    Attributes:
        load: makes it; its parameters are the data set's options.
        about: one line for listings.
        shape: of one example.
        classes: the number of classes.
        generated: it is made for so many clients from a seed, which ``load`` then gets, and says who holds what.
        find: finds or downloads its files, without reading them; None where it has none.
    """

    load: Callable[..., Dataset]
    about: str
    shape: tuple[int, ...]
    classes: int
    generated: bool = False
    find: Callable[[], list[Path]] | None = None


_ROWS: dict[str, Source] = {
    "digits": Source(digits.load, "1,797 handwritten digits, in scikit-learn", (1, 8, 8), 10),
    **{
        name: Source(partial(mnist.load, name), about, (1, 28, 28), 10, find=partial(mnist.find, name))
        for name, about in (("mnist", "70,000 handwritten digits"), ("fashion-mnist", "70,000 articles of clothing"))
    },
    "cifar-10": Source(cifar10.load, "60,000 photographs of animals and vehicles", (3, 32, 32), 10, find=cifar10.find),
    **{
        f"emnist-{split}": Source(
            partial(emnist.load, split),
            "handwritten characters",
            (1, 28, 28),
            classes,
            find=partial(emnist.find, split),
        )
        for split, classes in emnist.CLASSES.items()
    },
    "synthetic": Source(
        synthetic.load, "SYNTHETIC(alpha, beta), a law for each client", (synthetic.FEATURES,), 10, generated=True
    ),
    "synthetic-iid": Source(
        synthetic.load_iid, "SYNTHETIC, one law for all clients", (synthetic.FEATURES,), 10, generated=True
    ),
}
REGISTRY: Registry[Source] = Registry(
    "data", _ROWS, due="a fedcore.data.Source", fits=lambda row: isinstance(row, Source), group="fedcore.data"
)
"""The data sets by name."""
FILLED_IN = ("clients", "seed")
"""Parameters that are no options of a data set's own: ``load`` gives them to those that are generated."""


def find(name: str) -> list[Path]:
    """The paths of a data set's files, downloaded first where they have to be; none where it has no files.

    What is in them is not looked at: ``load`` does that.

    Args:
        name: a key of ``REGISTRY``, an entry point's, or ``module:Name`` of one's own ``Source``.

    Raises:
        UnknownNameError: there is no such data set.
        MissingDataError, MissingDependencyError: the files, or what downloads them, are not there.

    >>> find("synthetic")
    []
    """
    source = REGISTRY.find(name)
    return [] if source.find is None else source.find()


def load(name: str, *, clients: int | None = None, seed: int | None = None, **options: Any) -> Dataset:
    """The data set of that name.

    Args:
        name: a key of ``REGISTRY``, an entry point's, or ``module:Name`` of one's own ``Source``.
        clients, seed: for whom and from what it is generated; the others do not look at them.
        options: the data set's own arguments.

    Raises:
        UnknownNameError: there is no such data set.
        RangeError: an option is outside its range, or ``clients`` or ``seed`` is due and missing.
        MissingDataError, MissingDependencyError: its files, or a package that it needs, are not there.

    >>> load("synthetic", clients=3, seed=0, alpha=1.0, beta=1.0, largest=100).train_x.shape
    (237, 60)
    """
    source = REGISTRY.find(name)
    if not source.generated:
        return _checked(name, source.load(**options))
    if clients is None or seed is None:
        raise RangeError(f"clients, seed: expected both, from which {name!r} is generated, got {clients} and {seed}")
    return _checked(name, source.load(clients=clients, seed=seed, **options))


def _checked(name: str, loaded: object) -> Dataset:
    if not isinstance(loaded, Dataset):
        raise RangeError(f"data: expected a fedcore.data.Dataset from {name!r}, got {loaded!r:.200}")
    return loaded
