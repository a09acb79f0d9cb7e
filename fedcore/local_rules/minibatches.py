"""The minibatches of a client in a round: pure functions of the seed."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

import numpy as np
import numpy.typing as npt

from fedcore.arguments import whole
from fedcore.errors import RangeError
from fedcore.randomness import generator

Indices = npt.NDArray[np.int64]
"""The numbers of examples: int64[m]."""


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
    _check(examples=examples, batch=batch, epochs=epochs, steps=steps)
    orders = islice(_orders(examples, seed, round, client), epochs)
    pieces = (order[start : start + batch] for order in orders for start in range(0, examples, batch))
    return islice(pieces, steps)


@dataclass(frozen=True)
class Table:
    """A client's minibatches as the rows of a table, filled up to one width with examples that do not count.

    Attributes:
        indices: int64[steps, width]; of row k the first ``sizes[k]`` are the minibatch.
        sizes: int64[steps], >= 1.
    """

    indices: Indices
    sizes: Indices


def minibatch_table(examples: int, batch: int, *, steps: int, width: int, seed: int, round: int, client: int) -> Table:
    """The first ``steps`` minibatches of ``minibatches``, which has the other arguments, as a table.

    Args:
        width: the table's, at least the size of the largest minibatch.

    Raises:
        RangeError: a number is below 1, or ``width`` is too small.
    """
    _check(examples=examples, batch=batch, steps=steps)
    batch = min(batch, examples)
    whole("width", width, batch)
    an_epoch = -(-examples // batch)
    passes = -(-steps // an_epoch)
    filled = np.empty((passes, an_epoch * batch), np.int64)
    for row, order in zip(filled, _orders(examples, seed, round, client), strict=False):
        row[:examples] = order
        row[examples:] = order[0]
    rows = filled.reshape(-1, batch)[:steps]
    if width > batch:
        rows = np.concatenate([rows, np.repeat(rows[:, :1], width - batch, axis=1)], axis=1)
    sizes = np.full(passes * an_epoch, batch)
    sizes[an_epoch - 1 :: an_epoch] = examples - (an_epoch - 1) * batch
    return Table(rows, sizes[:steps])


def _orders(examples: int, seed: int, round: int, client: int) -> Iterator[Indices]:
    """A permutation of the examples for each epoch, without end."""
    random = generator(seed, "local: minibatches", round=round, client=client)
    return (random.permutation(examples) for _ in count())


def _check(**numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None:
            whole(name, value, 1)
