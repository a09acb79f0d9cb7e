"""Label skew by a Dirichlet law."""

import numpy as np

from fedcore.arguments import real, whole
from fedcore.data.partitions.labels import Indices, Labels, by_class, check_labels
from fedcore.errors import RangeError
from fedcore.randomness import generator


def dirichlet(labels: Labels, clients: int, alpha: float, *, seed: int, least: int = 1) -> list[Indices]:
    """Split each class among the clients in proportions p ~ Dirichlet(alpha, ..., alpha).

    A small alpha gives each class to few clients. Some clients then come out with nothing: whoever has fewer than
    ``least`` examples gets the missing ones, one by one and at random, from whoever holds most at that moment. (Public
    codes draw all proportions anew until everybody has enough, which bends the law, and for small alpha need not end.)

    Args:
        labels: int[m], read-only.
        clients: N.
        alpha: the concentration, > 0; as it grows, clients become alike.
        seed: the run's seed.
        least: examples that each client must hold; with 0 a client may hold none.

    Returns:
        N ascending int64 arrays of indices into ``labels``; every example is in exactly one.

    Raises:
        RangeError: a number is out of range, or there are fewer than N * least examples.
        DtypeError, ShapeError: ``labels`` is not int[m].

    Determinism: the arguments alone.

    Reference: Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution", 2019; the proportions by
    class as in Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", 2019.

    >>> labels = np.repeat([0, 1], 50)
    >>> [np.bincount(labels[part]).tolist() for part in dirichlet(labels, 3, 0.5, seed=0)]
    [[6], [1, 47], [43, 3]]
    """
    whole("clients", clients, 1)
    whole("least", least, 0)
    real("alpha", alpha, "(0, inf)")
    labels = check_labels(labels)
    if len(labels) < clients * least:
        raise RangeError(f"labels: expected at least {clients * least} examples, {least} a client, got {len(labels)}")
    random = generator(seed, "data: dirichlet")
    hands: list[list[int]] = [[] for _ in range(clients)]
    for pool in by_class(labels, random).values():
        shares = np.cumsum(random.dirichlet(np.full(clients, alpha)))
        ends = np.rint(np.minimum(shares, 1) * len(pool)).astype(np.int64)
        for hand, piece in zip(hands, np.split(pool, ends[:-1]), strict=True):
            hand.extend(piece.tolist())
    for hand in hands:
        while len(hand) < least:
            richest = max(hands, key=len)
            hand.append(richest.pop(int(random.integers(len(richest)))))
    return [np.sort(np.array(hand, np.int64)) for hand in hands]
