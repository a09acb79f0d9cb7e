"""``aggregation="open"``: updates are clipped to the median length, and claims to two medians."""

import numpy as np
import pytest

from fedcore import Compute, Server, Update
from fedcore.errors import UnknownNameError
from fedcore.rules import OPEN, CapExamples, CapSteps, ClipToMedian

N = 4
X0 = np.zeros(N, np.float32)
UNIT = np.eye(N, dtype=np.float32)[0]


def played(server, lengths, **claims):
    """A round with one update of each length, in the order of the clients."""
    zeros = np.zeros(len(server.x), np.float32)
    unit = zeros.copy()
    unit[0] = 1
    updates = [Update(k, server.x + length * unit, **{"steps": 1, **claims}) for k, length in enumerate(lengths)]
    return server.round(updates)


def test_an_update_is_scaled_down_to_the_median_of_the_accepted_lengths():
    server = Server(X0, "FedAvg", 9, lr=0.1, aggregation="open")
    report = played(server, [1, 2, 3, 4, 5, 6, 7, 1000])  # the first eight wait for each other: their median is 4
    assert report.rejected == ()
    assert report.factors == pytest.approx([1, 1, 1, 1, 4 / 5, 4 / 6, 4 / 7, 4 / 1000])
    assert server.x[0] == pytest.approx((1 + 2 + 3 + 4 * 5) / 8)
    before = server.x[0]
    report = played(server, [8])  # what is remembered are the lengths before clipping: the median is still 4
    assert report.factors == pytest.approx([0.5])
    assert server.x[0] == pytest.approx(before + 4)


def test_few_updates_are_decided_at_the_end_of_the_round():
    server = Server(X0, "FedAvg", 9, lr=0.1, aggregation="open")
    with server.open_round() as round:
        for client, length in enumerate((1000, 1, 2)):
            assert round.add(client, length * UNIT, steps=1)
            assert server.x[0] == 0
    assert round.report.factors == pytest.approx([2 / 1000, 1, 1])


@pytest.mark.parametrize("method", ["FedAvg", "MIFA", "MimiC", "SCAFFOLD", "FedDyn"])
@pytest.mark.parametrize("sent", ["model", "delta", "gradient"])
def test_rows_store_the_clipped_update(method, sent):
    """A clipped update equals one of the clipped length: in x, in rows, and in the total."""
    long, short = (Server(X0, method, 9, lr=1.0, aggregation="open") for _ in range(2))
    for server, length in ((long, 50.0), (short, 3.0)):
        for _ in range(2):
            with server.open_round() as round:
                for client, scale in enumerate((1, 2, 3, 3, 4, 5, 6, length)):
                    step = (min(scale, 3.0) if server is short else scale) * UNIT
                    vector = {"model": server.x - step, "delta": -step, "gradient": step}[sent]
                    control = {"control": np.zeros(N, np.float32)} if method == "SCAFFOLD" else {}
                    round.add(client, vector, kind=sent, steps=1, **control)
    assert long.x == pytest.approx(short.x, rel=1e-6)
    if method in ("MIFA", "MimiC", "FedDyn"):
        assert all(long.store.read(k) == pytest.approx(short.store.read(k), rel=1e-5) for k in range(8))


def test_buffers_and_second_vectors_are_scaled_with_the_rest():
    x0 = {"w": np.zeros(2, np.float32), "running_mean": np.zeros(2, np.float32)}
    server = Server(x0, "FedAvg", 9, lr=0.1, aggregation="open")
    with server.open_round() as round:
        for client in range(8):
            size = 100 if client == 7 else 1
            round.add(client, {"w": x0["w"] + 1, "running_mean": x0["running_mean"] + size}, steps=1)
    assert round.report.factors[7] == pytest.approx(0.01)
    assert server.tensors()["running_mean"] == pytest.approx(np.ones(2), rel=1e-5)
    assert server.tensors()["w"] == pytest.approx(np.full(2, 7.01 / 8), rel=1e-5)


def test_a_median_of_zero_clips_to_zero():
    server = Server(X0, "FedAvg", 9, lr=0.1, aggregation="open")
    played(server, [0, 0, 0, 0, 0, 0, 0, 1e6])
    assert server.x[0] == 0


def test_examples_and_steps_count_up_to_two_medians(caplog):
    server = Server(X0, "FedAvg", 9, lr=0.1, aggregation="open")
    report = server.round([Update(k, UNIT, 1, 10**9 if k == 8 else 10) for k in range(9)])
    assert report.weights.tolist() == [10] * 8 + [20]
    assert "CapExamples" in caplog.text
    server = Server(X0, "MIFA", 9, lr=0.1, aggregation="open")
    report = server.round([Update(k, UNIT, 10**6 if k == 8 else 10) for k in range(9)])
    assert report.gamma == pytest.approx(0.1 * (8 * 10 + 20) / 9)
    assert "CapSteps" in caplog.text


def test_one_cap_of_the_preset_can_be_another():
    server = Server(X0, "FedAvg", 9, lr=0.1, aggregation=[CapSteps(2.0), CapExamples(5), ClipToMedian()])
    assert server.round([Update(k, UNIT, 1, 10**9 if k == 8 else 10) for k in range(9)]).weights[-1] == 50


def test_rules_change_between_rounds_and_are_saved(tmp_path):
    server = Server(X0, "FedAvg", 9, lr=0.1, storage=tmp_path / "s")
    assert played(server, [1] * 8 + [100]).factors.tolist() == [1] * 9
    server.change(aggregation="open")
    server.close()
    server = Server.load(tmp_path / "s")
    report = played(server, [1] * 8 + [100])
    assert report.factors[-1] == pytest.approx(0.01)
    assert report.changed == {"aggregation": [repr(rule) for rule in OPEN]}
    server.close()
    server = Server.load(tmp_path / "s")
    assert played(server, [100]).factors == pytest.approx([0.01])
    server.change(aggregation=None)
    assert played(server, [100]).factors.tolist() == [1]
    server.close()
    with pytest.raises(UnknownNameError, match="open"):
        Server(X0, "FedAvg", 9, lr=0.1, aggregation="closed")


def test_shards_clip_alike():
    x0 = np.zeros(40_000, np.float32)
    alone = Server(x0, "FedAvg", 9, lr=0.1, aggregation="open")
    with Server(x0, "FedAvg", 9, lr=0.1, aggregation="open", compute=Compute(shards=2)) as shards:
        for server in (alone, shards):
            with server.open_round() as round:
                for client in range(9):
                    round.add(
                        client, value=np.full(40_000, 10.0 if client == 8 else 1.0, np.float32), kind="delta", steps=1
                    )
            assert round.report.factors == pytest.approx([1] * 8 + [0.1])
        assert np.array_equal(shards.x, alone.x)
