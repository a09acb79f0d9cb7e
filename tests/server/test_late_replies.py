"""Late updates are measured against the x of their round, for ``max_staleness`` rounds."""

import numpy as np
import pytest

from fedcore import ClientStore, RoundPolicy, Server, Update
from fedcore.algorithms import MimiC
from fedcore.errors import UnknownClientError


def move(server, by, **of):
    return server.round([Update(0, server.x + np.float32(by), 1, **of)])


def test_a_round_without_updates_accepts_late_ones():
    server = Server(np.zeros(2, np.float32), "FedAvg", 3, lr=1.0, policy=RoundPolicy(max_staleness=2))
    move(server, 1)
    server.round([])
    report = server.round([Update(0, np.float32([5, 5]), 1, round=1), Update(1, np.float32([2, 2]), 1, round=0)])
    assert report.rejected == ()
    np.testing.assert_array_equal(server.x, [1 + (4 + 2) / 2] * 2)


def test_rounds_in_which_x_stays_count_for_staleness():
    server = Server(np.zeros(2, np.float32), "FedAvg", 3, lr=1.0, policy=RoundPolicy(max_staleness=2))
    for t in range(12):
        if t % 3 == 2:
            server.round([])
        else:
            assert move(server, 1).accepted == (0,)
        assert set(server._backend.snapshot.past) == set(range(max(0, t - 1), t + 1))
        (refused,) = move_late(server, t - 2) if t >= 2 else [(0, "round")]
        assert refused[1].startswith("round")


def move_late(server, round):
    opened = server.open_round()
    opened.add(0, np.zeros(2, np.float32), steps=1, round=round)
    rejected = list(opened.rejected)
    opened.abort()
    return rejected


@pytest.mark.parametrize("codec", ["f32", "int8"])
@pytest.mark.parametrize("history_rounds", [1, 64])
def test_mimic_keeps_its_sum_with_late_updates_and_changing_clients(codec, history_rounds, tmp_path):
    """A client that returns has no row, and its late update counts as its first."""
    store = ClientStore(5, 70, medium="mmap", path=tmp_path / "s", codec=codec)
    late = RoundPolicy(max_staleness=3)
    server = Server(np.zeros(70, np.float32), MimiC(history=history_rounds), storage=store, lr=0.1, policy=late)
    rng = np.random.default_rng(0)
    sent, last = {}, {}
    for t in range(60):
        sent[t] = server.x.copy()
        gone = t % 10 in (4, 5)
        if t % 10 == 4:
            server.remove_client(3)
            with pytest.raises(UnknownClientError):
                server.round([Update(3, server.x, 1)])
        if t % 10 == 6:
            server.add_clients(3)
            assert not server.correction(3).any()
        updates = []
        for i in np.flatnonzero(rng.random(5) < 0.5).tolist():
            if not (gone and i == 3):
                last[i] = started = int(rng.integers(max(0, t - 3, last.get(i, -1) + 1), t + 1))
                updates.append(Update(i, sent[started] * np.float32(0.9) + np.float32(i), 1, round=started))
        assert server.round(updates).rejected == ()
        total = sum(server.correction(i) for i in server.clients)
        np.testing.assert_allclose(server._backend.snapshot.total, total, rtol=0, atol=1e-10)
    server.close()
    again = Server.load(tmp_path / "s")
    np.testing.assert_array_equal(again._backend.snapshot.total, server._backend.snapshot.total)
    assert again.store.verify() == []
