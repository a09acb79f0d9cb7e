"""Digests of the index's entries, whose sum tells whether all of them are there and as they were."""

from collections.abc import Sequence
from types import NoneType

import numpy as np
import numpy.typing as npt

from fedcore.store.files.slot_file_header import digest

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


def client_digests(clients: Sequence[tuple[int, int | str | None]]) -> U64:
    """A digest for each pair of a number and a stored id."""
    if not clients:
        return np.zeros(0, np.uint64)
    numbers, ids = zip(*clients, strict=True)
    kinds = set(map(type, ids))
    if kinds == {int}:
        return mixed(np.array(numbers, np.int64), np.array(ids, np.int64), np.zeros(len(ids), np.int64))
    if not kinds <= {int, str, NoneType}:
        raise TypeError(f"expected ids that are ints, strs or None, got {kinds}")
    words = [client if type(client) is int else _word(client) for client in ids]
    marks = [_MARKS[type(client)] for client in ids]
    return mixed(np.array(numbers, np.int64), np.array(words, np.int64), np.array(marks, np.int64))


def _word(client: str | None) -> int:
    return 0 if client is None else int.from_bytes(digest(client.encode()), "little", signed=True)


def total(digests: U64) -> int:
    """Their sum modulo 2^64."""
    return int(digests.sum(dtype=np.uint64))
