"""Which examples a client takes in which local step."""

from collections.abc import Iterator
from itertools import count, islice

import numpy as np
import numpy.typing as npt

from fedcore.errors import RangeError
from fedcore.randomness import generator

Indices = npt.NDArray[np.int64]


def minibatches(
    examples: int,
    batch: int,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    seed: int,
    round: int,
    client: int,
) -> Iterator[Indices]:
    """The minibatches of one client in one round: each epoch is a new permutation, cut into pieces.

    An epoch's last minibatch is kept though it may be shorter than ``batch``.

    Args:
        examples: how many the client holds; they are 0 .. examples-1.
        batch: the size of a minibatch.
        epochs: stop after so many passes over the examples, or
        steps: after exactly so many minibatches, over as many passes as that takes. One of the two.
        seed: the run's seed.
        round: counted from 0.
        client: its index.

    Returns:
        An iterator of int64 arrays of 1 .. batch indices.

    Raises:
        RangeError: a number is below 1, or not exactly one of ``epochs`` and ``steps`` is given.

    Determinism: (seed, round, client) and the sizes alone, so all algorithms of a comparison see the same
    minibatches, and ``steps`` gives a prefix of what more steps or epochs give.

    >>> [len(indices) for indices in minibatches(5, 2, steps=4, seed=0, round=0, client=0)]
    [2, 2, 1, 2]
    """
    if (epochs is None) == (steps is None):
        raise RangeError(f"epochs, steps: expected exactly one of them, got {epochs!r} and {steps!r}")
    for name, value in (("examples", examples), ("batch", batch), ("epochs", epochs), ("steps", steps)):
        if value is not None and value < 1:
            raise RangeError(f"{name}: expected an int >= 1, got {value!r}")
    random = generator(seed, "local: minibatches", round=round, client=client)
    passes = count() if epochs is None else range(epochs)
    pieces = (
        order[start : start + batch]
        for order in (random.permutation(examples) for _ in passes)
        for start in range(0, examples, batch)
    )
    return islice(pieces, steps)
