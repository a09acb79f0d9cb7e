"""Shards of one class, the same number to each client."""

import numpy as np

from fedcore.arguments import whole
from fedcore.data.partitions.labels import Indices, Labels, check_labels
from fedcore.errors import RangeError
from fedcore.randomness import generator


def shards(
    labels: Labels,
    clients: int,
    shards_per_client: int,
    *,
    seed: int,
    distinct_classes: bool = False,
) -> list[Indices]:
    """Deal one-class shards to the clients at random, the same number to each.

    The clients * shards_per_client shards are spread over the classes as evenly as their number allows; what
    is left over goes to the largest classes. Shards of one class differ in size by one example at most.

    Args:
        labels: int[m], read-only.
        clients: N.
        shards_per_client: 2 in the papers.
        seed: the run's seed.
        distinct_classes: no client gets two shards of one class. The deal is then repaired by swaps, so it is
            not uniform among the deals that have this property.

    Returns:
        N ascending int64 arrays of indices into ``labels``; every example is in exactly one.

    Raises:
        RangeError: there are fewer shards than classes, fewer examples of a class than shards of it, or with
            ``distinct_classes`` fewer classes than shards per client.
        DtypeError, ShapeError: ``labels`` is not int[m].

    Determinism: the arguments alone.

    Reference: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
    2017; with shards of exactly one class as in Sun, Mao, Zhang, "MimiC", 2023.

    >>> [part.tolist() for part in shards(np.array([0, 0, 1, 1]), 2, 2, seed=0, distinct_classes=True)]
    [[1, 2], [0, 3]]
    """
    whole("clients", clients, 1)
    whole("shards_per_client", shards_per_client, 1)
    labels = check_labels(labels)
    classes, sizes = np.unique(labels, return_counts=True)
    total = clients * shards_per_client
    if len(classes) > total:
        raise RangeError(f"labels: expected 1 .. {total} classes for {total} one-class shards, got {len(classes)}")
    if distinct_classes and shards_per_client > len(classes):
        raise RangeError(f"shards_per_client: expected at most the {len(classes)} classes, got {shards_per_client}")
    counts = np.full(len(classes), total // len(classes))
    counts[np.argsort(-sizes, kind="stable")[: total % len(classes)]] += 1
    for label, size, count in zip(classes, sizes, counts, strict=True):
        if size < count:
            raise RangeError(f"labels: expected at least {count} examples of class {label}, got {size}")

    random = generator(seed, "data: shards")
    pieces = {
        index: np.array_split(random.permutation(np.flatnonzero(labels == label)), counts[index])
        for index, label in enumerate(classes)
    }
    deal = random.permutation(np.repeat(np.arange(len(classes)), counts)).reshape(clients, shards_per_client)
    hands: list[list[int]] = deal.tolist()
    if distinct_classes:
        _repair(hands)
    return [np.sort(np.concatenate([pieces[index].pop() for index in hand])) for hand in hands]


def _repair(hands: list[list[int]]) -> None:
    """Swap shards, in place, until no hand holds two of one class.

    Each swap lowers the number of surplus shards, so the loop ends. A partner without the class exists,
    because no class has more shards than there are hands, and this hand has two. The partner gives a class
    that is new here. If it has none, all its classes are among the others of this hand, which are fewer than
    its shards; so it holds one of them twice, and gives that.
    """
    clients = len(hands)
    for giver, hand in enumerate(hands):
        while len(set(hand)) < len(hand):
            surplus = next(label for label in hand if hand.count(label) > 1)
            turn = (hands[(giver + step) % clients] for step in range(1, clients))
            partner = next(other for other in turn if surplus not in other)
            taken = next(
                (label for label in partner if label not in hand),
                next((label for label in partner if partner.count(label) > 1), None),
            )
            assert taken is not None
            hand[hand.index(surplus)], partner[partner.index(taken)] = taken, surplus
