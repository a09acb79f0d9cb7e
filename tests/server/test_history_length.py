"""MimiC keeps one direction for each round that a row refers to, up to ``history``."""

import tracemalloc

import numpy as np
import pytest

from fedcore import ClientStore, Compute, Server, Update
from fedcore.algorithms import MimiC
from fedcore.errors import CorruptionError, DivergedError, RangeError

EVERYTHING = 10**6


def cohorts(N, p=0.4):
    """The cohorts of all rounds, always the same."""
    rng = np.random.default_rng(0)
    while True:
        yield np.flatnonzero(rng.random(N) < p).tolist()


def go_on(server, rounds, optima, name):
    """Rounds of least squares with full gradients, which differ from x only in float32 digits."""
    for _, cohort in zip(range(rounds), name, strict=False):
        server.round([Update(i, value=server.x - optima[i], kind="gradient", steps=1) for i in cohort])


def made(tmp_path, codec="f32", medium="ram", *, N=12, n=70, history=64, **options):
    path = tmp_path / f"store-{len(list(tmp_path.iterdir()))}" if medium == "mmap" else None
    store = ClientStore(N, n, medium=medium, codec=codec, path=path)
    return Server(np.zeros(n, np.float32), MimiC(history=history), storage=store, lr=0.1, **options)


def corrections(server):
    return np.array([server.correction(i) for i in server.clients])


def test_history_is_as_long_as_the_rows_need(tmp_path):
    server = made(tmp_path, N=5, n=3)
    optima, name = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32), cohorts(5)
    for _ in range(200):
        go_on(server, 1, optima, name)
        written = {server.store.round_of(i) for i in range(5)} - {None}
        assert len(server._backend.snapshot.history) == len(written)


def test_the_direction_of_a_removed_client_goes(tmp_path):
    server = made(tmp_path, N=2, n=3)
    optima = np.float32([[1, 2, 3], [4, 5, 6]])
    go_on(server, 2, optima, iter([[0], [1]]))
    assert len(server._backend.snapshot.history) == 2
    server.remove_client(0)
    assert len(server._backend.snapshot.history) == 1


@pytest.mark.parametrize(("codec", "near"), [("f32", 1e-5), ("bf16", 0.02), ("int8", 0.05)])
@pytest.mark.parametrize("medium", ["ram", "mmap"])
@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.sample(1)
def test_a_short_history_ends_at_the_same_x(medium, codec, near, most, tmp_path):
    """Folding changes rows but no corrections, except by the codec's rounding; the total follows."""
    optima = np.random.default_rng(1).normal(size=(12, 70)).astype(np.float32)
    whole = made(tmp_path, codec, medium, history=EVERYTHING)
    short = made(tmp_path, codec, medium, history=most)
    one, other, folds = cohorts(12, 0.15), cohorts(12, 0.15), 0
    for _ in range(120):
        go_on(whole, 1, optima, one)
        go_on(short, 1, optima, other)
        folds += len(whole._backend.snapshot.history) - len(short._backend.snapshot.history)
        assert len(short._backend.snapshot.history) <= most
        assert [short.store.round_of(i) for i in range(12)] == [whole.store.round_of(i) for i in range(12)]
        np.testing.assert_allclose(short._backend.snapshot.total, corrections(short).sum(axis=0), rtol=0, atol=1e-12)
    assert folds > 300
    scale = np.abs(optima).max()
    np.testing.assert_allclose(short.x, whole.x, rtol=0, atol=near * scale)
    np.testing.assert_allclose(corrections(short), corrections(whole), rtol=0, atol=near * scale)


def test_64_directions_are_kept_by_default(tmp_path):
    server = made(tmp_path, N=70, n=1)
    go_on(server, 70, np.zeros((70, 1), np.float32), ([i] for i in range(70)))
    assert len(server._backend.snapshot.history) == 64


def test_memory_is_bounded_by_the_history(tmp_path):
    N, n, most = 60, 50_000, 4
    server = made(tmp_path, N=N, n=n, history=most)
    optima = np.zeros((N, n), np.float32)
    go_on(server, 5, optima, iter([[0]] * 5))
    tracemalloc.start()
    go_on(server, 2 * N, optima, ([t % N] for t in range(2 * N)))
    _, peak = tracemalloc.get_traced_memory()  # rows are mapped, and not in it
    tracemalloc.stop()
    assert len(server._backend.snapshot.history) == most
    assert peak < 4 * n * (most + 12)


