"""SYNTHETIC(alpha, beta): generated data with a separate law for each client, and its IID variant."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedcore.errors import UnknownNameError
from fedcore.runtime import generator
from fedcore.sim.data.arrays import Dataset
from fedcore.sim.data.partitions import LAWS
from fedcore.validation import check_number

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
    """Generate SYNTHETIC(alpha, beta): client k has x ~ N(v_k, diag(j^-1.2)), labelled argmax(softmax(W_k x + b_k)).

    B_k ~ N(0, beta^2), and every entry of v_k ~ N(B_k, 1): beta controls how much the clients' features differ.
    u_k ~ N(0, alpha^2), and every entry of W_k and b_k ~ N(u_k, 1): alpha is meant to control how much their models
    differ. But u_k adds the same number to the scores of all classes, which changes neither softmax nor argmax: the
    data is the same for all alpha. (0, 0) is far from IID, because each client has its own W_k, b_k and v_k;
    ``load_iid`` is IID.

    The result is float32[m, 60] with 10 classes; ``parts`` and ``test_parts`` have the examples of each client.

    Args:
        alpha, beta: standard deviations, as in the authors' public code; their paper does not specify it.
        sizes: the law of the clients' sizes, see ``fedcore.sim.data.partitions``.
        smallest, largest: the law's scale and cap; if they are equal, all clients have this size.
        test_share: a client's examples in the common test set, as a share of its training examples, rounded up.

    Determinism: the result depends only on the arguments (the labels, up to rounding in float64 matrix products). A
    client's data does not depend on the other clients, and its first examples do not depend on its size.

    Reference: T. Li et al., "Federated Optimization in Heterogeneous Networks", 2018, Sec. 5.1.
    """
    for name, value in (("alpha", alpha), ("beta", beta)):
        check_number(name, value, "[0, inf)")
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
    *, clients: int, seed: int, sizes: Law = "pareto", smallest: int = 50, largest: int = 2000, test_share: float = 0.1
) -> Dataset:
    """Generate SYNTHETIC with one law for all clients: W and b ~ N(0, 1) are shared, and v_k = 0.

    Arguments, result and errors are those of ``load``; W and b depend only on the seed.
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
    """Return the numbers of training and test examples of each client."""
    check_number("test_share", test_share, "(0, 1]")
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

    cut = [(x[:m], y[:m], x[m:], y[m:]) for (x, y), m in zip(pieces, train, strict=True)]
    test = [len(test_y) for _, _, _, test_y in cut]
    train_x, train_y, test_x, test_y = map(np.concatenate, zip(*cut, strict=True))
    return Dataset(name, train_x, train_y, test_x, test_y, CLASSES, parts(train), parts(test))
