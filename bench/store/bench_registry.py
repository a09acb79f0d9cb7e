"""The registry with a million clients: adding, finding, saving and loading, and adding and removing single clients."""

import hashlib
import sqlite3
from itertools import count

import numpy as np
import pytest

from fedcore import ClientStore, Server
from fedcore.store.files.entries import Listed, listed_digests
from fedcore.store.registry import Registry

N, K = 1_000_000, 1_000
SPREAD = np.random.default_rng(0).permutation(N).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
IDS = {
    "an array": SPREAD,
    "a list of ints": SPREAD.tolist(),
    "a list of strs": [f"client-{number:013d}" for number in range(N)],
}


@pytest.mark.parametrize("kind", IDS)
def bench_register(versus, kind):
    ids = IDS[kind]
    rivals = {"dict": lambda: {client: number for number, client in enumerate(ids)}}
    versus(f"{N:,} clients from {kind}", lambda: Registry(ids), rivals, bytes=0)


@pytest.mark.parametrize("kind", IDS)
def bench_find(versus, kind):
    ids = IDS[kind]
    registry, plain = Registry(ids), {client: number for number, client in enumerate(ids)}
    at = iter(np.random.default_rng(1).integers(0, N, 10**6).tolist())
    # Look up each client once, as in a round, so that the entries are not in a cache.
    asked = [[_copy(ids[next(at)]) for _ in range(K)] for _ in range(100)]
    sets = iter(asked), iter(asked)

    def one_by_one():
        for client in next(sets[0]):
            registry.number(client)

    def by_dict():
        for client in next(sets[1]):
            plain[client]

    versus(f"{K:,} of {N:,} clients from {kind}, one by one", one_by_one, {"dict": by_dict}, bytes=0, rounds=31)


def bench_come_and_go(versus):
    """Time adding and removing a client among a million clients with sizes, against among a thousand."""

    def among(clients):
        server = Server(np.zeros(10, np.float32), "FedAvg", dict(enumerate([5] * clients)), lr=0.1)
        server.round([])
        names = count()

        def come_and_go():
            name = f"new {next(names)}"
            server.add_clients({name: 3})
            server.remove_client(name)

        return come_and_go

    versus(f"a client comes and goes among {N:,}", among(N), {"among 1,000": among(1_000)}, bytes=0, rounds=301)


def bench_digest(versus):
    listed = Listed(np.arange(N), IDS["a list of strs"])

    def by_hashlib():
        return [hashlib.blake2b(client.encode(), digest_size=8).digest() for client in listed.ids]

    versus(f"digests of {N:,} entries", lambda: listed_digests(listed), {"hashlib": by_hashlib}, bytes=0)


def bench_save_and_load(versus, tmp_path):
    ids = IDS["a list of strs"]
    store = ClientStore(ids, 1)

    def by_sqlite():
        with sqlite3.connect(":memory:") as connection:
            connection.execute("CREATE TABLE clients(number INTEGER PRIMARY KEY, id)")
            connection.executemany("INSERT INTO clients VALUES(?, ?)", enumerate(ids))
            return connection.execute("SELECT * FROM clients").fetchall()

    def by_store():
        store.save(tmp_path / "copy")
        return ClientStore.open(tmp_path / "copy", medium="ram")

    versus(f"{N:,} clients saved and loaded", by_store, {"SQLite in memory": by_sqlite}, bytes=0, rounds=5)


def _copy(client):
    return "".join(list(client)) if isinstance(client, str) else int(client)
