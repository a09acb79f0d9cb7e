"""Buffers: FedBuff, FedAsync and CA2FL equal their definitions, and a buffer survives crashes with the same bits."""

import copy
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from fedcore import Compute, Limits, RoundPolicy, Server, Storage, Update, rules
from fedcore.algorithms import FedAsync, FedAvg, FedVARP
from fedcore.algorithms.optimizers import SGD
from fedcore.errors import FedcoreError, RangeError
from fedcore.server import report
from fedcore.server.folder import open_updates
from fedcore.store.inspect import state_of
from tests.kit import in_threads
from tests.server.asynchronous import (
    POLICY,
    arrivals,
    ca2fl,
    fedasync,
    fedbuff,
    follow,
    go_on,
    hinge,
    next_of,
    nth,
    polynomial,
)
from tests.server.papers import Clients, N, n, start_of
from tests.server.rounds import everything

ROOT, CLOSE = Path(__file__).parents[2], 2e-6
LAWS = {"constant": (0.0, polynomial(0)), "polynomial": (0.5, polynomial(0.5)), "hinge": ((2.0, 1.0), hinge(2, 1))}


def numbers(*values):
    return np.float32(values)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_fedbuff_is_its_definition(law, rate):
    discount, s = LAWS[law]
    course, data = arrivals(0, 100, 7, 4), Clients(0)
    server = Server(
        start_of(0),
        FedAvg("uniform"),
        N,
        lr=0.1,
        optimizer=None if rate == 1 else SGD(momentum=0, eta=rate),
        policy=RoundPolicy(buffer=7, max_staleness=4, discount=discount),
    )
    assert follow(server, data, course, fedbuff(data, start_of(0).astype(np.float64), 0.1, course, s, rate)) < CLOSE
    assert len(server._backend.snapshot.past) == 4


@pytest.mark.parametrize("law", LAWS)
def test_fedasync_is_its_definition(law):
    discount, s = LAWS[law]
    course, data = arrivals(1, 100, 1, 5), Clients(1)
    policy = RoundPolicy(buffer=1, max_staleness=5, discount=discount)
    server = Server(start_of(1), FedAsync(0.7), N, lr=0.1, policy=policy)
    assert follow(server, data, course, fedasync(data, start_of(1).astype(np.float64), 0.1, course, 0.7, s)) < CLOSE
    assert not server._backend.snapshot.past  # the difference is to the present x


def test_fedvarp_with_a_buffer_is_ca2fl():
    course, data = arrivals(2, 100, 5, 4, repeats=False, steps=3), Clients(2)
    server = Server(start_of(2), FedVARP(), N, lr=0.1, policy=RoundPolicy(buffer=5, max_staleness=4))
    assert follow(server, data, course, ca2fl(data, start_of(2).astype(np.float64), 0.1, course)) < CLOSE


def test_two_clients_by_hand():
    server = Server(numbers(0), "FedAvg", 2, lr=1.0, policy=RoundPolicy(buffer=2, max_staleness=3, discount=0.5))
    sent = [Update(client, numbers(4 + 4 * client), 1, round=0) for client in (0, 1)]
    for wrong in ({"kind": "modell"}, {"count": 0}, {"weight": -1.0}):
        with pytest.raises(FedcoreError, match=next(iter(wrong))):
            server.push([*sent, sent[0], sent[1]._replace(**wrong)])
    assert server.push(sent[:1]) == []
    [first] = server.push(sent[1:])
    assert server.x == 6
    # Client 0 is faster: it sends twice from x = 6, and client 1 is late by one round.
    [second, third] = server.push(
        [
            Update(0, numbers(8), 1, round=1),
            Update(0, numbers(5), 1, round=1),
            Update(1, numbers(4), 1, round=0),
            Update(0, numbers(7), 1, round=1),
        ]
    )
    assert (second.accepted, second.ages.tolist()) == ((0, 0), [0, 0])
    assert (third.accepted, third.ages.tolist()) == ((1, 0), [2, 1])
    np.testing.assert_allclose(server.x, 6.5 + (4 * 3**-0.5 + 1 * 2**-0.5) / 2, rtol=1e-7)
    np.testing.assert_allclose(third.factors, [3**-0.5, 2**-0.5])
    np.testing.assert_allclose(third.norms, [4 * 3**-0.5, 2**-0.5], rtol=1e-7)
    assert (first.weights == 1).all()
    assert (third.weights == 1).all()

    server = Server(
        numbers(0), FedAsync(0.5), 2, lr=1.0, policy=RoundPolicy(buffer=1, max_staleness=9, discount=(1, 1))
    )
    server.push([Update(0, numbers(4), 1, round=0)])
    assert server.x == 2
    server.push([Update(1, numbers(8), 1, round=0)])  # age 1: no discount
    assert server.x == 5
    server.push([Update(1, numbers(9), 1, round=0)])  # age 2: 1 / (1 + 1)
    assert server.x == 6


