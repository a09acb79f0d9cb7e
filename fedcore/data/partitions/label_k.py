"""k classes for each client, however many examples that makes."""

import numpy as np

from fedcore.arguments import whole
from fedcore.data.partitions.labels import Indices, Labels, by_class, check_labels
from fedcore.errors import RangeError
from fedcore.randomness import generator


def label_k(
    labels: Labels, clients: int, classes_per_client: int, *, seed: int, most_per_class: int | None = None
) -> list[Indices]:
    """Give client i the class i mod C and k - 1 others at random; a class is split evenly among its clients.

    Classes are not equally popular, so clients differ in size; ``shards`` with distinct classes has equal popularity
    instead. With fewer clients than classes a class may have no client: its examples are dealt to nobody.

    Args:
        labels: int[m] of C classes, read-only.
        clients: N.
        classes_per_client: k.
        seed: the run's seed.
        most_per_class: a client keeps no more examples of one class, and the rest is dealt to nobody; None for no
            limit. The MimiC paper's public code keeps 2000 / k.

    Returns:
        N ascending int64 arrays of indices into ``labels``; no example is in two, and without ``most_per_class``
        every example of a class that has a client is in one.

    Raises:
        RangeError: a number is out of range, or a class has fewer examples than clients.
        DtypeError, ShapeError: ``labels`` is not int[m].

    Determinism: the arguments alone.

    Reference: Li, Diao, Chen, He, "Federated Learning on Non-IID Data Silos: An Experimental Study", 2022 ("#C = k"),
    on whose public code that of Sun, Mao, Zhang, "MimiC", 2023, builds.

    >>> [part.tolist() for part in label_k(np.array([0, 0, 1, 1]), 2, 2, seed=0)]
    [[1, 3], [0, 2]]
    """
    whole("clients", clients, 1)
    whole("classes_per_client", classes_per_client, 1)
    if most_per_class is not None:
        whole("most_per_class", most_per_class, 1)
    labels = check_labels(labels)
    random = generator(seed, "data: label k")
    pools = by_class(labels, random)
    C = len(pools)
    if classes_per_client > C:
        raise RangeError(f"labels: expected at least {classes_per_client} classes, one client's, got {C}")
    holders: list[list[int]] = [[] for _ in range(C)]
    for client in range(clients):
        others = random.permutation(C - 1)[: classes_per_client - 1]
        for index in [client % C, *((client + 1 + others) % C)]:
            holders[index].append(client)
    hands: list[list[Indices]] = [[] for _ in range(clients)]
    for (label, pool), held_by in zip(pools.items(), holders, strict=True):
        if len(held_by) > len(pool):
            raise RangeError(
                f"labels: expected at least {len(held_by)} examples of class {label}, one for each of its clients, "
                f"got {len(pool)}"
            )
        for client, piece in zip(held_by, np.array_split(pool, len(held_by) or 1), strict=False):
            hands[client].append(piece[:most_per_class])
    return [np.sort(np.concatenate(hand)) for hand in hands]
