"""Folding directions of the past into the rows that refer to them, so that few need be kept."""

from collections.abc import Collection, Iterable

import numpy as np
import numpy.typing as npt

from fedcore.errors import DivergedError
from fedcore.server.exchanging import exchange
from fedcore.server.rounding import rounding_keys
from fedcore.store import ClientId, ClientStore, History


def fold_history(
    store: ClientStore,
    history: History,
    rounds: Iterable[int],
    total: npt.NDArray[np.float64],
    *,
    round: int,
    staged: Collection[ClientId],
    at_once: int,
) -> None:
    """Stage r_i - v[t] as the row of every client last heard in one of the rounds, and let the total follow.

    A correction c_i = v[t] - r_i is then minus the row. What the row cannot hold of it leaves the total, which stays
    the sum of the corrections as stored: T' = T - sum of (r_i' - r_i + v[t]), r_i' the new row as it is read.

    Args:
        store: of the rows. The new ones keep their rounds, which tell how old they are.
        history: the directions.
        rounds: which of them are folded; the history still holds them.
        total: T, float64[n], written in place; worthless if the fold fails.
        round: the one that is open.
        staged: clients whose rows change in this round anyway.
        at_once: rows of one pass.

    Raises:
        DivergedError: r_i - v[t] is not finite, or past what the codec holds.
        CorruptionError: a row is not what was written.

    Cost: a row read and written for each such client, and with a codec 4 n bytes more for each row of a pass.
    """
    for t in rounds:
        v = history.get(t)
        clients = [client for client in store.clients_of(t) if client not in staged]
        for start in range(0, len(clients), at_once):
            some = clients[start : start + at_once]
            k = len(some)
            old = [store.row(client) for client in some]
            rows = old if store.codec == "f32" else [store.read(client) for client in some]
            new = [store.stage(client, round=t) for client in some]
            # One step from r to v, of length 1: h = r - v.
            arguments = total, rows, [v] * k, np.ones(k), -np.ones(k), old, [v] * k, new
            keys = rounding_keys(store, "a history that is folded", round, some)
            squares = exchange(*arguments, out=total, keys=keys)
            if not np.isfinite(squares).all():
                client = some[int(np.flatnonzero(~np.isfinite(squares))[0])]
                raise DivergedError(
                    f"client {client!r}: its correction of round {t} is past what a row of {store.codec} holds; x "
                    "stays, lower the rates or let the client depart"
                )
