"""The exchange of many clients' rows, some at a time, and the checksums of those that are made whole."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.aggregation.whole import Squares, Whole
from fedcore.clients.registry import ClientId
from fedcore.kernels import ExactSum, Terms
from fedcore.kernels.exchange import ANCHORED, REPLACED
from fedcore.store import ClientStore
from fedcore.typing import F64

PART = 256
"""Rows of one call: each array that a call writes is held against all others of it, so that a call of k rows takes
k^2, with Python's lock held."""


def exchange(
    acc: npt.NDArray[np.floating[Any]] | ExactSum,
    bases: Sequence[Any],
    ys: Sequence[Any],
    scales: F64,
    weights: F64,
    old_rows: Sequence[Any],
    anchors: Sequence[Any],
    new_rows: Sequence[Any],
    *,
    out: npt.NDArray[np.floating[Any]] | ExactSum,
    row: Terms = REPLACED,
    adds: Terms = ANCHORED,
    keys: npt.NDArray[np.uint64] | None = None,
    sums: npt.NDArray[np.uint64] | None = None,
    first: int = 0,
    partials: F64 | None = None,
) -> F64:
    """``kernels.exchange`` or ``exchange_exact``, and its bits, of any number of rows that do not overlap."""
    squares = np.empty(len(ys))
    kernel: Any = kernels.exchange_exact if isinstance(acc, ExactSum) else kernels.exchange
    for start in range(0, len(ys), PART):
        some = slice(start, start + PART)
        part = partials if partials is None or len(ys) <= PART else np.empty_like(partials[:, some], order="C")
        squares[some] = kernel(
            out if start else acc,
            bases[some],
            ys[some],
            scales[some],
            weights[some],
            old_rows[some],
            anchors[some],
            new_rows[some],
            out=out,
            row=row,
            adds=adds,
            keys=None if keys is None else keys[some],
            sums=None if sums is None else sums[some],
            first=first,
            partials=part,
        )
        if partials is not None and part is not partials:
            partials[:, some] = part
    return squares


def exchange_whole(
    store: ClientStore, clients: Sequence[ClientId], *arguments: Any, whole: Whole, **options: Any
) -> Squares:
    """``exchange`` of whole rows, or of a shard's slices of them, into those that are staged for the clients.

    A commit does not read them again.

    Rows that are made a tensor at a time are no such: a tensor's end is none of a checksum's blocks.
    """
    sums, room = store.room_for_checksums(len(clients)), whole.room(store.n, len(clients))
    squares = exchange(*arguments, **options, sums=sums, first=whole.first, partials=room)
    if sums is not None:
        store.note_checksums(clients, sums)
    return Squares(squares, room)