def test_a_batch_is_read_at_once_and_counts_like_single_updates():
    """Also with a NaN in it, updates that are too old, and the edge's own client twice."""
    policy = RoundPolicy(buffer=50, max_staleness=2, discount=0.5)
    rng = np.random.default_rng(0)
    servers = [Server(np.zeros(70, np.float32), FedAvg("uniform"), 5, lr=0.1, policy=policy) for _ in range(3)]
    for _ in range(4):
        number = servers[0].round_number
        ages = rng.integers(0, 4, 80)
        updates = [
            Update(i % 5, rng.normal(size=70).astype(np.float32), 1 + i % 3, round=int(max(0, number - age)))
            for i, age in enumerate(ages)
        ]
        updates[7].value[3] = np.nan
        for update in updates:
            servers[0].push([update])
        servers[1].push(updates)
        servers[2].push(updates[:33])
        servers[2].push(updates[33:])
        rejected = [server.open_buffer().rejected for server in servers]
        assert rejected[0] == rejected[1] == rejected[2]
        accepted = [server.open_buffer().clients for server in servers]
        assert accepted[0] == accepted[1] == accepted[2]
        for server in servers:
            server.open_buffer().finish()
        assert np.array_equal(servers[0].x, servers[1].x)
        assert np.array_equal(servers[0].x, servers[2].x)


def test_a_rejected_update_leaves_the_others_of_its_client(tmp_path):
    server = Server(numbers(0), "FedAvg", 2, lr=1.0, policy=POLICY, storage=Storage(tmp_path / "s", journal=True))
    assert server.push([Update(0, numbers(value), 1, round=0) for value in (1, np.nan, 3)]) == []
    opened = server.open_buffer()
    assert (opened.clients, [client for client, _ in opened.rejected]) == ((0, 0), [0])
    server.close()
    with Server.load(tmp_path / "s") as server:
        assert server.policy == POLICY
        opened = server.open_buffer()
        assert (opened.clients, opened.rejected) == ((0, 0), ())
        server.push([Update(1, numbers(2), 1, round=0), Update(0, numbers(6), 1, round=0)])
        assert server.x == 3


def test_what_a_buffer_rejects():
    def refused(algorithm, *updates, **policy):
        server = Server(np.zeros(2, np.float32), algorithm, 3, lr=0.1, policy=RoundPolicy(buffer=9, **policy))
        for _ in range(3):
            server.push([Update(0, numbers(1, 1), 1, round=server.round_number)])
            server.open_buffer().finish()
        server.push(updates)
        return [reason.split(":")[0] for _, reason in server.open_buffer().rejected]

    y = numbers(1, 2)
    assert refused("FedAvg", Update(0, y, 1, round=0), Update(1, y, 1), max_staleness=2) == ["round=0", "round=None"]
    assert refused("FedAvg", Update(0, y, 1, round=4), max_staleness=2) == ["round=4"]
    assert refused("FedVARP", Update(0, y, 1, round=3), Update(0, y, 1, round=3)) == ["update"]
    assert refused("SCAFFOLD", Update(0, y, 1, round=2), max_staleness=2) == ["round=2"]
    assert refused("FedAsync", Update(0, y, 1, kind="delta", round=2), max_staleness=2) == ["kind='delta'"]
    assert refused("FedAsync", Update(0, y, 1, kind="delta", round=3), Update(1, y, 1, round=1), max_staleness=2) == []
    assert refused("FedAsync", Update(1, y, 1, round=0), max_staleness=2) == ["round=0"]


