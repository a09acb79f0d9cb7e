"""One label for each device, in sizes by a Pareto law."""

import numpy as np

from fedcore.arguments import whole
from fedcore.data.partitions.labels import Indices, Labels, by_class, check_labels
from fedcore.data.sizes import UNCAPPED, pareto
from fedcore.errors import RangeError
from fedcore.randomness import generator


def one_label(
    labels: Labels,
    clients: int,
    *,
    seed: int,
    smallest: int = 20,
    largest: int | None = None,
    index: float = 0.5,
    balanced: bool = False,
) -> list[Indices]:
    """Give each client examples of one class, drawn uniformly, in sizes by a capped Pareto law.

    What is left over is dealt to nobody, nor are the classes that nobody drew.

    Args:
        labels: int[m] of C classes, read-only.
        clients: N.
        seed: the run's seed.
        smallest, largest, index: the law, its cap and its exponent, see ``fedcore.data.sizes.pareto``. The law of
            index .5 has no mean; its paper gives no cap and no smallest size. Without ``largest`` the cap is what the
            scarcest class can give to each of its clients, which always suffices: on MNIST with 100 clients 542.
            ``largest = smallest`` gives everybody the same size.
        balanced: client i's class is i mod C instead of drawn, so that every class has as many clients as the others.

    Returns:
        N ascending int64 arrays of indices into ``labels``; no example is in two.

    Raises:
        RangeError: a number is out of range, or the sizes of a class's clients add up to more than it has.
        DtypeError, ShapeError: ``labels`` is not int[m].

    Determinism: the arguments alone.

    Reference: Ruan et al., "Towards Flexible Device Participation in Federated Learning", 2021, Sec. 5.

    >>> [part.tolist() for part in one_label(np.array([0, 1, 1, 0]), 2, seed=0, smallest=2, balanced=True)]
    [[0, 3], [1, 2]]
    """
    whole("clients", clients, 1)
    whole("smallest", smallest, 1)
    sizes = pareto(clients, seed=seed, smallest=smallest, largest=UNCAPPED if largest is None else largest, index=index)
    labels = check_labels(labels)
    pools = by_class(labels, generator(seed, "data: one label"))
    numbers = np.arange(clients)
    drawn = numbers % len(pools) if balanced else generator(seed, "data: label").integers(len(pools), size=clients)
    turns = [numbers[drawn == turn].tolist() for turn in range(len(pools))]
    if largest is None:
        cap = min(len(pool) // len(turn) for pool, turn in zip(pools.values(), turns, strict=True) if turn)
        if cap < smallest:
            raise RangeError(f"labels: expected {smallest} examples for each client of a class, got {cap} in one")
        sizes = np.minimum(sizes, cap)
    parts: dict[int, Indices] = {}
    for (label, pool), turn in zip(pools.items(), turns, strict=True):
        due = sizes[turn].sum()
        if due > len(pool):
            raise RangeError(
                f"labels: expected {due} examples of class {label} for its clients, got {len(pool)};"
                " lower 'largest', or deal 'balanced'"
            )
        parts |= zip(turn, map(np.sort, np.split(pool, np.cumsum(sizes[turn]))[:-1]), strict=True)
    return [parts[client] for client in range(clients)]
