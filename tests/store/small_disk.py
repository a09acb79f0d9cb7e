"""Fills a small disk with a store, makes room, and goes on; run as a program on the disk: ``small_disk.py FOLDER``."""

import sys
from pathlib import Path

import numpy as np

from fedcore import ClientStore, errors
from tests.store.kit import content, write

N = 10_000


def assert_is_at(store, round):
    assert store.round == round
    assert store.verify() == []
    for client in range(round + 1):
        np.testing.assert_array_equal(store.read(client), content(N, client))
    np.testing.assert_array_equal(store.vector("x"), content(N, round, 1))


def main(folder):
    ballast = folder / "ballast"
    ballast.write_bytes(bytes(1 << 20))
    store = ClientStore(1000, N, medium="mmap", path=folder / "store")
    failures = []
    round = 0
    while len(failures) < 2:
        try:
            write(store, round, content(N, round))
            store.commit(round, {"x": content(N, round, 1)})
            round += 1
        except errors.StoreError as error:
            print(error)
            failures.append(round)
            assert_is_at(store, round - 1)
            store.discard()
            ballast.unlink(missing_ok=True)
    assert failures[1] > failures[0] > 10  # without the ballast it continued
    store.close()
    with ClientStore.open(folder / "store") as store:
        assert_is_at(store, round - 1)
        for client in range(10):
            store.forget(client)
        store.commit(round)
        write(store, 999, content(N, 999))
        store.commit(round + 1)
        assert store.verify() == []
    print("well")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