def test_options_that_contradict_a_buffer_are_named():
    for wrong in (dict(buffer=0), dict(buffer=2, min_clients=3)):
        with pytest.raises(RangeError):
            RoundPolicy(**wrong)
    for wrong in (-1, (1,), (0, 1), (1, -1), "hinge"):
        with pytest.raises((RangeError, TypeError)):
            RoundPolicy(discount=wrong)
    with pytest.raises(RangeError, match="buffer"):
        Server(numbers(0), clients=3, lr=0.1).push([])


def test_only_the_deadline_depends_on_the_clock(monkeypatch):
    class Clock:
        now = 1e6

    monkeypatch.setattr(report, "monotonic", lambda: Clock.now)
    server = Server(numbers(0), clients=2, lr=0.1, policy=RoundPolicy(buffer=3, deadline=10, min_clients=2))
    server.broadcast([0])  # those asked have no part in it
    assert server.push([Update(0, numbers(2), 1, round=0)]) == []
    opened = server.open_buffer()
    Clock.now += 100
    assert (opened.may_close(), opened.wait()) == (None, None)  # one update is too few
    assert server.push([]) == []
    Clock.now -= 95
    assert server.push([Update(0, numbers(4), 1, round=0)]) == []
    assert (opened.may_close(), opened.wait()) == (None, 5)
    Clock.now += 5
    [closed] = server.push([])
    assert (closed.closed, closed.accepted, closed.missing) == ("deadline", (0, 0), ())
    assert server.x == 3
    server.add_clients("new")  # no round is open between two buffers
    server.callbacks = [lambda report: server.add_clients("newer")]
    [closed] = server.push([Update("new", numbers(4), 1, round=1) for _ in range(3)])
    assert closed.closed == "buffer"
    assert list(server.clients) == [0, 1, "new", "newer"]


def test_a_deadline_does_not_close_a_buffer_whose_rule_leaves_too_few(monkeypatch):
    now = [1e6]
    monkeypatch.setattr(report, "monotonic", lambda: now[0])
    policy = RoundPolicy(buffer=9, deadline=10, min_clients=3)
    server = Server(numbers(0), clients=5, lr=0.1, policy=policy, aggregation=[rules.RejectLong(5)])
    sent = [Update(client, numbers(value), 1, round=0) for client, value in enumerate((1, 2, 1e5, 1))]
    assert server.push(sent[:3]) == []
    now[0] += 11
    [closed] = server.push(sent[3:4])  # of the first three, the rule leaves two
    assert (closed.closed, closed.accepted, [client for client, _ in closed.rejected]) == ("deadline", (0, 1, 3), [2])


def test_threads_push_into_one_buffer():
    server = Server(numbers(0), FedAvg("uniform"), 4, lr=0.1, policy=RoundPolicy(buffer=7, max_staleness=100))
    reports = []
    server.callbacks = [reports.append]

    def push(client):
        for _ in range(35):
            server.push([Update(client, numbers(0), 1, round=0)])

    in_threads(push, range(4))
    assert [(one.round, len(one.accepted)) for one in reports] == [(t, 7) for t in range(20)]
    assert sorted(client for one in reports for client in one.accepted) == sorted([*range(4)] * 35)


def test_a_broadcast_beside_pushes_has_the_x_of_its_round(monkeypatch):
    policy = RoundPolicy(buffer=1, max_staleness=2**20)
    server = Server(np.zeros(70, np.float32), FedAvg("uniform"), 4, lr=0.1, policy=policy)
    delta, thread = np.ones(70, np.float32), None
    read = server._backend.sent_vectors

    def pushed_meanwhile(*clients):
        nonlocal thread
        vectors = read(*clients)
        thread = Thread(target=server.push, args=[[Update(0, delta, 1, kind="delta", round=0)]])
        thread.start()
        thread.join(0.02)  # waits for the broadcast, unless nothing stops it
        return vectors

    monkeypatch.setattr(server._backend, "sent_vectors", pushed_meanwhile)
    for t in range(3):
        sent = server.broadcast([1])
        thread.join()
        assert (sent.round, sent.x[0], server.x[0]) == (t, t, t + 1)


