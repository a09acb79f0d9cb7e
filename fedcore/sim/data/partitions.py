"""Partitions of examples among clients, and laws of the clients' sizes.

A partition by labels is a function of (labels, clients, *, seed) and of further options:

- labels: int[m], at least one, read-only. Other arrays raise a DtypeError or ShapeError.
- clients: N, at least 1.
- seed: the run's seed. The partition depends only on the arguments.

It returns N ascending int64 arrays of indices into ``labels``, which do not overlap. It raises a RangeError if a number
is out of range or the examples do not suffice.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.arrays import I64, own_class
from fedcore.errors import DtypeError, MissingDependencyError, RangeError, ShapeError
from fedcore.runtime import generator
from fedcore.sim.data.arrays import Dataset, Indices, check_parts
from fedcore.validation import Registry, check_integer, check_number, listed, numbers

Labels = npt.NDArray[np.integer[Any]]

UNCAPPED = 2**53 - 1
"""A cap above all sizes that fit into memory."""


def pareto(clients: int, *, seed: int, smallest: int, largest: int, index: float = 0.5) -> I64:
    """Draw sizes from a Pareto law of type I, P(size > s) = (smallest / s)^index, rounded down and capped: int64[N].

    With an index up to 1 the law has no mean, so results depend on the cap. With index .5, the cap applies to the share
    (smallest / largest)^.5 of the clients. A client's size does not depend on the clients after it.

    Args:
        clients: N.
        seed: the run's seed.
        smallest: the law's scale.
        largest: the cap. If it equals ``smallest``, all clients have the same size.
        index: the law's exponent.

    >>> pareto(6, seed=0, smallest=10, largest=500).tolist()
    [10, 500, 16, 500, 12, 22]
    """
    _check_sizes(clients, smallest, largest)
    check_number("index", index, "(0, inf)")
    uniform = generator(seed, "data: pareto sizes").random(clients)
    with np.errstate(over="ignore"):  # An infinite size is above the cap.
        sizes = np.minimum(smallest * (1 - uniform) ** (-1 / index), largest)
    return sizes.astype(np.int64)


def lognormal(
    clients: int, *, seed: int, smallest: int, largest: int, mean: float = 4.0, deviation: float = 2.0
) -> I64:
    """Draw sizes from a lognormal law: smallest + exp(N(mean, deviation^2)), rounded down and capped.

    With the default numbers and smallest = 50, these are the sizes of SYNTHETIC in its authors' public code, which has
    no cap. The other arguments, the result and the errors are those of ``pareto``.
    """
    _check_sizes(clients, smallest, largest)
    check_number("mean", mean, "(-inf, inf)")
    check_number("deviation", deviation, "[0, inf)")
    normal = generator(seed, "data: lognormal sizes").normal(mean, deviation, clients)
    with np.errstate(over="ignore"):
        sizes: npt.NDArray[np.float64] = np.minimum(smallest + np.exp(normal), largest)
    return sizes.astype(np.int64)


LAWS: dict[str, Callable[..., I64]] = {"pareto": pareto, "lognormal": lognormal}


def _check_sizes(clients: int, smallest: int, largest: int) -> None:
    for name, value, least in (("clients", clients, 1), ("smallest", smallest, 1), ("largest", largest, smallest)):
        check_integer(name, value, least, UNCAPPED)


def _checked(labels: Labels, clients: int) -> Labels:
    """Return ``labels`` as an array int[m]; reject wrong labels and ``clients`` below 1."""
    check_integer("clients", clients, 1)
    labels = np.asarray(own_class("labels", labels))
    if not np.issubdtype(labels.dtype, np.integer):
        raise DtypeError(f"labels: expected int[m], got {labels.dtype}")
    if labels.ndim != 1:
        raise ShapeError(f"labels: expected int[m], got shape {labels.shape}")
    if not len(labels):
        raise RangeError("labels: must not be empty")
    return labels


def _by_class(labels: Labels, random: np.random.Generator) -> dict[int, Indices]:
    """Return the indices of each class's examples in random order, with classes in ascending order."""
    return {int(label): random.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)}


