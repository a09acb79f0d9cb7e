"""Partitions: the examples of each client, and laws of the clients' sizes.

A partition by labels is a function of (labels, clients, *, seed) and of its own options:

- labels: int[m], at least one, read-only.
- clients: N, at least 1.
- seed: the run's seed. The partition depends only on the arguments.

It returns N ascending int64 arrays of indices into ``labels``; no example is in two. It raises RangeError if a number
is out of range or the examples are too few, and DtypeError or ShapeError if ``labels`` is not int[m].
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.arguments import real, whole
from fedcore.errors import DtypeError, MissingDependencyError, RangeError, ShapeError
from fedcore.randomness import generator
from fedcore.registries import Registry
from fedcore.simulation.data.arrays import Dataset, Indices

Labels = npt.NDArray[np.integer[Any]]
Sizes = npt.NDArray[np.int64]

UNCAPPED = 2**53 - 1
"""A cap above every size that fits into memory."""


def pareto(clients: int, *, seed: int, smallest: int, largest: int, index: float = 0.5) -> Sizes:
    """Draw sizes by a Pareto law of type I, P(size > s) = (smallest / s)^index, rounded down and capped.

    With an index up to 1 the law has no mean, so the cap is part of the setting: a larger size becomes the cap. With
    index .5 that happens to the share (smallest / largest)^.5 of the clients.

    Args:
        clients: N.
        seed: the run's seed.
        smallest: the law's scale.
        largest: the cap. If it equals ``smallest``, all clients have the same size.
        index: the law's exponent.

    Returns:
        int64[N].

    Raises:
        RangeError: a number is outside its range.

    Determinism: only the arguments; a client's size does not depend on the clients after it.

    >>> pareto(6, seed=0, smallest=10, largest=500).tolist()
    [10, 500, 16, 500, 12, 22]
    """
    _check_sizes(clients, smallest, largest)
    real("index", index, "(0, inf)")
    uniform = generator(seed, "data: pareto sizes").random(clients)
    with np.errstate(over="ignore"):  # an infinite size is above the cap like any other
        sizes = np.minimum(smallest * (1 - uniform) ** (-1 / index), largest)
    return sizes.astype(np.int64)


def lognormal(
    clients: int, *, seed: int, smallest: int, largest: int, mean: float = 4.0, deviation: float = 2.0
) -> Sizes:
    """Draw sizes by a lognormal law: smallest + exp(N(mean, deviation^2)), rounded down and capped.

    With the default numbers and smallest = 50 these are the sizes of SYNTHETIC in its authors' public code, except
    the cap, which that code does not have. The other arguments, the result and the errors are those of ``pareto``.

    Args:
        smallest: the addend.
        mean, deviation: of the logarithm.
    """
    _check_sizes(clients, smallest, largest)
    real("mean", mean, "(-inf, inf)")
    real("deviation", deviation, "[0, inf)")
    normal = generator(seed, "data: lognormal sizes").normal(mean, deviation, clients)
    with np.errstate(over="ignore"):
        sizes: npt.NDArray[np.float64] = np.minimum(smallest + np.exp(normal), largest)
    return sizes.astype(np.int64)


LAWS: dict[str, Callable[..., Sizes]] = {"pareto": pareto, "lognormal": lognormal}


def _check_sizes(clients: int, smallest: int, largest: int) -> None:
    for name, value, least in (("clients", clients, 1), ("smallest", smallest, 1), ("largest", largest, smallest)):
        whole(name, value, least, UNCAPPED)


def _checked(labels: Labels, clients: int) -> Labels:
    """``labels`` as an array; raise if it is not int[m] with m >= 1, or ``clients`` is below 1."""
    whole("clients", clients, 1)
    labels = np.asarray(labels)
    if not np.issubdtype(labels.dtype, np.integer):
        raise DtypeError(f"labels: expected int[m], got {labels.dtype}")
    if labels.ndim != 1:
        raise ShapeError(f"labels: expected int[m], got shape {labels.shape}")
    if not len(labels):
        raise RangeError("labels: expected at least one example, got none")
    return labels


def _by_class(labels: Labels, random: np.random.Generator) -> dict[int, Indices]:
    """Each class, in ascending order, and the indices of its examples in random order."""
    return {int(label): random.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)}


def take(pool: Indices, sizes: Iterable[int], among: str = "") -> list[Indices]:
    """Cut ascending parts of these sizes from the beginning of a pool.

    Raises:
        RangeError: the pool is smaller than their sum.
    """
    ends = np.cumsum(list(sizes))
    if len(ends) and ends[-1] > len(pool):
        raise RangeError(f"labels: expected {ends[-1]} examples{among}, got {len(pool)}: give fewer or smaller parts")
    return [np.sort(part) for part in np.split(pool, ends)[:-1]]


def take_evenly(pool: Indices, parts: int, among: str = "") -> list[Indices]:
    """Cut a pool into ascending parts whose sizes differ by at most one.

    Raises:
        RangeError: it has fewer examples than parts.
    """
    if len(pool) < parts:
        raise RangeError(f"labels: expected at least {parts} examples{among}, got {len(pool)}")
    return take(pool, [(len(pool) + parts - 1 - part) // parts for part in range(parts)])


def dirichlet(labels: Labels, clients: int, alpha: float, *, seed: int, least: int = 1) -> list[Indices]:
    """Split each class among the clients in proportions p ~ Dirichlet(alpha, ..., alpha).

    A small alpha gives each class to few clients. A client with fewer than ``least`` examples then gets the missing
    ones, one by one and at random, from the client with the most at that moment. (Public codes redraw all proportions
    until all clients have enough, which changes the law, and for small alpha need not end.) Every example is in a part.

    Args:
        labels, clients, seed: see the module.
        alpha: the concentration, > 0; as it grows, clients become alike.
        least: the least examples of a client; with 0 a client may have none.

    Reference: Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution", 2019; the proportions by
    class as in Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", 2019.

    >>> labels = np.repeat([0, 1], 50)
    >>> [np.bincount(labels[part]).tolist() for part in dirichlet(labels, 3, 0.5, seed=0)]
    [[6], [1, 47], [43, 3]]
    """
    whole("least", least, 0)
    real("alpha", alpha, "(0, inf)")
    labels = _checked(labels, clients)
    if len(labels) < clients * least:
        raise RangeError(f"labels: expected at least {clients * least} examples, {least} a client, got {len(labels)}")
    random = generator(seed, "data: dirichlet")
    hands: list[list[int]] = [[] for _ in range(clients)]
    for pool in _by_class(labels, random).values():
        shares = np.cumsum(random.dirichlet(np.full(clients, alpha)))
        ends = np.rint(np.minimum(shares, 1) * len(pool)).astype(np.int64)
        for hand, piece in zip(hands, np.split(pool, ends[:-1]), strict=True):
            hand.extend(piece.tolist())
    for hand in hands:
        while len(hand) < least:
            richest = max(hands, key=len)
            hand.append(richest.pop(int(random.integers(len(richest)))))
    return [np.sort(np.array(hand, np.int64)) for hand in hands]


def from_flower(partitioner: Any, labels: Labels) -> list[Indices]:
    """Return the partition of these labels by a partitioner of ``flwr_datasets``.

    Args:
        partitioner: a new one without a data set; if it takes a column (``partition_by``), that is "label".
        labels: int[m], read-only.

    Returns:
        An ascending int64 array of indices into ``labels`` for each of its partitions.

    Raises:
        MissingDependencyError: flwr-datasets is not installed.
        RangeError: the partitioner has a data set already.
        DtypeError, ShapeError: ``labels`` is not int[m].

    Determinism: the partitioner's; partitioners that draw have their own seed.

    Reference: https://flower.ai/docs/datasets
    """
    try:
        from datasets import Dataset
    except ImportError as error:
        raise MissingDependencyError("from_flower: need Flower Datasets; pip install flwr-datasets") from error
    labels = _checked(labels, 1)
    if partitioner.is_dataset_assigned():
        raise RangeError("partitioner: expected a new one without a data set, got one with a data set")
    partitioner.dataset = Dataset.from_dict({"label": labels, "index": np.arange(len(labels))})
    return [
        np.sort(np.array(partitioner.load_partition(part)["index"], np.int64))
        for part in range(partitioner.num_partitions)
    ]


def iid(labels: Labels, clients: int, *, seed: int) -> list[Indices]:
    """Deal all examples at random, equally many to each client, or one more.

    Args:
        labels, clients, seed: see the module.

    >>> [len(part) for part in iid(np.zeros(7, int), 3, seed=0)]
    [3, 2, 2]
    """
    order = generator(seed, "data: iid").permutation(len(_checked(labels, clients)))
    return take_evenly(order, clients, ", one a client")


def iid_pareto(
    labels: Labels, clients: int, *, seed: int, smallest: int = 20, largest: int | None = None, index: float = 0.5
) -> list[Indices]:
    """Deal examples at random in sizes by a capped Pareto law; the rest is left out.

    The sizes are those of ``one_label`` for the same seed and numbers, for the IID rows of the same tables.

    Args:
        labels, clients, seed: see the module.
        smallest, largest, index: the law, its cap and its exponent, see ``pareto``. Default cap: m // N, which always
            suffices.

    >>> [len(part) for part in iid_pareto(np.zeros(90, int), 4, seed=0, smallest=5)]
    [5, 22, 8, 22]
    """
    sizes = pareto(clients, seed=seed, smallest=smallest, largest=UNCAPPED if largest is None else largest, index=index)
    labels = _checked(labels, clients)
    sizes = _capped(sizes, smallest, len(labels) // clients) if largest is None else sizes
    return take(generator(seed, "data: iid").permutation(len(labels)), sizes, " for the clients' sizes")


def _capped(sizes: Sizes, smallest: int, cap: int) -> Sizes:
    """Sizes below the largest cap for which the examples suffice."""
    if cap < smallest:
        raise RangeError(f"labels: expected at least {smallest} examples for each client, got {cap}")
    return np.minimum(sizes, cap)


def label_k(
    labels: Labels, clients: int, classes_per_client: int, *, seed: int, most_per_class: int | None = None
) -> list[Indices]:
    """Give client i the class i mod C and k - 1 others at random; a class is split evenly among its clients.

    Classes are not equally popular, so clients differ in size; ``shards`` with distinct classes has equal popularity
    instead. With fewer clients than classes a class may have no client: its examples are left out.

    Args:
        labels, clients, seed: see the module. C is the number of classes.
        classes_per_client: k.
        most_per_class: the most examples of one class that a client keeps; the rest is left out. Default: no limit. The
            MimiC paper's public code keeps 2000 / k.

    Reference: Li, Diao, Chen, He, "Federated Learning on Non-IID Data Silos: An Experimental Study", 2022 ("#C = k").
    The public code of Sun, Mao, Zhang, "MimiC", 2023, is based on theirs.

    >>> [part.tolist() for part in label_k(np.array([0, 0, 1, 1]), 2, 2, seed=0)]
    [[1, 3], [0, 2]]
    """
    whole("classes_per_client", classes_per_client, 1)
    if most_per_class is not None:
        whole("most_per_class", most_per_class, 1)
    labels = _checked(labels, clients)
    random = generator(seed, "data: label k")
    pools = _by_class(labels, random)
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
            raise RangeError(f"labels: expected at least {len(held_by)} examples of class {label}, got {len(pool)}")
        for client, piece in zip(held_by, np.array_split(pool, len(held_by) or 1), strict=False):
            hands[client].append(piece[:most_per_class])
    return [np.sort(np.concatenate(hand)) for hand in hands]


def natural(dataset: Dataset, clients: int) -> list[Indices]:
    """Return the partition in the data set.

    Args:
        dataset: one with ``parts``, such as SYNTHETIC, or one that was made with ``clients``.
        clients: N, the number of these parts.

    Returns:
        N int64 arrays of indices into the training examples.

    Raises:
        RangeError: the data set has no parts, or another number of them.
    """
    if dataset.parts is None:
        raise RangeError(
            f"partition: expected a data set with a client for each example, got {dataset.name!r} without: make it by "
            "data.from_arrays(..., clients=...), or take another partition"
        )
    if len(dataset.parts) != clients:
        raise RangeError(f"clients: expected the {len(dataset.parts)} of {dataset.name!r}, got {clients}")
    return list(dataset.parts)


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

    The other examples are left out, and so are classes that no client drew.

    Args:
        labels, clients, seed: see the module. C is the number of classes.
        smallest, largest, index: the law, its cap and its exponent, see ``pareto``. The paper gives no cap and no
            smallest size. Default cap: the most examples that every class can give to each of its clients: on MNIST
            with 100 clients 542. ``largest = smallest`` gives all clients the same size.
        balanced: whether client i's class is i mod C instead of drawn, so that all classes have as many clients.

    Reference: Ruan et al., "Towards Flexible Device Participation in Federated Learning", 2021, Sec. 5.

    >>> [part.tolist() for part in one_label(np.array([0, 1, 1, 0]), 2, seed=0, smallest=2, balanced=True)]
    [[0, 3], [1, 2]]
    """
    sizes = pareto(clients, seed=seed, smallest=smallest, largest=UNCAPPED if largest is None else largest, index=index)
    labels = _checked(labels, clients)
    pools = _by_class(labels, generator(seed, "data: one label"))
    numbers = np.arange(clients)
    drawn = numbers % len(pools) if balanced else generator(seed, "data: label").integers(len(pools), size=clients)
    held_by = {label: numbers[drawn == place].tolist() for place, label in enumerate(pools)}
    cap = min(len(pool) // len(held_by[label]) for label, pool in pools.items() if held_by[label])
    sizes = _capped(sizes, smallest, cap) if largest is None else sizes
    parts: dict[int, Indices] = {}
    for label, pool in pools.items():
        parts |= zip(
            held_by[label], take(pool, sizes[held_by[label]], f" of class {label} for its clients"), strict=True
        )
    return [parts[client] for client in range(clients)]


def shards(
    labels: Labels, clients: int, shards_per_client: int, *, seed: int, distinct_classes: bool = False
) -> list[Indices]:
    """Deal one-class shards to the clients at random, the same number to each.

    The clients * shards_per_client shards are spread over the classes as evenly as their number allows; the largest
    classes get one more. Shards of one class differ in size by one example at most. Every example is in a part.

    Args:
        labels, clients, seed: see the module.
        shards_per_client: 2 in the papers.
        distinct_classes: whether a client's shards are all of different classes. The deal is then repaired by swaps, so
            it is not uniform among the deals with this property.

    Reference: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
    2017; with shards of exactly one class as in Sun, Mao, Zhang, "MimiC", 2023.

    >>> [part.tolist() for part in shards(np.array([0, 0, 1, 1]), 2, 2, seed=0, distinct_classes=True)]
    [[1, 2], [0, 3]]
    """
    whole("shards_per_client", shards_per_client, 1)
    labels = _checked(labels, clients)
    classes, sizes = np.unique(labels, return_counts=True)
    total = clients * shards_per_client
    if len(classes) > total:
        raise RangeError(f"labels: expected 1 .. {total} classes for {total} one-class shards, got {len(classes)}")
    if distinct_classes and shards_per_client > len(classes):
        raise RangeError(f"shards_per_client: expected at most the {len(classes)} classes, got {shards_per_client}")
    counts = np.full(len(classes), total // len(classes))
    counts[np.argsort(-sizes, kind="stable")[: total % len(classes)]] += 1
    random = generator(seed, "data: shards")
    pieces = [
        take_evenly(pool, int(count), f" of class {label}")
        for (label, pool), count in zip(_by_class(labels, random).items(), counts, strict=True)
    ]
    deal = random.permutation(np.repeat(np.arange(len(classes)), counts)).reshape(clients, shards_per_client)
    hands: list[list[int]] = deal.tolist()
    if distinct_classes:
        _repair(hands)
    return [np.sort(np.concatenate([pieces[index].pop() for index in hand])) for hand in hands]


def _repair(hands: list[list[int]]) -> None:
    """Swap shards, in place, until no hand has two of one class.

    Each swap lowers the number of surplus shards, so the loop ends. A partner without the class exists, because no
    class has more shards than there are hands, and this hand has two. The partner gives a class that this hand lacks.
    If it has none, all its classes are among the others of this hand, which are fewer than its shards; so it has one of
    them twice, and gives that.
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


REGISTRY: Registry[Callable[..., list[Indices]]] = Registry(
    "partition",
    {
        "shards": shards,
        "label-k": label_k,
        "dirichlet": dirichlet,
        "one-label": one_label,
        "iid": iid,
        "iid-pareto": iid_pareto,
        "natural": natural,
    },
    due="a function of (labels, clients, *, seed)",
    fits=callable,
    group="fedcore.partitions",
)
"""The partitions by name."""
FILLED_IN = ("labels", "dataset", "clients", "seed")
"""Parameters that are not options of a partition: ``divide`` gives them."""


def divide(dataset: Dataset, name: str, clients: int, *, seed: int, **options: Any) -> list[Indices]:
    """Deal a data set's training examples by the partition of that name.

    Args:
        dataset: the data set; a partition uses its ``train_y``, or ``parts``.
        name: a key of ``REGISTRY``, an entry point's, or ``module:Name`` of your own.
        clients: N.
        seed: the run's seed.
        options: the partition's arguments.

    Returns:
        N int64 arrays of indices into the training examples.

    Raises:
        UnknownNameError: there is no such partition.
        RangeError: an argument is outside its range, or does not fit the data set.
    """
    deal = REGISTRY.find(name)
    if name == "natural":
        return natural(dataset, clients)
    return deal(dataset.train_y, clients, seed=seed, **options)
