"""When a round may close: hand-made rounds with a clock that the test moves."""

import numpy as np
import pytest

from fedcore import Compute, EdgeAggregator, RoundPolicy, Server, Storage, Update
from fedcore.errors import RangeError, RoundError, UnknownClientError
from fedcore.server import report
from tests.kit import flat

n = 20_000  # two shards
KINDS = {"one server": {}, "shards": {"shards": 2}, "journal": {"journal": True}}


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1e6

    monkeypatch.setattr(report, "monotonic", lambda: Clock.now)
    return Clock


@pytest.fixture(params=KINDS)
def make(request, tmp_path):
    servers = []

    def make(policy, clients=5, **options):
        how = dict(KINDS[request.param])
        if "journal" in how:
            how["path"] = tmp_path / f"s{len(servers)}"
        servers.append(Server(of(0), "FedAvg", clients, lr=0.1, policy=policy, **flat(**how), **options))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def of(value):
    return np.full(n, value, np.float32)


def add(round, *clients):
    for client in clients:
        assert round.add(client, of(client), steps=1)


def state(round):
    return round.may_close(), round.wait()


def test_a_round_waits_for_its_share_its_grace_and_its_deadline(make, clock):
    server = make(RoundPolicy(min_clients=2, min_share=0.6, grace=10, deadline=100))
    server.broadcast([0, 1, 2, 3, 4])
    round = server.open_round()
    assert state(round) == (None, None)  # time does not help before there are two clients
    add(round, 0)
    clock.now += 200
    assert state(round) == (None, None)
    clock.now -= 170  # 30 s after the start
    add(round, 1)
    assert state(round) == (None, 70)
    add(round, 2)  # 3 of 5 are 60 %
    clock.now += 4
    assert state(round) == (None, 6)
    clock.now += 6
    assert state(round) == ("min_share", 0)
    assert not round.add(3, of(np.nan), steps=1)
    assert state(round) == ("min_share", 0)
    add(round, 4)  # 3 was rejected, so all have answered
    assert state(round) == ("all clients", 0)
    finished = round.finish()
    assert (finished.closed, finished.missing, finished.accepted) == ("all clients", (), (0, 1, 2, 4))
    for call in (round.may_close, round.wait):
        with pytest.raises(RoundError):
            call()


def test_the_deadline_comes_before_the_end_of_the_grace(make, clock):
    server = make(RoundPolicy(min_share=0.5, grace=50, deadline=60))
    with server.open_round(expected=[4, 1, 3]) as round:
        server.broadcast([0])  # expected clients stay
        clock.now += 30
        add(round, 0, 1)
        assert state(round) == (None, 30)
        clock.now += 5
        add(round, 4)  # the second one that was asked
        assert state(round) == (None, 25)
        clock.now += 49
        assert state(round) == ("deadline", 0)
        clock.now += 1
        assert state(round) == ("min_share", 0)
    assert (round.report.closed, round.report.missing) == ("min_share", (3,))


def test_a_round_without_asked_clients_closes_by_its_deadline(make, clock):
    server = make(RoundPolicy(deadline=5))
    round = server.open_round()
    add(round, 0, 1, 2, 3, 4)
    clock.now += 3
    assert state(round) == (None, 2)
    clock.now += 2
    assert state(round) == ("deadline", 0)
    assert (round.finish().closed, round.report.missing) == ("deadline", ())


def test_too_few_clients_leave_the_round_open(make):
    server = make(RoundPolicy(min_clients=3))
    server.broadcast(range(5))
    round = server.open_round()
    add(round, 0, 2)
    with pytest.raises(RoundError, match=r"min_clients=3: .* 2 accepted clients, so 1 are missing"):
        round.finish()
    assert round.is_open
    assert server.round_number == 0
    add(round, 4)
    assert (round.finish().closed, round.report.missing) == (None, (1, 3))
    assert (server.x == 2).all()
    with pytest.raises(RoundError, match="min_clients"), server.open_round() as round:
        add(round, 0)
    assert not round.is_open
    server.open_round().abort()  # a journal has kept the update
    updates = [Update(client, of(1), 1) for client in range(3)]
    with pytest.raises(RoundError, match="min_clients"):
        server.round(updates[:2])
    server.open_round().abort()
    assert server.round(updates).accepted == (0, 1, 2)


def test_clients_count_once_their_updates_are_decided(make):
    """A median of few norms decides at the end, so a round that had three clients may then have two."""
    server = make(RoundPolicy(min_clients=3), aggregation=["RejectLong"])
    round = server.open_round()
    for client, length in ((1, 1), (2, 1000)):
        round.add(client, of(length), steps=1)
    with pytest.raises(RoundError, match="1 are missing"):
        round.finish()
    assert round.rejected == ()
    round.add(0, of(1), steps=1)
    assert len(round.clients) == 3
    with pytest.raises(RoundError, match="1 are missing"):
        round.finish()
    assert round.is_open
    assert [client for client, _ in round.rejected] == [2]
    round.add(3, of(1), steps=1)
    assert round.finish().accepted == (1, 0, 3)


def test_a_rejection_starts_the_grace_again(make, clock):
    server = make(RoundPolicy(min_share=0.5, grace=10), aggregation=["RejectLong"], clients=14)
    round = server.open_round(expected=range(14))
    for client in range(7):
        round.add(client, of(1 + 999 * (client < 2)), steps=1)
    clock.now += 5
    assert state(round) == (None, 5)
    round.add(7, of(1), steps=1)  # the eighth decides on all, and rejects two
    assert len(round.clients) == 6
    assert state(round) == (None, None)
    clock.now += 100
    add(round, 9)
    clock.now += 2
    assert state(round) == (None, 8)
    round.abort()