def test_disk_space_is_bounded_by_the_history(tmp_path):
    N, n, most = 60, 5_000, 4
    server = made(tmp_path, medium="mmap", N=N, n=n, history=most)
    go_on(server, 2 * N, np.zeros((N, n), np.float32), ([t % N] for t in range(2 * N)))
    vectors = server.store._folder.vectors(4 * n)
    assert vectors.high <= 2 * most + 6  # x and v[t], those of the round before, and the ones that are written
    server.close()
    again = Server.load(tmp_path / "store-0")
    assert len(again._backend.snapshot.history) == most
    assert len(again.store.vector_names()) < most + 4


def test_directions_are_mapped_from_the_folder(tmp_path):
    with made(tmp_path, medium="mmap", N=5, n=3) as server:
        go_on(server, 6, np.eye(5, 3, dtype=np.float32), cohorts(5))
        directions, rows = server._backend.snapshot.history.directions, server._backend.store
        assert len(directions) > 2
        for t, v in directions.items():
            assert np.shares_memory(v, rows.vector(f"v/{t}"))


def test_a_correction_too_large_for_a_row_rolls_the_round_back(tmp_path, monkeypatch):
    # A single update is never so long; a correction of several rounds can be.
    monkeypatch.setattr("fedcore.server.aggregation.LONGEST", np.inf)
    monkeypatch.setattr("fedcore.server.state.longest_update", lambda *_, **__: np.inf)
    server = made(tmp_path, N=4, n=2, history=1, server_lr=1e-38)
    far = np.float32([3e38, 0])
    server.round([Update(i, value=far if i == 0 else -far, kind="gradient", steps=1) for i in range(3)])  # v = -far / 3
    before = server.x.copy(), server._backend.snapshot.total.copy(), server.round_number
    with pytest.raises(DivergedError, match=r"^client 0\b.*round 0"):
        server.round([Update(3, value=np.float32([1, 0]), kind="gradient", steps=1)])
    np.testing.assert_array_equal(server.x, before[0])
    np.testing.assert_array_equal(server._backend.snapshot.total, before[1])
    assert (server.round_number, server.store.round_of(3)) == (before[2], None)
    server.remove_client(0)
    assert server.round([Update(3, value=np.float32([1, 0]), kind="gradient", steps=1)]).accepted == (3,)


@pytest.mark.parametrize("accumulate", ["float32", "exact"])
@pytest.mark.parametrize("method", ["MIFA", "SCAFFOLD", "MimiC"])
def test_removing_a_client_with_a_damaged_row_repairs_the_sums(method, accumulate, tmp_path):
    path = tmp_path / "s"
    algorithm = MimiC(history=2) if method == "MimiC" else method
    options = dict(lr=0.1, storage=path, compute=Compute(accumulator=accumulate))
    server = Server(np.zeros(500, np.float32), algorithm, clients=7, **options)  # one client never takes part
    optima = np.random.default_rng(1).normal(size=(6, 500)).astype(np.float32)
    go_on(server, 5, optima, iter([[0, 1, 2, 3, 4, 5], [0, 1], [2], [3], [4]]))
    slots, width = [int(server.store._content.rows.slot[i]) for i in (1, 2)], server.store.info().row_bytes
    server.close()
    with open(path / "rows.slots", "r+b") as raw:
        for slot in slots:
            raw.seek(65_536 + (slot - 1) * width + 100)
            raw.write(b"\xff\xfe\xfd")
    server = Server.load(path)
    before = server.x.copy()
    with pytest.raises(CorruptionError, match="client 1"):
        go_on(server, 1, optima, iter([[0, 1]]))
    np.testing.assert_array_equal(server.x, before)
    for client in (1, 2):
        server.remove_client(client)
        there = [i for i in server.clients if i != 2]
        parts = [server.correction(i) if method == "MimiC" else server.store.read(i) for i in there]
        np.testing.assert_allclose(server._backend.snapshot.total, np.sum(parts, axis=0), rtol=0, atol=1e-6)
    go_on(server, 3, optima, iter([[0], [3, 4], [5]]))
    assert server.store.verify() == []


def test_a_history_of_zero_is_rejected(tmp_path):
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(RangeError, match=r"^history\b"):
            made(tmp_path, history=wrong)