def made(path=None):
    storage = None if path is None else Storage(path, journal=True, audit=True)
    return Server(np.zeros(n, np.float32), FedAvg("uniform"), 3, lr=0.1, policy=POLICY, storage=storage)


def test_a_full_buffer_is_closed_after_a_crash(tmp_path):
    server, straight = made(tmp_path / "s"), made()
    go_on(straight, 1)
    server.open_buffer().add_batch([nth(server, j) for j in range(4)])
    server.close()
    with Server.load(tmp_path / "s") as server:
        [closed] = server.push([])
        assert (closed.closed, closed.accepted) == ("buffer", (0, 2, 1, 0))
        assert np.array_equal(server.x, straight.x)


def test_an_erased_client_has_no_update_in_the_journal(tmp_path):
    server = made(tmp_path / "s")
    server.push([nth(server, j) for j in range(3)])
    assert open_updates(tmp_path / "s", state_of(tmp_path / "s")) == [0, 2, 1]
    server.open_buffer().abort(keep=True)
    server.remove_client(2, erase=True)
    assert server.open_buffer().clients == (0, 1)
    server.close()


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is POSIX")
@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.endurance)])
def test_a_buffer_survives_kills_with_the_same_bits(kills, tmp_path):
    straight, moments, rounds, count, pushed = made(), random.Random(0), 3 * kills, 0, []
    made(tmp_path / "s").close()
    while True:
        command = [sys.executable, "-m", "tests.server.asynchronous", str(tmp_path / "s"), str(rounds)]
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ)
        assert child.stdout.readline() == "loaded\n"
        if count < kills:
            pushed += [int(child.stdout.readline() or -1) for _ in range(moments.randrange(11))]
            time.sleep(moments.uniform(0, 0.004))
            child.send_signal(signal.SIGKILL)
        pushed += [int(line) for line in child.stdout.read().split()]
        child.stdout.close()
        child.wait()
        count += 1
        with Server.load(tmp_path / "s") as server:
            assert next_of(server) > max(pushed, default=-1)  # all pushed updates are there
            server.open_buffer().abort(keep=True)
            if server.round_number == rounds:
                break
    assert len(set(pushed)) == len(pushed)
    go_on(straight, rounds)
    with Server.load(tmp_path / "s") as server:
        log, keeping = server.audit_log(), everything(server, range(3))
        assert [v for name, v in keeping[0].items()] == [v for name, v in everything(straight, range(3))[0].items()]
    # The audit log has the order, too: a replay of it gives the same bits.
    again = made()
    for document in log:
        for j, update in enumerate(document["updates"], 4 * document["round"]):
            one = nth(again, j)
            assert (update["client"], update["start"]) == (one.client, one.round)
            again.push([one])
    assert np.array_equal(again.x, straight.x)