def test_lists_and_partial_sums_start_the_grace_too(clock):
    how = dict(lr=0.1, policy=RoundPolicy(min_share=0.5, grace=10))
    updates = [Update(client, of(client), 1) for client in range(2)]
    round = Server(of(0), "FedAvg", 4, **how).open_round(expected=range(4))
    round.add_batch(updates)
    clock.now += 4
    assert state(round) == (None, 6)
    partial = EdgeAggregator(of(0), "FedAvg", range(2), lr=0.1).fold(of(0), updates, round=0)
    server = Server(of(0), "FedAvg", 4, compute=Compute(accumulator="exact"), **how)
    round = server.open_round(expected=range(3))
    round.add_partial_sum(partial, "edge")
    clock.now += 4
    assert state(round) == (None, 6)
    round.reject("edge", "unreadable")
    round.reject(2, "unreadable")
    assert round.may_close() == "all clients"
    assert (round.finish().accepted, round.report.missing) == ((0, 1), ())


def test_a_resumed_round_starts_its_deadline_again(clock, tmp_path):
    policy = RoundPolicy(deadline=100, min_share=0.4, grace=5)
    server = Server(of(0), "FedAvg", 5, lr=0.1, storage=Storage(tmp_path, journal=True), policy=policy)
    add(server.open_round(expected=range(5)), 0, 1)
    server.close()
    clock.now += 99
    server = Server.load(tmp_path)
    assert server.policy == policy
    round = server.open_round()
    assert state(round) == (None, 100)
    server.broadcast(range(5))
    assert state(round) == (None, 5)
    server.close()


@pytest.mark.parametrize("shards", [1, 2])
def test_the_policy_is_saved_and_changed(shards, tmp_path, caplog):
    first, second, third = RoundPolicy(deadline=9), RoundPolicy(min_clients=1, over_selection=1.5), RoundPolicy()
    storage = dict(path=tmp_path / "s", shards=shards)
    Server(of(0), "FedAvg", 5, lr=0.1, policy=first, **flat(**storage)).close()
    with Server.load(tmp_path / "s") as server:
        assert server.policy == first
        server.change(policy=second)
    with Server.load(tmp_path / "s") as server:
        assert server.policy == second
        with server.open_round() as round:
            add(round, 0)
        assert round.report.changed == {"policy": {"min_clients": 1, "over_selection": 1.5}}
        with pytest.raises(RangeError, match="policy"):
            server.change(policy=5)
    assert not caplog.records
    with Server.load(tmp_path / "s", policy=third) as server:
        assert server.policy == third
        assert "policy" in caplog.text


@pytest.mark.parametrize("late", [0, 1])
def test_an_update_after_the_end_counts_in_the_next_round_if_it_may_be_late(late):
    """Two of three over-selected clients are enough; the third one sends its update after the end."""
    policy = RoundPolicy(min_clients=2, min_share=0, over_selection=1.5, max_staleness=late)
    server = Server(of(0), "FedAvg", 3, lr=0.1, policy=policy)
    server.broadcast(range(policy.asked(2)))
    with server.open_round() as round:
        add(round, 0)
        assert round.may_close() is None
        add(round, 1)
        assert round.may_close() == "min_share"
    assert (round.report.closed, round.report.missing) == ("min_share", (2,))
    server.broadcast([0, 1])
    with server.open_round() as round:
        assert round.add(2, of(4), steps=1, round=0) == bool(late)
        add(round, 0, 1)
    assert round.report.accepted == (2, 0, 1)[1 - late :]
    assert len(round.report.rejected) == 1 - late


def test_rounds_in_one_call_report_the_missing_clients():
    server = Server(of(0), "FedAvg", ["a", "b", "c"], lr=0.1)
    server.broadcast(["c", "b", "a"])
    report = server.round([Update("b", of(1), 1)])
    assert (report.closed, report.missing) == (None, ("c", "a"))
    report = server.round([Update("b", of(1), 1)])  # no client was asked for this round
    assert (report.closed, report.missing) == (None, ())
    server.broadcast(["b"])
    assert server.round([Update("b", of(1), 1)]).closed == "all clients"
    server.broadcast(["b"])
    assert server.round(iter([Update("b", of(1), 1)])).closed == "all clients"
    with pytest.raises(UnknownClientError):
        server.open_round(expected=["d"])
    with server.open_round(newcomers=["d"], expected=["d"]) as round:
        assert round.may_close() is None
        round.add("d", of(1), steps=1)
        assert round.may_close() == "all clients"


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("min_clients", (0, 10), (-1, 1.5, "2")),
        ("min_share", (0, 1), (-0.1, 1.1, float("nan"))),
        ("deadline", (1e-3, 1e9), (0, -1, float("inf"))),
        ("grace", (0, 1e9), (-1, float("inf"))),
        ("over_selection", (1, 3), (0.99, float("inf"))),
    ],
)
def test_values_of_a_policy_are_checked(name, inside, outside):
    for value in inside:
        assert getattr(RoundPolicy(**{name: value}), name) == value
    for value in outside:
        with pytest.raises(RangeError, match=name):
            RoundPolicy(**{name: value})


def test_over_selection_rounds_up_without_errors_of_rounding():
    assert [RoundPolicy(over_selection=f).asked(k) for f, k in ((1.1, 10), (1.3, 11), (1, 7), (7 / 3, 3))] == [
        *(11, 15, 7, 7)
    ]
