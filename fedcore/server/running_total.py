"""A running total without a client: what it has in T is taken off, from integers to the last bit."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from fedcore import devices, kernels
from fedcore.clients import ClientId
from fedcore.errors import CorruptionError
from fedcore.kernels import ExactSum
from fedcore.memory import empty, zeros
from fedcore.server.history import History
from fedcore.server.snapshot import Snapshot
from fedcore.store import ClientStore
from fedcore.typing import F64, Floats


def without_client(
    now: Snapshot, client: ClientId, store: ClientStore, part: Callable[[ClientId], Floats], *, corrections: bool
) -> Snapshot:
    """The snapshot with a T that has nothing of a client, as a new vector.

    Args:
        part: what a client has in T: its row, or its correction v[t_i] - r_i.
        corrections: which of the two.

    Where the client's row is damaged, nobody knows what its part was: the others' are added up anew.

    Raises:
        CorruptionError: a row is longer than an exact sum holds.

    Cost: reads one row; all of them where it is damaged.
    """
    if now.exact_total is not None:
        exact = _exact_without(now.exact_total, client, store, now.history if corrections else None)
        return now._replace(total=kernels.read_exact(exact), exact_total=exact)
    total, device = now.total, devices.of(now.x)
    assert total is not None
    try:
        without: F64 = empty(len(total), np.float64, device=device)
        return now._replace(total=kernels.combine([total, part(client)], [1.0, -1.0], without))
    except CorruptionError:
        rest: F64 = zeros(len(total), np.float64, device=device)
        for other in store.registry:
            with suppress(CorruptionError):  # a part that can be read no more is in no sum either
                if other != client:
                    kernels.combine([rest, part(other)], [1.0, 1.0], rest)
        return now._replace(total=rest)


def _exact_without(total: ExactSum, client: ClientId, store: ClientStore, history: History | None) -> ExactSum:
    """T as integers without a client's part: of the history, where it is a correction."""
    try:
        return _with(total, client, -1, store, history)
    except CorruptionError:
        rest = ExactSum.zeros(len(total.high))
        for other in store.registry:
            with suppress(CorruptionError):
                if other != client:
                    rest = _with(rest, other, 1, store, history)
        return rest


def _with(total: ExactSum, client: ClientId, times: int, store: ClientStore, history: History | None) -> ExactSum:
    """The total and so many times a client's part."""
    if store.row(client) is None:
        return total
    terms: list[Any] = [total, store.read(client)]
    coefficients = [1, times if history is None else -times]
    if history is not None and (v := history.get(store.round_of(client))) is not None:
        terms, coefficients = [*terms, v], [*coefficients, times]
    found = kernels.combine_exact(terms, coefficients)
    if found is None:
        raise CorruptionError(f"client {client!r}: expected a row that an exact sum holds, got a longer one")
    return found