ROBUST = {
    "median": "median",
    "Krum": "krum",
    "buckets of mixed": [rules.NearestNeighborMixing(1), rules.Bucketing(2), rules.GeometricMedian()],
    "long ones clipped": [rules.ClipToMedian(), rules.TrimmedMean(1)],
    "one of each client": [rules.CountOnce(), rules.Krum(1)],
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ["FedAvg", "FedVARP"])
@pytest.mark.parametrize("shards", [None, 3])
@pytest.mark.parametrize("rule", ROBUST.values(), ids=ROBUST)
def test_a_robust_rule_sees_the_updates_of_a_buffer_as_those_of_as_many_clients(rule, shards, method, tmp_path):
    """In the order of arrival, late ones too: a plain round of other clients has the same bits, also after a crash."""
    clients = [4, 0, 3, 1, 2] if rule == ROBUST["one of each client"] else [4, 1, 1, 0, 1]
    has_rows, bound, n = method == "FedVARP", Limits(max_norm=1e6), 40_000 if shards else 40
    clients = range(5) if has_rows else clients
    options = dict(lr=0.1, aggregation=rule, limits=bound)
    policies = [RoundPolicy(max_staleness=2, buffer=5), RoundPolicy(max_staleness=2)]
    options_of_buffer = dict(policy=policies[0], compute=Compute(shards=shards), **options)
    buffers = [
        Server(np.zeros(n, np.float32), method, 6, storage=storage, **options_of_buffer)
        for storage in (None, Storage(tmp_path / "s", journal=True))
    ]
    plain = Server(np.zeros(n, np.float32), method, 6 if has_rows else 15, **options, policy=policies[1])
    for t in range(3):
        rng = np.random.default_rng(t)
        vectors = [rng.normal(1 + 30 * (i == 1), 1, n).astype(np.float32) for i in range(5)]
        starts = [t] * 5 if has_rows else [t, t, max(0, t - 1), max(0, t - 2), t]
        sent = [Update(*some, 2, round=at) for *some, at in zip(clients, vectors, starts, strict=True)]
        [pushed] = buffers[0].push(sent)
        reports = []
        for update in sent:
            buffers[1].close()
            buffers[1] = Server.load(tmp_path / "s")
            reports += buffers[1].push([update])
        due = plain.round([one._replace(client=i) for i, one in enumerate(sent, start=0 if has_rows else 5 * t)])
        assert pushed.accepted == reports[0].accepted == tuple(update.client for update in sent)
        assert (pushed.norms.tolist(), pushed.ages.tolist()) == (due.norms.tolist(), due.ages.tolist())
        assert buffers[0].x.tobytes() == plain.x.tobytes()
        assert buffers[1].x.tobytes() == plain.x.tobytes()
    for server in buffers:
        server.close()


@pytest.mark.parametrize(
    "policy", [dict(buffer=4), dict(buffer=9, deadline=9), dict(buffer=9, deadline=9, min_clients=4)]
)
def test_a_buffer_that_may_close_with_too_few_updates_for_its_rule_is_refused(policy):
    good, server = RoundPolicy(buffer=5), partial(Server, numbers(0), clients=3, lr=0.1)
    for make in (
        server,
        lambda policy, aggregation: server(policy=policy).change(aggregation=aggregation),
        lambda policy, aggregation: server(aggregation=aggregation).change(policy=policy),
    ):
        make(policy=good, aggregation="krum")
        with pytest.raises(RangeError, match="needs at least 5 updates"):
            make(policy=RoundPolicy(**policy), aggregation="krum")


def test_a_buffer_with_too_few_clients_for_its_rule_waits_for_more():
    policy, chain = RoundPolicy(buffer=6, max_staleness=9), [rules.CountOnce(), rules.Krum(1)]
    server = Server(numbers(0), FedAvg("uniform"), 5, lr=0.1, policy=policy, aggregation=chain)
    sent = [Update(client, numbers(client), 1, round=0) for client in range(6)]
    assert len(server.push(sent[:5])) == 1  # all five clients
    server.remove_client(4)
    assert server.push([update._replace(round=1) for update in sent[:4]]) == []  # Krum(1) needs five
    server.open_buffer().abort()
    server.add_clients([5])
    (closed,) = server.push([sent[client]._replace(round=1) for client in (0, 1, 2, 3, 5)])
    assert closed.accepted == (0, 1, 2, 3, 5)


def test_an_update_of_a_removed_client_is_listed():
    server = Server(numbers(0), FedAvg("uniform"), 3, lr=0.1, policy=RoundPolicy(buffer=2, max_staleness=2))
    server.remove_client(1)
    [report] = server.push([Update(client, numbers(2), 1, round=0) for client in range(3)])
    assert report.accepted == (0, 2)
    assert report.rejected == ((1, "client: not registered"),)


@pytest.mark.parametrize(("clients", "newcomers"), [(2, [5, 6]), ({0: 1, 1: 1}, {5: 2, 6: 3})])
def test_a_newcomer_joins_the_round_of_its_update(clients, newcomers):
    """Client 5 joins with the second round of a call, and the third round goes on without it as a newcomer."""
    server = Server(numbers(0), FedAvg("uniform"), clients, lr=0.1, policy=RoundPolicy(buffer=2, max_staleness=9))
    assert server.push([Update(0, numbers(2), 1, round=0)], newcomers=newcomers) == []
    given = iter(newcomers) if isinstance(newcomers, list) else newcomers
    reports = server.push([Update(client, numbers(2), 1, round=0) for client in (1, 5, 0, 6, 1)], newcomers=given)
    assert [one.accepted for one in reports] == [(0, 1), (5, 0), (6, 1)]