def take(pool: Indices, sizes: Iterable[int], among: str = "") -> list[Indices]:
    """Cut parts of these sizes from the beginning of a pool; each part is sorted."""
    ends = np.cumsum(list(sizes))
    if len(ends) and ends[-1] > len(pool):
        raise RangeError(f"labels: expected {ends[-1]} examples{among}, got {len(pool)}; use fewer or smaller parts")
    return [np.sort(part) for part in np.split(pool, ends)[:-1]]


def take_evenly(pool: Indices, parts: int, among: str = "") -> list[Indices]:
    """Cut a pool into sorted parts whose sizes differ by at most one."""
    if len(pool) < parts:
        raise RangeError(f"labels: expected at least {parts} examples{among}, got {len(pool)}")
    return take(pool, [(len(pool) + parts - 1 - part) // parts for part in range(parts)])


def dirichlet(labels: Labels, clients: int, alpha: float, *, seed: int, least: int = 1) -> list[Indices]:
    """Split each class among the clients in proportions p ~ Dirichlet(alpha, ..., alpha).

    A small alpha gives each class to few clients. A client with fewer than ``least`` examples then receives the missing
    ones at random, each from the client that has most examples at that moment. (Public codes redraw all proportions
    until all clients have enough. That changes the law, and may not end for small alpha.) All examples are used.

    Args:
        alpha: the concentration, > 0; with a larger alpha, clients are more alike.
        least: the minimum number of examples of a client; with 0, a client may have none.

    Reference: Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution", 2019; the proportions by
    class as in Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", 2019.

    >>> labels = np.repeat([0, 1], 50)
    >>> [np.bincount(labels[part]).tolist() for part in dirichlet(labels, 3, 0.5, seed=0)]
    [[6], [1, 47], [43, 3]]
    """
    check_integer("least", least, 0)
    check_number("alpha", alpha, "(0, inf)")
    labels = _checked(labels, clients)
    if len(labels) < clients * least:
        raise RangeError(f"labels: expected {clients * least} examples, {least} for each client, got {len(labels)}")
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
    """Return the partition of ``labels``, int[m], by a partitioner of ``flwr_datasets``.

    The partitioner must be new, without a data set. If it has ``partition_by``, this is "label". A random partitioner
    has its own seed. The result has an ascending int64 array of indices into ``labels`` for each partition.

    Reference: https://flower.ai/docs/datasets
    """
    try:
        from datasets import Dataset
    except ImportError as error:
        raise MissingDependencyError("from_flower: needs Flower Datasets; pip install flwr-datasets") from error
    labels = _checked(labels, 1)
    if partitioner.is_dataset_assigned():
        raise RangeError("partitioner: has a data set; create a new one without a data set")
    partitioner.dataset = Dataset.from_dict({"label": labels, "index": np.arange(len(labels))})
    parts = map(partitioner.load_partition, range(partitioner.num_partitions))
    return [np.sort(np.array(part["index"], np.int64)) for part in parts]


def iid(labels: Labels, clients: int, *, seed: int) -> list[Indices]:
    """Distribute all examples at random; the clients' sizes differ by at most one.

    >>> [len(part) for part in iid(np.zeros(7, int), 3, seed=0)]
    [3, 2, 2]
    """
    order = generator(seed, "data: iid").permutation(len(_checked(labels, clients)))
    return take_evenly(order, clients, ", one per client")


def iid_pareto(
    labels: Labels, clients: int, *, seed: int, smallest: int = 20, largest: int | None = None, index: float = 0.5
) -> list[Indices]:
    """Distribute examples at random, in sizes from a capped Pareto law; the remaining examples are left out.

    With the same seed, law and cap, the sizes are those of ``one_label``, whose tables in the paper have IID rows too.

    Args:
        smallest, largest, index: scale, cap and exponent of the law, see ``pareto``. Default cap: m // N, for which the
            examples always suffice.

    >>> [len(part) for part in iid_pareto(np.zeros(90, int), 4, seed=0, smallest=5)]
    [5, 22, 8, 22]
    """
    sizes = pareto(clients, seed=seed, smallest=smallest, largest=UNCAPPED if largest is None else largest, index=index)
    labels = _checked(labels, clients)
    sizes = _capped(sizes, smallest, len(labels) // clients) if largest is None else sizes
    return take(generator(seed, "data: iid").permutation(len(labels)), sizes, " for the clients' sizes")


def _capped(sizes: I64, smallest: int, cap: int) -> I64:
    """Return the sizes with the default cap applied; reject a cap below ``smallest``."""
    if cap < smallest:
        raise RangeError(f"labels: expected at least {smallest} examples for each client, got {cap}")
    return np.minimum(sizes, cap)


def label_k(
    labels: Labels, clients: int, classes_per_client: int, *, seed: int, most_per_class: int | None = None
) -> list[Indices]:
    """Give client i the class i mod C and k - 1 random other classes; each class is split evenly among its clients.

    C is the number of classes. Classes have different numbers of clients, so clients differ in size. In ``shards`` with
    distinct classes, all classes have equally many. With fewer clients than classes, a class may have no client; its
    examples are left out.

    Args:
        classes_per_client: k.
        most_per_class: the maximum number of examples of one class that a client keeps; the others are left out.
            Default: no limit. The MimiC paper's public code keeps 2000 / k.

    Reference: Li, Diao, Chen, He, "Federated Learning on Non-IID Data Silos: An Experimental Study", 2022 ("#C = k").
    The public code of Sun, Mao, Zhang, "MimiC", 2023, is based on theirs.

    >>> [part.tolist() for part in label_k(np.array([0, 0, 1, 1]), 2, 2, seed=0)]
    [[1, 3], [0, 2]]
    """
    check_integer("classes_per_client", classes_per_client, 1)
    if most_per_class is not None:
        check_integer("most_per_class", most_per_class, 1)
    labels = _checked(labels, clients)
    random = generator(seed, "data: label k")
    pools = _by_class(labels, random)
    C = len(pools)
    if classes_per_client > C:
        raise RangeError(f"classes_per_client={classes_per_client}: must be at most {C}, the number of classes")
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
    """Return the partition that the data set defines: N int64 arrays of indices into the training examples.

    ``dataset.parts`` exists in SYNTHETIC, and in a data set from ``from_arrays(..., clients=...)``.
    """
    if dataset.parts is None:
        raise RangeError(
            f"partition: {dataset.name!r} has no clients; create it with data.from_arrays(..., clients=...), or choose "
            "a different partition"
        )
    if len(dataset.parts) != clients:
        raise RangeError(f"clients={clients}: {dataset.name!r} has {len(dataset.parts)} clients")
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
    """Give each client examples of one class, drawn uniformly, in sizes from a capped Pareto law.

    The remaining examples, and classes that no client drew, are left out.

    Args:
        smallest, largest, index: scale, cap and exponent of the law, see ``pareto``. The paper gives no cap and no
            smallest size. Default cap: the largest for which every class has enough examples for its clients (542 on
            MNIST with 100 clients). ``largest = smallest`` gives all clients the same size.
        balanced: whether client i has the class i mod C instead of a drawn one, for C classes. Then classes have
            equally many clients.

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
        own = take(pool, sizes[held_by[label]], f" of class {label} for its clients")
        parts |= zip(held_by[label], own, strict=True)
    return [parts[client] for client in range(clients)]


def shards(
    labels: Labels, clients: int, shards_per_client: int, *, seed: int, distinct_classes: bool = False
) -> list[Indices]:
    """Distribute shards of one class each among the clients at random, the same number to each client.

    The clients * shards_per_client shards are spread evenly over the classes; if that is not possible, the largest
    classes get one more. Shards of one class differ in size by at most one example. All examples are used.

    Args:
        shards_per_client: 2 in the papers.
        distinct_classes: whether all shards of a client have different classes. Swaps then repair a random
            distribution, so the result is not uniform among the distributions with this property.

    Reference: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017; with
    shards of exactly one class as in Sun, Mao, Zhang, "MimiC", 2023.

    >>> [part.tolist() for part in shards(np.array([0, 0, 1, 1]), 2, 2, seed=0, distinct_classes=True)]
    [[1, 2], [0, 3]]
    """
    check_integer("shards_per_client", shards_per_client, 1)
    labels = _checked(labels, clients)
    classes, sizes = np.unique(labels, return_counts=True)
    total = clients * shards_per_client
    if len(classes) > total:
        raise RangeError(f"labels: expected 1 .. {total} classes for {total} one-class shards, got {len(classes)}")
    if distinct_classes and shards_per_client > len(classes):
        raise RangeError(f"shards_per_client={shards_per_client}: must be at most {len(classes)}, the classes")
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
    """Swap shards, in place, until no hand has two shards of one class.

    Each swap reduces the number of surplus shards, so the loop ends. This hand has two shards of a class, and no class
    has more shards than there are hands, so some partner lacks the class. The partner gives a class that this hand
    lacks. If it has none, it has fewer classes than shards, so it gives a class that it has twice.
    """
    clients = len(hands)
    for giver, hand in enumerate(hands):
        while len(set(hand)) < len(hand):
            surplus = next(label for label in hand if hand.count(label) > 1)
            turn = (hands[(giver + step) % clients] for step in range(1, clients))
            partner = next(other for other in turn if surplus not in other)
            lacking = [label for label in partner if label not in hand]
            taken = (lacking or [label for label in partner if partner.count(label) > 1])[0]
            hand[hand.index(surplus)], partner[partner.index(taken)] = taken, surplus


_PARTITIONS: tuple[Any, ...] = (shards, label_k, dirichlet, one_label, iid, iid_pareto, natural)
REGISTRY: Registry[Callable[..., list[Indices]]] = Registry(
    "partition",
    {make.__name__.replace("_", "-"): make for make in _PARTITIONS},
    expected="a function of (labels, clients, *, seed)",
    fits=callable,
    group="fedcore.partitions",
)
"""The partitions, keyed by name."""
FILLED_IN = ("labels", "dataset", "clients", "seed")
"""The parameters of a partition that ``divide`` sets and that are not options."""


def hold_out(dataset: Dataset, parts: Sequence[Indices], share: float, *, seed: int) -> tuple[Dataset, list[Indices]]:
    """Hold a share of each client's training examples out of training, as validation data.

    Args:
        parts: the training examples of each client.
        share: in (0, 1). A client with m examples holds out ``round(share * m)`` of them at random, but keeps one.

    Returns:
        The data set with the examples held out in place of its test set, and the other examples of each client.

    Raises:
        RangeError: no client can hold out an example.
    """
    random = generator(seed, "data: validation")
    held = [np.sort(random.permutation(part)[: min(round(share * len(part)), len(part) - 1)]) for part in parts]
    chosen = np.concatenate(held)
    if not len(chosen):
        raise RangeError(f"validation={share}: no client has enough examples to hold one out; use a larger share")
    stays = np.ones(len(dataset.train_y), np.bool_)
    stays[chosen] = False
    test_x, test_y = dataset.train_x[chosen], dataset.train_y[chosen]
    own = replace(dataset, test_x=test_x, test_y=test_y, test_parts=None)
    return own, [part[stays[part]] for part in parts]


def divide(dataset: Dataset, name: str, clients: int, *, seed: int, **options: Any) -> list[Indices]:
    """Partition a data set's training examples among N clients: N int64 arrays of their indices.

    ``name`` is a key of ``REGISTRY``, the name of an entry point, or ``module:Name`` of a custom partition. A partition
    uses the data set's ``train_y``, or its ``parts``. ``options`` are the partition's arguments.

    Raises:
        RangeError: the partition has another number of clients, or an example belongs to two clients or does not exist.
        DtypeError: a client's examples are no integers, for example a mask.
    """
    deal = REGISTRY.find(name)
    if name == "natural":
        return natural(dataset, clients)
    where, deal_to = f"partition {name!r}", deal(dataset.train_y, clients, seed=seed, **options)
    parts = [numbers(where, part) for part in listed(where, deal_to)]
    if len(parts) != clients:
        raise RangeError(f"{where}: has {len(parts)} clients; expected {clients}")
    parts = [part.astype(np.int64) if part.dtype.kind in "iu" else part for part in parts]
    check_parts(where, parts, len(dataset.train_y))
    return parts
