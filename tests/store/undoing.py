"""Undoable stores whose rows and vectors say which round wrote them."""

import numpy as np

from fedcore import ClientStore
from tests.store.contents import content, write

N = 40_000  # 160,000 bytes: three blocks
CALLS = ("resize", "reserve", "sync", "sync_path", "write", "commit")


def made(path, n=N, **options):
    return ClientStore([0, 1, 2, "a"], n, medium="mmap", path=path, undoable=True, **options)


def play(store, round, clients=(0, 1)):
    for client in clients:
        write(store, client, content(store.n, str(client), round))
    store.commit(round, {"x": content(100, round), f"of{round}": content(100 + round, round)}, {"round": round})


def assert_is_at(store, round, rows):
    """Rows by the rounds that wrote them."""
    assert (store.round, store.state) == (round, None if round is None else {"round": round})
    assert {client: store.round_of(client) for client in store.registry if store.row(client) is not None} == rows
    for client, written in rows.items():
        np.testing.assert_array_equal(store.read(client), content(store.n, str(client), written))
    assert set(store.vector_names()) == (set() if round is None else {"x", f"of{round}"})
    if round is not None:
        np.testing.assert_array_equal(store.vector("x"), content(100, round))
        np.testing.assert_array_equal(store.vector(f"of{round}"), content(100 + round, round))
    assert store.verify() == []


def died(store):
    """Leave the folder as a process that ends at once does."""
    store._session._finalizer()
