"""Digests of the index's entries, whose sum tells whether all of them are there and as they were."""

from collections.abc import Sequence
from types import NoneType

import numpy as np
import numpy.typing as npt

from fedcore.native import core
from fedcore.store.files.stored_ids import Listed, StoredId

U64 = npt.NDArray[np.uint64]

_MARKS = {int: 0, str: 1, NoneType: 2}


def mixed(*columns: npt.ArrayLike) -> U64:
    """A digest of 64 bits for each row of a table of integers (splitmix64's mixing after each column)."""
    h = np.full(np.shape(columns[0]), 0x9E3779B97F4A7C15, np.uint64)
    for column in columns:
        h += np.asarray(column).astype(np.uint64, casting="unsafe")
        h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        h ^= h >> np.uint64(31)
    return h


def row_digests(numbers: npt.ArrayLike, slots: npt.ArrayLike, rounds: npt.ArrayLike, seals: npt.ArrayLike) -> U64:
    """A digest for each row's entry."""
    return mixed(numbers, slots, rounds, seals)


def client_digests(clients: Sequence[tuple[int, StoredId]]) -> U64:
    """A digest for each pair of a number and a stored id."""
    return listed_digests(Listed.of(clients))


def listed_digests(clients: Listed) -> U64:
    """A digest for each entry of the list of clients."""
    ids = clients.ids
    kinds = set(map(type, ids))
    if not kinds <= {int, str, NoneType}:
        raise TypeError(f"expected ids that are ints, strs or None, got {kinds}")
    marks = [_MARKS[kind] for kind in kinds] * len(ids) if len(kinds) == 1 else [_MARKS[type(client)] for client in ids]
    return mixed(clients.numbers, core.id_words(ids), np.array(marks, np.int64))


def total(digests: U64) -> int:
    """Their sum modulo 2^64."""
    return int(digests.sum(dtype=np.uint64))
