"""The steps of a store with keep_previous on a failing disk: rounds, undos, clients and compactions."""

import hashlib

from fedcore import ClientStore
from tests.store.kit import content, write

N = 2000
STEPS = "rruradurCrurcrurrCur"  # see ``step``


def digest(store):
    """Of all that lasts."""
    rows = [(str(c), store.round_of(c), store.read(c).tobytes()) for c in store.registry]
    vectors = [(name, store.vector(name).tobytes()) for name in sorted(store.vector_names())]
    clients = store.registry.explicit()
    return hashlib.blake2b(repr((store.round, store.state, clients, rows, vectors)).encode(), digest_size=8).hexdigest()


def a_round(store, key):
    for i, client in enumerate(store.registry):
        if (i + key) % 3:
            write(store, client, content(N, str(client), key))
    store.commit(key, {"x": content(N, key), f"of{key % 2}": content(N + key, key)}, {"key": key})


def step(store, letter, key, folder):
    """One step; returns the store."""
    match letter:
        case "r":
            a_round(store, key)
        case "u":
            store.undo()
        case "a":
            store.add(f"client {key}")
            a_round(store, key)
        case "d":
            store.forget(sorted(store.registry, key=str)[1])
            a_round(store, key)
        case "c":
            store.compact()
        case "C":
            store.close()
            return ClientStore.open(folder / "run", keep_previous=True)
    return store


def play(folder, acknowledge):
    """All steps; after each, ``acknowledge`` gets the digests of the store and of its previous commit, or None."""
    store = ClientStore(5, N, medium="mmap", path=folder / "run", keep_previous=True)
    a_round(store, 0)
    now, previous = digest(store), None  # the state before the first round is not compared
    acknowledge(now, previous)
    for key, letter in enumerate(STEPS, 1):
        before = now
        store = step(store, letter, key, folder)
        now = digest(store)
        previous = before if letter in "rad" else None if letter in "uc" else previous
        acknowledge(now, previous)
    store.close()
