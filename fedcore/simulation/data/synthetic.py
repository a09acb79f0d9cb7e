"""SYNTHETIC(alpha, beta): generated data with one law for each client, and its IID variant."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedcore.arguments import real
from fedcore.errors import UnknownNameError
from fedcore.randomness import generator
from fedcore.simulation.data.arrays import Dataset
from fedcore.simulation.data.partitions import LAWS

FEATURES = 60
CLASSES = 10

Law = Literal["pareto", "lognormal"]


def load(
    alpha: float,
    beta: float,
    *,
    clients: int,
    seed: int,
    sizes: Law = "pareto",
    smallest: int = 50,
    largest: int = 2000,
    test_share: float = 0.1,
) -> Dataset:
    """SYNTHETIC(alpha, beta): client k has x ~ N(v_k, diag(j^-1.2)), labelled argmax(softmax(W_k x + b_k)).

    B_k ~ N(0, beta^2), and every entry of v_k ~ N(B_k, 1): beta is the difference of the clients' features.
    u_k ~ N(0, alpha^2), and every entry of W_k and b_k ~ N(u_k, 1): alpha is meant as the difference of their models.
    But u_k adds the same to the scores of all classes, which changes neither softmax nor argmax: the data is the same
    for every alpha. (0, 0) is far from IID, because each client has its own W_k, b_k and v_k; ``load_iid`` is IID.

    Args:
        alpha, beta: standard deviations, as in the authors' public code; their paper does not specify it.
        clients: N.
        seed: the run's seed.
        sizes: the law of the clients' sizes, see ``fedcore.simulation.data.partitions``.
        smallest, largest: its scale and its cap; if they are equal, all clients have that size.
        test_share: a client's examples in the common test set, as a share of its training examples, rounded up.

    Returns:
        float32[m, 60] with 10 classes; ``parts`` and ``test_parts`` have the examples of each client.

    Raises:
        RangeError: a number is outside its range.
        UnknownNameError: there is no such law.

    Determinism: only the arguments (labels: as far as float64 matrix products agree). A client's data does not depend
    on the other clients, and its first examples do not depend on its size.

    Reference: T. Li et al., "Federated Optimization in Heterogeneous Networks", 2018, Sec. 5.1.
    """
    for name, value in (("alpha", alpha), ("beta", beta)):
        real(name, value, "[0, inf)")
    counts = _counts(clients, seed, sizes, smallest, largest, test_share)
    pieces = []
    for client, (train, test) in enumerate(counts):
        random = generator(seed, "data: synthetic", client=client)
        u, B = random.normal(size=2) * (alpha, beta)
        W, b = u + random.normal(size=(FEATURES, CLASSES)), u + random.normal(size=CLASSES)
        v = B + random.normal(size=FEATURES)
        pieces.append(_examples(random, v, W, b, train + test))
    return _gather("synthetic", pieces, [train for train, _ in counts])


def load_iid(
    *,
    clients: int,
    seed: int,
    sizes: Law = "pareto",
    smallest: int = 50,
    largest: int = 2000,
    test_share: float = 0.1,
) -> Dataset:
    """SYNTHETIC with one law for all clients: W and b ~ N(0, 1) are shared, and v_k = 0.

    The arguments, the result and the errors are those of ``load``; W and b depend only on the seed.
    """
    counts = _counts(clients, seed, sizes, smallest, largest, test_share)
    shared = generator(seed, "data: synthetic, shared")
    W, b = shared.normal(size=(FEATURES, CLASSES)), shared.normal(size=CLASSES)
    pieces = [
        _examples(generator(seed, "data: synthetic", client=client), np.zeros(FEATURES), W, b, train + test)
        for client, (train, test) in enumerate(counts)
    ]
    return _gather("synthetic-iid", pieces, [train for train, _ in counts])


Examples = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]


def _counts(
    clients: int, seed: int, sizes: Law, smallest: int, largest: int, test_share: float
) -> list[tuple[int, int]]:
    """Each client's numbers of training and test examples."""
    real("test_share", test_share, "(0, 1]")
    if sizes not in LAWS:
        raise UnknownNameError.of("sizes", sizes, LAWS)
    drawn: list[int] = LAWS[sizes](clients, seed=seed, smallest=smallest, largest=largest).tolist()
    return [(train, math.ceil(train * test_share)) for train in drawn]


def _examples(
    random: np.random.Generator,
    v: npt.NDArray[np.float64],
    W: npt.NDArray[np.float64],
    b: npt.NDArray[np.float64],
    count: int,
) -> Examples:
    deviation = np.arange(1, FEATURES + 1) ** -0.6  # the covariance is diag(j^-1.2)
    x = v + deviation * random.normal(size=(count, FEATURES))
    return x.astype(np.float32), (x @ W + b).argmax(axis=1)  # softmax does not change the argmax


def _gather(name: str, pieces: Sequence[Examples], train: Sequence[int]) -> Dataset:
    def parts(counts: Sequence[int]) -> tuple[npt.NDArray[np.int64], ...]:
        return tuple(np.arange(end - count, end) for end, count in zip(np.cumsum(counts), counts, strict=True))

    pairs = list(zip(pieces, train, strict=True))
    return Dataset(
        name,
        np.concatenate([x[:count] for (x, _), count in pairs]),
        np.concatenate([y[:count] for (_, y), count in pairs]),
        np.concatenate([x[count:] for (x, _), count in pairs]),
        np.concatenate([y[count:] for (_, y), count in pairs]),
        CLASSES,
        parts=parts(train),
        test_parts=parts([len(x) - count for (x, _), count in pairs]),
    )
