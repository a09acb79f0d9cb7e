"""Every client's examples are drawn from the whole, without looking at the labels."""

import numpy as np

from fedcore.arguments import whole
from fedcore.data.partitions.labels import Indices, Labels, check_labels
from fedcore.data.sizes import UNCAPPED, pareto
from fedcore.errors import RangeError
from fedcore.randomness import generator


def iid(labels: Labels, clients: int, *, seed: int) -> list[Indices]:
    """Deal all examples at random, equally many to each client, or one more.

    Args:
        labels: int[m], read-only.
        clients: N.
        seed: the run's seed.

    Returns:
        N ascending int64 arrays of indices into ``labels``; every example is in exactly one.

    Raises:
        RangeError: there are fewer examples than clients.
        DtypeError, ShapeError: ``labels`` is not int[m].

    Determinism: the arguments alone.

    >>> [len(part) for part in iid(np.zeros(7, int), 3, seed=0)]
    [3, 2, 2]
    """
    whole("clients", clients, 1)
    labels = check_labels(labels)
    if len(labels) < clients:
        raise RangeError(f"labels: expected at least {clients} examples for as many clients, got {len(labels)}")
    order = generator(seed, "data: iid").permutation(len(labels))
    return [np.sort(part) for part in np.array_split(order, clients)]


def iid_pareto(
    labels: Labels, clients: int, *, seed: int, smallest: int = 20, largest: int | None = None, index: float = 0.5
) -> list[Indices]:
    """Deal examples at random in sizes by a capped Pareto law; what is left over is dealt to nobody.

    The twin of ``one_label`` for the IID rows of the same tables: the same sizes for the same seed and numbers.

    Args:
        labels: int[m], read-only.
        clients: N.
        seed: the run's seed.
        smallest, largest, index: the law, its cap and its exponent, see ``fedcore.data.sizes.pareto``. Without
            ``largest`` the cap is m // N, which always suffices.

    Returns:
        N ascending int64 arrays of indices into ``labels``; no example is in two.

    Raises:
        RangeError: a number is out of range, or the sizes add up to more than the examples.
        DtypeError, ShapeError: ``labels`` is not int[m].

    Determinism: the arguments alone.

    >>> [len(part) for part in iid_pareto(np.zeros(90, int), 4, seed=0, smallest=5)]
    [5, 22, 8, 22]
    """
    whole("clients", clients, 1)
    whole("smallest", smallest, 1)
    sizes = pareto(clients, seed=seed, smallest=smallest, largest=UNCAPPED if largest is None else largest, index=index)
    labels = check_labels(labels)
    if largest is None:
        if (cap := len(labels) // clients) < smallest:
            raise RangeError(f"labels: expected at least {smallest} examples a client, got {len(labels)} for {clients}")
        sizes = np.minimum(sizes, cap)
    if sizes.sum() > len(labels):
        raise RangeError(
            f"labels: expected {sizes.sum()} examples for the clients' sizes, got {len(labels)}; lower 'largest'"
        )
    order = generator(seed, "data: iid").permutation(len(labels))
    return [np.sort(part) for part in np.split(order, np.cumsum(sizes))[:-1]]
