"""``aggregation="open"``: updates are clipped to the median length, examples to the median, steps to two medians."""

import numpy as np
import pytest

from fedcore import Compute, Limits, Model, RoundPolicy, Server, Update
from fedcore.errors import UnknownNameError
from fedcore.rules import OPEN, CapExamples, CapSteps, ClipToMedian, RejectLong

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


WITH_OFFSETS = ["FedAvgM", "SCAFFOLD", "SCAFFOLDM", "SCAFFOLDMVR", "FedDyn"]
"""Methods whose clients add an offset to their gradients, which only clients' own parts are clipped around."""


@pytest.mark.parametrize("method", ["FedAvg", "MIFA", "MimiC", *WITH_OFFSETS])
@pytest.mark.parametrize("sent", ["model", "delta", "gradient"])
def test_rows_store_the_clipped_update(method, sent):
    """A client's clipped gradient equals one of the clipped length: in x, in rows, and in the total."""
    long, short = (Server(X0, method, 9, lr=0.1, aggregation="open") for _ in range(2))
    for server in (long, short):
        for _ in range(3):
            broadcast = server.broadcast(range(8))
            with server.open_round() as round:
                for client, scale in enumerate((1, 2, 3, 3, 4, 5, 6, -50)):
                    own = np.clip(scale, -3, 3) if server is short else scale
                    gradient = own * UNIT + broadcast.offset(client)
                    step = np.float32(0.1 * 5) * gradient
                    vector = {"model": server.x - step, "delta": -step, "gradient": gradient}[sent]
                    control = None if server.algorithm.second_vector is None else own * UNIT
                    round.add(client, vector, kind=sent, steps=5, control=control)
            assert (server is short) or round.report.factors == pytest.approx(
                [1, 1, 1, 1, 3 / 4, 3 / 5, 3 / 6, 3 / 50], rel=1e-4
            )
    assert long.x == pytest.approx(short.x, rel=1e-5)
    assert long.v == pytest.approx(short.v, rel=1e-5)
    if short.algorithm.keeps_rows:
        assert all(long.store.read(k) == pytest.approx(short.store.read(k), rel=1e-5) for k in range(8))


@pytest.mark.parametrize("method", WITH_OFFSETS)
def test_reported_steps_do_not_lengthen_an_update(method):
    server = Server(X0, method, 9, lr=0.1, aggregation="open")
    for _ in range(4):
        broadcast, updates = server.broadcast(range(9)), []
        for client in range(9):
            y = server.x - np.float32(0.5) * (UNIT + broadcast.offset(client))
            control = None if server.algorithm.second_vector is None else UNIT
            updates.append(Update(client, y, 10**6 if client == 8 else 5, control=control))
        server.round(updates)
    assert 1 < np.linalg.norm(server.x) < 10


@pytest.mark.parametrize("method", ["SCAFFOLD", "SCAFFOLDM"])
def test_no_row_grows_beyond_the_median_gradient(method):
    server, rng = Server(X0, method, 9, lr=0.1, aggregation="open"), np.random.default_rng(0)
    for _ in range(30):
        broadcast, updates = server.broadcast(range(9)), []
        for client in range(9):
            gradient = rng.normal(size=N)
            sent = gradient / np.linalg.norm(gradient) + broadcast.offset(client)
            updates.append(Update(client, np.float32(-sent if client == 8 else sent), 1, kind="gradient"))
        server.round(updates)
        assert np.linalg.norm(server.store.read(8)) < 1.0001 / getattr(server.algorithm, "beta", 1.0)


def test_limits_without_medians_measure_whole_updates():
    """An update that turns the momentum is no longer than an honest one, but its own part is."""
    server = Server(X0, "FedAvgM", 9, lr=0.1, aggregation=[RejectLong(10)], limits=Limits(max_norm=1.01))
    for _ in range(40):  # the momentum becomes UNIT
        offset = server.broadcast([0]).offset(0)
        server.round([Update(k, 0.1 * UNIT + offset, 1, kind="gradient") for k in range(9)])
    assert server.v[0] == pytest.approx(1, abs=0.02)
    report = server.round([Update(0, UNIT, 1, kind="gradient"), Update(1, -UNIT, 1, kind="gradient")])
    assert report.accepted == (0,)
    assert "exceeds 10 x the median 0.1 (RejectLong)" in report.rejected[0][1]


@pytest.mark.parametrize("method", ["FedAvg", "FedAvgM"])
def test_buffers_and_second_vectors_are_scaled_with_the_rest(method):
    x0 = {"w": np.zeros(2, np.float32), "running_mean": np.zeros(2, np.float32)}
    server = Server(x0, method, 9, lr=1.0, aggregation="open")
    for number in (1, 2):
        x, offset = server.tensors(), server.broadcast([0]).offset(0)
        with server.open_round() as round:
            for client in range(8):
                size = 100 if client == 7 else 1
                round.add(client, {"w": x["w"] - offset + 1, "running_mean": x["running_mean"] + size}, steps=1)
        assert round.report.factors[7] == pytest.approx(0.01)
        assert server.tensors()["running_mean"] == pytest.approx(np.full(2, number), rel=1e-5)
        assert server.tensors()["w"] == pytest.approx(x["w"] - offset + np.full(2, 7.01 / 8), rel=1e-5)