def test_an_error_of_push_tells_what_was_read():
    server = Server(numbers(0), FedAvg(), 2, lr=0.1, policy=RoundPolicy(buffer=2, max_staleness=9))
    weights = [1, 1, 1e-40, 1e-40, 1]
    with pytest.raises(RangeError) as caught:
        server.push([Update(i % 2, numbers(2), 1, round=0, weight=weight) for i, weight in enumerate(weights)])
    assert caught.value.__notes__ == ["push: updates read: 4 of 5; rounds closed: 1"]
    assert server.round_number == 1


@pytest.mark.parametrize("last", [[], [rules.TrimmedMean(1)]])
def test_updates_that_a_median_rejects_do_not_fill_a_buffer(last):
    policy = RoundPolicy(buffer=4, min_clients=4, max_staleness=2)
    server = Server(
        numbers(0, 0), FedAvg("uniform"), 5, lr=0.1, aggregation=[rules.RejectLong(2), *last], policy=policy
    )
    [report] = server.push([Update(i, numbers(1, 100 * (i == 1)), 1, round=0) for i in range(5)])
    assert (report.accepted, report.closed) == ((0, 2, 3, 4), "buffer")


@pytest.mark.parametrize("chain", ["open", [rules.CountOnce()]])
def test_a_client_counts_once_in_a_buffer(chain, tmp_path):
    """One by one, in a list, after a copy, and after a crash; with fewer clients than K, as many as there are."""
    policy = RoundPolicy(buffer=5, max_staleness=9)
    options = dict(lr=0.1, policy=policy, aggregation=chain)
    single, listed = (Server(numbers(0, 0), FedAvg("uniform"), 3, **options) for _ in range(2))
    kept = Server(numbers(0, 0), FedAvg("uniform"), 3, **options, storage=Storage(tmp_path / "s", journal=True))
    updates = [Update(client, numbers(1, client), 1, round=0) for client in (0, 0, 1, 0, 2, 2, 0, 1)]
    reports = [report for one in updates for report in single.push([one])]
    assert [report.accepted for report in reports] == [(0, 1, 2), (2, 0, 1)]
    assert [[client for client, _ in report.rejected] for report in reports] == [[0, 0], []]
    assert [report.closed for report in reports] == ["buffer"] * 2
    listed.push(updates[:2])
    listed, copied = copy.deepcopy(listed), listed
    for server in (copied, listed):
        assert [report.accepted for report in server.push(updates[2:])] == [(0, 1, 2), (2, 0, 1)]
    assert np.array_equal(copied.x, listed.x)
    for one in updates:
        kept.push([one])
        kept.close()
        kept = Server.load(tmp_path / "s")
    assert np.array_equal(single.x, listed.x)
    assert np.array_equal(single.x, kept.x)
    kept.close()


def test_a_buffer_of_which_a_client_fills_a_part_continues_with_count_once(tmp_path):
    policy = RoundPolicy(buffer=3, min_clients=3, max_staleness=9)
    server = Server(numbers(0), "FedAvg", 4, lr=0.1, policy=policy, storage=Storage(tmp_path / "s", journal=True))
    server.push([Update(0, numbers(value), 1, round=0) for value in (3, 5)])
    server.close()
    with Server.load(tmp_path / "s", aggregation=[rules.CountOnce()]) as server:
        opened = server.open_buffer()
        assert (opened.clients, [client for client, _ in opened.rejected]) == ((0,), [0])
        [report] = server.push([Update(1, numbers(3), 1, round=0), Update(2, numbers(3), 1, round=0)])
        assert (report.accepted, server.x) == ((0, 1, 2), 3)
        for client in (1, 2, 3):
            server.remove_client(client)
        assert server.push([Update(0, numbers(0), 1, round=1)]) == []  # below min_clients


