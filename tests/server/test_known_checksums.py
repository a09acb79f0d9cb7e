"""Rows are committed with checksums made while they were written, where possible."""

from collections import Counter

import numpy as np
import pytest

from fedcore import ClientStore, Compute, Server, algorithms
from fedcore import arrays as memory
from fedcore.server import aggregation as row_exchange
from fedcore.store.slots import Slots

P = 60_000, 10_001  # two tensors, above what is copied as a vector: no end is a block's, and the last is short
N = sum(P)
CLIENTS, BAD = 8, 5
METHODS = {
    "MIFA": algorithms.MIFA(),
    "MimiC": algorithms.MimiC(),
    "MimiC, short history": algorithms.MimiC(history=1),
    "SCAFFOLD": algorithms.SCAFFOLD(),
    "SCAFFOLD, two vectors": algorithms.SCAFFOLD(control="sent"),
    "SCAFFOLDM": algorithms.SCAFFOLDM(0.3),
}


@pytest.fixture
def sealed(monkeypatch):
    """Counts of rows whose checksums were known, and of rows that were read."""
    counts, seal = Counter(), Slots.seal

    def counted(slots, slot, *sums):
        if sums:  # vectors come without
            counts["read" if sums[0] is None else "known"] += 1
        return seal(slots, slot, *sums)

    monkeypatch.setattr(Slots, "seal", counted)
    return counts


def started(path, method, *, codec="f32", apart=False, batch_size=None):
    """A server whose rows are in files, and those files."""
    store = ClientStore(CLIENTS, N, medium="mmap", codec=codec, path=path)
    x = {"a": np.zeros(P[0], np.float32), "b": np.zeros(P[1], np.float32)} if apart else memory.zeros(N)
    return Server(x, METHODS[method], storage=store, lr=0.1, compute=Compute(batch_size=batch_size)), store


def sent(rng, *, bad=False, apart=False):
    y = rng.normal(size=N).astype(np.float32)
    y[7] = np.nan if bad else y[7]
    return dict(zip("ab", np.split(y, P[:1]), strict=True)) if apart else y


def add(round, client, y, rng, method):
    control = rng.normal(size=N).astype(np.float32) if "two vectors" in method else None
    round.add(client, y, steps=3, control=control)


def assert_sealed(store):
    """Every row has its checksums, also for another process."""
    assert store.verify() == []
    with ClientStore.open(store.path, readonly=True) as other:
        assert other.verify() == []
        assert len(other) == len(store)


CASES = [(method, apart) for method in METHODS for apart in (False, True) if not apart or "two vectors" not in method]
"""Rows that are made of second vectors are made whole."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("codec", ["f32", "bf16", "int8"])
@pytest.mark.parametrize(("method", "apart"), CASES)
def test_every_row_has_the_checksums_of_its_content(tmp_path, sealed, method, apart, codec):
    """Some updates are rejected, so that the others are written twice."""
    rng = np.random.default_rng(0)
    server, store = started(tmp_path / "store", method, codec=codec, apart=apart)
    with store:
        for _ in range(3):
            with server.open_round() as round:
                for client in range(CLIENTS):
                    add(round, client, sent(rng, bad=client == BAD, apart=apart), rng, method)
            assert [client for client, _ in round.report.rejected] == [BAD]
            assert_sealed(store)
        known = codec == "f32" and not apart
        assert sealed == {"known" if known else "read": 3 * (CLIENTS - 1)}


def test_an_aborted_round_leaves_no_checksums(tmp_path, sealed):
    rng = np.random.default_rng(1)
    server, store = started(tmp_path / "store", "MIFA")
    with store:
        for left in (True, False, True, False):
            round = server.open_round()
            for client in rng.permutation(CLIENTS).tolist():
                add(round, client, sent(rng), rng, "MIFA")
            if left:
                round.abort()
            else:
                round.finish()
            assert_sealed(store)
        assert sealed == {"known": 2 * CLIENTS}


def test_rows_of_several_kernel_calls_have_their_own_checksums(tmp_path, sealed, monkeypatch):
    monkeypatch.setattr(row_exchange, "PART", 3)
    rng = np.random.default_rng(2)
    server, store = started(tmp_path / "store", "SCAFFOLD", batch_size=CLIENTS)
    with store:
        with server.open_round() as round:
            for client in range(CLIENTS):
                round.add(client, sent(rng).tobytes(), steps=3)
        assert_sealed(store)
        assert sealed == {"known": CLIENTS}


class Rewriting:
    """A custom sum, which replaces some rows by zeros."""

    def __init__(self, inner, store, clients):
        self._inner, self._store, self._clients = inner, store, clients

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def accept(self, batch):
        self._inner.accept(batch)
        for client in batch.clients:
            if client in self._clients:
                self._store.stage(client)[:] = 0


def test_rewritten_rows_are_read_at_the_commit(tmp_path, sealed):
    rng = np.random.default_rng(3)
    server, store = started(tmp_path / "store", "MIFA")
    with store:
        server._backend._sum = Rewriting(server._backend._sum, store, {2, 6})
        with server.open_round() as round:
            for client in range(CLIENTS):
                add(round, client, sent(rng), rng, "MIFA")
        assert_sealed(store)
        assert sealed == {"known": CLIENTS - 2, "read": 2}
        assert not store.read(2).any()
        assert store.read(3).any()


def test_a_folded_history_has_checksums(tmp_path, sealed):
    rng = np.random.default_rng(4)
    server, store = started(tmp_path / "store", "MimiC, short history")
    with store:
        for cohort in ([0, 1, 2, 3], [3, 4], [4, 5], [6]):
            with server.open_round() as round:
                for client in cohort:
                    add(round, client, sent(rng), rng, "MimiC")
            assert_sealed(store)
        assert sealed["known"] > 9, "rows of replies, and those into which a direction went"
        assert sealed["read"] == 0


def test_a_warm_start_has_checksums(tmp_path, sealed):
    rng = np.random.default_rng(5)
    server, store = started(tmp_path / "store", "SCAFFOLD")
    with store:
        server.warm_start({client: sent(rng) for client in range(CLIENTS)})
        assert_sealed(store)
        assert sealed == {"known": CLIENTS}
