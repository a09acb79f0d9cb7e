"""Rounds that depend only on a server's state, and everything that a server shows."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from fedcore.arrays import to_host
from fedcore.server import Report, Server, Update

N, STEPS = 6, 3


def cohort_of(t: int) -> list[int]:
    """Return the clients of round t: none, all, or some."""
    return [[], list(range(N)), [4], [0, 2, 3], [1, 3, 5], [0, 1, 2, 4]][t % 6]


def updates_of(server: Server, cohort: Iterable[Any], newcomers: Iterable[Any] = ()) -> list[Update]:
    """Return updates that depend only on the broadcast, the client's place and the round."""
    method, t = server.algorithm, server.round_number
    sent, updates = server.broadcast(cohort, newcomers=newcomers).on_host(), []
    for place, client in enumerate(sent.ids):
        i = client if isinstance(client, int) else place
        rng = np.random.default_rng([t, i])
        y = sent.x * np.float32(0.9) + rng.normal(size=len(sent.x)).astype(np.float32) - sent.offset(client)
        y -= 0 if sent.x_prev is None else np.float32(0.1) * sent.x_prev
        control = rng.normal(size=len(y)).astype(np.float32) if sent.second else None
        steps = min(1 + i % STEPS, method.most_steps or STEPS)
        loss = 1.0 + i if method.needs_loss else None
        updates.append(Update(client, y, steps=steps, examples=1 + i, control=control, loss=loss))
    return updates


def by_adding(server: Server, updates: list[Update], newcomers: Any = ()) -> Report:
    """Run a round with ``Round.add``; the caller uses the memory of each vector again."""
    with server.open_round(newcomers=newcomers) as opened:
        for update in updates:
            given = {name: v.copy() for name in ("value", "control") if (v := getattr(update, name)) is not None}
            opened.add(**update._replace(**given)._asdict())
            for vector in given.values():
                vector[:] = np.nan
        return opened.finish()


def at_once(server: Server, updates: list[Update]) -> Report:
    """Run a round with ``round`` of the server's own class."""
    return server.round(updates)


def by_batches(server: Server, updates: list[Update], newcomers: Any = ()) -> Report:
    """Run a round with ``Round.add_batch``, of one update and of the others."""
    with server.open_round(newcomers=newcomers) as opened:
        opened.add_batch(updates[:1])
        opened.add_batch(updates[1:])
        return opened.finish()


def run_rounds(server: Server, rounds: int) -> Server:
    """Run some rounds, and return the server."""
    for _ in range(rounds):
        server.round(updates_of(server, [i for i in cohort_of(server.round_number) if i in server.clients]))
    return server


def look(server: Server) -> dict[str, Any]:
    """Return everything that a server shows between rounds; ``v`` only where the method keeps it."""
    clients = list(server.clients)
    sent = server.broadcast(clients).on_host()
    seen: dict[str, Any] = {"clients": clients, "round_number": server.round_number, "x": _copy(server.x)}
    seen |= {"tensors": server.tensors(library="numpy"), "sent": sent.x, "lr": sent.lr}
    for name, vector in (("total", server.total()), ("x_prev", sent.x_prev), ("client_sizes", server.client_sizes)):
        if vector is not None:
            seen[name] = _copy(vector)
    if server.algorithm.keeps_momentum:
        seen["v"] = _copy(server.v)
    for client in clients if server.algorithm.keeps_rows else []:
        seen[f"row {client!r}"], seen[f"offset {client!r}"] = _copy(server.row(client)), _copy(sent.offset(client))
        seen[f"correction {client!r}"] = _copy(server.correction(client))
    return seen


def _copy(vector: Any) -> Any:
    return np.array(to_host(vector))