def test_one_fast_liar_of_ten_moves_an_open_buffer_little():
    rng, policy = np.random.default_rng(0), RoundPolicy(buffer=10, max_staleness=8, discount=0.5)
    server = Server(np.zeros(20, np.float32), "FedAvg", clients=10, lr=0.1, policy=policy, aggregation="open")
    for _ in range(40):
        step = np.float32(0.2) * (1 - server.x)
        turn = [Update(c, step + np.float32(rng.normal(0, 0.02, 20)), 1, kind="delta") for c in range(9)]
        turn += [Update(9, -step, 1, kind="delta")] * 15
        for i in rng.permutation(len(turn)):
            server.push([turn[i]._replace(round=server.round_number)])
    assert np.abs(server.x - 1).max() < 0.1


def test_count_once_does_nothing_in_synchronous_rounds():
    servers = [Server(numbers(0, 0), "FedAvg", 3, lr=0.1, aggregation=chain) for chain in (None, [rules.CountOnce()])]
    for server in servers:
        server.round([Update(client, numbers(1, client), 1) for client in (0, 0, 2)])
    assert np.array_equal(servers[0].x, servers[1].x)


def test_the_rejections_of_an_open_buffer_are_bounded(caplog):
    """Unknown ids of any length, and a client that sends without end; the first rejection of each client is listed."""
    server = Server(numbers(0), "FedAvg", 2000, lr=0.1, policy=RoundPolicy(buffer=9000))
    strangers = [f"{i}" * 100_000 for i in range(3)] + [10**9000, b"x" * 10**6, ["x"] * 10**6]
    server.push([Update(one, numbers(1), 1, round=0) for one in [*strangers, *range(10_000, 13_000)]])
    server.push([Update(7, numbers(np.nan), 1, round=0)] * 3000)
    server.push([Update(client, numbers(np.nan), 1, round=0) for client in range(2000)])
    opened = server.open_buffer()
    opened.reject(8, "x" * 10_000)
    listed = opened.rejected
    assert {client for client, _ in listed} >= set(range(2000))
    assert len(listed) <= 3000
    assert len(str(listed)) < 500_000
    assert len(caplog.records) == 1
    assert all(len(reason) <= 500 for _, reason in listed)


def test_a_new_rate_ends_the_rounds_of_the_old_one():
    late = RoundPolicy(max_staleness=4)
    server = Server(numbers(0), "FedVARP", 2, lr=0.1, policy=late)
    server.round([Update(0, numbers(1), 1)])
    for change in ({"policy": RoundPolicy()}, {"lr": 0.05}, {"policy": late}):
        server.change(**change)
    assert server.round([Update(1, numbers(1), 1, round=0)]).accepted == ()


@pytest.mark.parametrize("pushed", [1, 3])
def test_a_copy_goes_on_with_the_open_buffer(pushed):
    policy = RoundPolicy(buffer=2, max_staleness=2)
    server = Server(np.zeros(3, np.float32), "FedVARP", clients=4, lr=0.1, policy=policy)
    updates = [Update(client, np.full(3, client + 1, np.float32), 1, round=0) for client in range(4)]
    server.push(updates[:pushed])
    copied = copy.deepcopy(server)
    for one in (server, copied):
        assert one.open_buffer().clients == server.open_buffer().clients
    for one in (copied, server):
        one.push(updates[pushed:])
        assert one.round_number == 2
    np.testing.assert_array_equal(copied.x, server.x)


def test_a_copy_has_no_open_round():
    server = Server(np.zeros(3, np.float32), "MIFA", clients=2, lr=0.1)
    with server.open_round() as round:
        round.add(0, np.ones(3, np.float32), steps=1)
        copied = copy.deepcopy(server)
        copied.round([Update(1, np.ones(3, np.float32), 1)])
    assert round.report.accepted == (0,)
    assert (copied.store.round_of(0), copied.store.round_of(1)) == (None, 0)


def test_late_models_are_rejected_if_the_server_does_not_keep_earlier_controls():
    server = Server(np.zeros(2, np.float32), "FedDyn", clients=4, lr=0.1, policy=RoundPolicy(buffer=2, max_staleness=2))
    assert len(server.push([Update(i, np.ones(2, np.float32), steps=1, round=0) for i in range(4)])) == 1