def test_a_median_of_zero_clips_to_zero():
    server = Server(X0, "FedAvg", 9, lr=0.1, aggregation="open")
    played(server, [0, 0, 0, 0, 0, 0, 0, 1e6])
    assert server.x[0] == 0


def test_examples_count_up_to_the_median_and_steps_to_two(caplog):
    server = Server(X0, "FedAvg", 9, lr=0.1, aggregation="open")
    report = server.round([Update(k, UNIT, 1, 10**9 if k == 8 else 10) for k in range(9)])
    assert report.weights.tolist() == [10] * 9
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


@pytest.mark.parametrize("method", ["FedAvg", "SCAFFOLD", "FedDyn"])
def test_shards_clip_alike(method):
    x0 = np.zeros(40_000, np.float32)
    alone = Server(x0, method, 9, lr=0.1, aggregation="open")
    with Server(x0, method, 9, lr=0.1, aggregation="open", compute=Compute(shards=2)) as shards:
        for _ in range(2):
            for server in (alone, shards):
                broadcast, delta = server.broadcast(range(9)), np.random.default_rng(0).normal(size=40_000)
                with server.open_round() as round:
                    for client in range(9):
                        moved = delta * (10.0 if client == 8 else 1.0) - 0.1 * broadcast.offset(client)
                        round.add(client, value=np.float32(moved), kind="delta", steps=1)
                assert round.report.factors == pytest.approx([1] * 8 + [0.1], rel=1e-3)
            assert np.array_equal(shards.x, alone.x)


@pytest.mark.parametrize("method", ["FedAvg", "SCAFFOLD"])
def test_partial_updates_with_all_groups_are_clipped_like_whole_ones(method):
    x, rng = {"a": np.zeros(6, np.float32), "b": np.zeros(4, np.float32)}, np.random.default_rng(0)
    models = x, Model(x, partial={"one": ["a"], "two": ["b"]})
    servers = [Server(model, method, 9, lr=0.1, aggregation="open") for model in models]
    for _ in range(3):
        own, reports = rng.normal(size=(9, 10)) * np.where(np.arange(9) == 8, -20, 1)[:, None], []
        for server in servers:
            broadcast = server.broadcast(range(9))
            sent = [server.x - np.float32(0.5) * np.float32(own[i] + broadcast.offset(i)) for i in range(9)]
            reports.append(server.round([Update(i, {"a": y[:6], "b": y[6:]}, 5) for i, y in enumerate(sent)]))
        assert reports[1].factors == pytest.approx(reports[0].factors, rel=1e-4)
        assert reports[1].norms == pytest.approx(reports[0].norms, rel=1e-4)
        assert servers[1].x == pytest.approx(servers[0].x, abs=1e-5)


WAYS = ["list", "one by one", "buffer", "loaded", "shards", "groups"]


def cohort_of(way, method, path, **options):
    """A server of 12 clients, and a function that runs a round of it with the updates of some clients."""
    model = {"a": np.zeros(20_000 if way == "shards" else 4, np.float32), "b": np.zeros(3, np.float32)}
    options |= {"policy": RoundPolicy(buffer=12)} if way == "buffer" else {}
    model = Model(model, partial={"one": ["a"], "two": ["b"]}) if way == "groups" else model
    storage, compute = path if way in ("loaded", "shards") else None, Compute(shards=2 if way == "shards" else None)
    servers = [Server(model, method, 12, lr=0.1, storage=storage, compute=compute, **options)]

    def run(updates):
        if way == "loaded" and servers[0].round_number % 9 == 5:
            servers[0].close()
            servers[0] = Server.load(path)
        server = servers[0]
        updates = [Update(i, (server.x + size).astype(np.float32), **claims) for i, size, claims in updates]
        if way == "list":
            return server.round(updates)
        with server.open_buffer() if way == "buffer" else server.open_round() as round:
            for update in updates:
                round.add_batch([update._replace(round=server.round_number)])
        return round.report

    return run


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("method", "claim"), [("FedAvg", "examples"), ("FedVARP", "steps")])
@pytest.mark.sample(1)
def test_caps_rise_again_when_the_clients_of_a_day_return(way, method, claim, tmp_path):
    """Over 150 rounds, clients that report 100 by day and 5 by night alternate; the first one always reports 5."""
    run, most = cohort_of(way, method, tmp_path / "s", aggregation="open"), []
    for t in range(150):
        day = t % 100 < 50
        sizes = [5] + [100 if day else 5] * (11 if claim == "examples" else 4)
        report = run([(i, 0.01, {"steps": 1} | {claim: size}) for i, size in enumerate(sizes)])
        if claim == "examples":
            most.append(report.weights[-1] / report.weights[0] * 5)
        else:
            most.append((report.gamma / 0.1 * len(sizes) - 5) / 4)
    assert most[49] == most[149] == pytest.approx(100)


def test_a_weight_of_zero_leaves_the_folder_loadable(tmp_path):
    with Server(X0, "FedAvg", 9, lr=0.1, aggregation="open", storage=tmp_path / "s") as server:
        server.round([Update(i, UNIT, 1, weight=float(i != 3)) for i in range(9)])
    with Server.load(tmp_path / "s") as server:
        assert server.round([Update(0, UNIT, 1, weight=1.0)]).accepted == (0,)
