"""Data sets by name, and how their examples are divided among clients."""

from collections.abc import Callable
from functools import partial

from fedcore.data import digits, mnist
from fedcore.data.dataset import Dataset
from fedcore.data.partition import shards
from fedcore.errors import UnknownNameError

__all__ = ["REGISTRY", "Dataset", "load", "shards"]

REGISTRY: dict[str, Callable[[], Dataset]] = {
    "digits": digits.load,
    "mnist": partial(mnist.load, "mnist"),
    "fashion-mnist": partial(mnist.load, "fashion-mnist"),
}


def load(name: str) -> Dataset:
    """The data set of that name.

    Args:
        name: a key of ``REGISTRY``.

    Raises:
        UnknownNameError: there is no such data set.
        MissingDataError, MissingDependencyError: its files, or a package that it needs, are not there.
    """
    if name not in REGISTRY:
        raise UnknownNameError.of("data", name, REGISTRY)
    return REGISTRY[name]()
