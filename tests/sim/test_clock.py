"""The virtual clock: durations, the end of synchronous rounds, and the order of arrivals."""

import numpy as np
import pytest

from fedcore.errors import FedcoreError, MissingDataError, RangeError
from fedcore.runtime import generator
from fedcore.sampling import without_replacement
from fedcore.sim import clock
from fedcore.sim.clock import Arrivals, Clock, Durations
from fedcore.sim.participation import Bernoulli, Recorded, Schedule, Trace, Uniform


@pytest.fixture
def durations(tmp_path):
    """Five clients with 4, 1, 3, 3 and 2 seconds; client 0 needs 9 seconds every second time."""
    path = tmp_path / "durations.csv"
    path.write_text("client,seconds\n# a comment\n0,4\n1,1\n2,3\n3,3\n4,2\n0,9\n")
    return Durations(5, trace=path)


def closed(durations, round=0, **options):
    active, seconds = Clock(durations, **options).closing(round)
    return active.clients.tolist(), seconds


def test_durations_by_law_and_by_file(durations):
    a = generator(7, "clock: speeds").standard_normal(3)
    b = generator(7, "clock: works", round=5).standard_normal(3)
    law = Durations(3, median=10.0, spread=0.5, jitter=0.25, seed=7)
    np.testing.assert_allclose(law.seconds(5), 10 * np.exp(0.5 * a + 0.25 * b), rtol=1e-12)
    assert [durations.seconds(n).tolist() for n in (0, 1, 2)] == [[4, 1, 3, 3, 2], [9, 1, 3, 3, 2], [4, 1, 3, 3, 2]]


@pytest.mark.parametrize(
    ("policy", "clients", "seconds"),
    [
        ({}, [0, 1, 2, 3, 4], 4),
        ({"deadline": 3.0}, [1, 2, 3, 4], 3),
        ({"deadline": 0.5}, [], 0.5),
        ({"deadline": 50.0}, [0, 1, 2, 3, 4], 4),
        ({"min_share": 0.6}, [1, 2, 4], 3),  # of the equal times 3, client 2 is first and closes the round
        ({"min_share": 0.6, "grace": 0.5}, [1, 2, 3, 4], 3.5),
        ({"min_share": 0.2, "grace": 1.5}, [1, 4], 2.5),
        ({"min_share": 0.6, "grace": 9.0}, [0, 1, 2, 3, 4], 4),
        ({"min_share": 0.6, "grace": 9.0, "deadline": 2.0}, [1, 4], 2),
    ],
)
def test_a_round_closes_by_its_policy(durations, policy, clients, seconds):
    assert closed(durations, policy=policy) == (clients, seconds)
    assert Clock(durations, policy=policy).active(0).clients.tolist() == clients


def test_over_selection_keeps_the_first(durations):
    policy = {"over_selection": 1.5}
    asked = np.sort(without_replacement(5, 3, seed=0, round=0, purpose="clock: asked"))
    times = durations.seconds(0)[asked]
    first = asked[np.argsort(times, kind="stable")[:2]]
    assert closed(durations, policy=policy, cohort=2) == (sorted(first.tolist()), np.sort(times)[1])
    assert closed(durations, cohort=5) == ([0, 1, 2, 3, 4], 4)
    assert closed(durations, policy={"over_selection": 9}, cohort=1) == ([1], 1)


def test_a_part_of_the_work_takes_a_part_of_the_time(durations):
    half = Trace(5, [Recorded("half", (0.5,))])
    assert closed(durations, policy={"deadline": 1.5}, among=half) == ([1, 2, 3, 4], 1.5)


def test_a_round_without_clients_lasts_too(durations):
    none_active = Schedule(5, departures=dict.fromkeys(range(5), 1))
    assert closed(durations, round=1, among=none_active) == ([], 1.0)
    assert closed(durations, round=1, among=none_active, policy={"deadline": 7}) == ([], 7.0)


def test_rounds_begin_with_the_clients_of_their_period(tmp_path, durations):
    """By hand: round 0 takes 4 seconds, and round 1, of client 0 alone, takes 9; a period takes one second."""
    available = {0: [1] * 5, 4: [1, 0, 0, 0, 0], 5: [0, 1, 0, 0, 0], 13: [0, 0, 1, 0, 1]}
    clock = Clock(durations, among=Bernoulli(5, available))
    assert [(clock.active(t).clients.tolist(), clock.closing(t)[1]) for t in (2, 1, 0)] == [
        ([2, 4], 3),
        ([0], 9),
        ([0, 1, 2, 3, 4], 4),
    ]
    slow = Clock(Durations(5, median=5.0, trace=durations.trace), among=Bernoulli(5, {0: 1.0, 1: 0.0, 2: 1.0}))
    assert [slow.closing(t)[1] for t in range(4)] == [
        4,
        9,
        4,
        9,
    ]  # rounds 0 and 1 begin in period 0, 2 and 3 in 2 and 3
    again = Clock(Durations(5, median=5.0, trace=durations.trace), among=Bernoulli(5, {0: 1.0, 1: 0.0, 2: 1.0}))
    assert again.closing(3)[1] == 9


@pytest.mark.parametrize("median", [0.1, 0.3, 1.1, 0.5, 60.0])
def test_periods_are_whole_medians(median):
    """Each round, and each wave of three or four clients, takes one median; sums of medians are rounded."""
    constant, late = Durations(4, spread=0.0, jitter=0.0, median=median), Schedule(4, arrivals={3: 1000})
    due, rounds, course = [3] * 1000 + [4] * 9, Clock(constant, among=late), Arrivals(constant, 4, among=late)
    assert [len(rounds.active(t)) for t in range(len(due))] == due
    for count in due:
        assert (len(course.start()), None in [course.next() for _ in range(count)]) == (count, False)


def test_slow_clients_are_late_more_often():
    """Of 200 rounds with one median of time, the fastest client misses fewer than the slowest."""
    law = Durations(20, seed=3)
    clock, met = Clock(law, policy={"deadline": 1.0}, among=Uniform(20, 10, seed=3)), np.zeros(20)
    for t in range(200):
        met[clock.active(t).clients] += 1
    assert met[np.argmin(law._own)] > 2 * met[np.argmax(law._own)]


def course(arrivals, count):
    """The first arrivals, as time and client, and the clients that start before each of them."""
    started, found = [[]], []
    while len(found) < count:
        started[-1] += [int(active.clients[0]) for _, active in arrivals.start()]
        if (arrival := arrivals.next()) is not None:
            found.append((arrival.time, arrival.client))
            started.append([])
    return found, started[:-1]


def test_arrivals_by_hand(tmp_path):
    """Client 0 needs 1 second and client 1 needs 3; client 1 is available from the second 2 on."""
    path = tmp_path / "durations.csv"
    path.write_text("client,seconds\n0,1\n1,3\n")
    two = Durations(2, trace=path)
    found, started = course(Arrivals(two, 2), 5)
    assert found == [(1, 0), (2, 0), (3, 0), (3, 1), (4, 0)]
    assert [sorted(clients) for clients in started] == [[0, 1], [0], [0], [0], [1]]
    found, started = course(Arrivals(two, 2, among=Bernoulli(2, {0: [1, 0], 2: [1, 1]})), 5)
    assert found == [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0)]
    assert [sorted(clients) for clients in started] == [[0], [0], [0, 1], [0], [0]]
    late = Arrivals(two, 2, among=Bernoulli(2, {0: [0, 0], 3: [0, 1], 4: [1, 1]}))
    assert course(late, 2) == ([(5, 0), (6, 0)], [[1, 0], [0]])
    half = Arrivals(two, 2, among=Trace(2, [Recorded("half", (0.5,))]))
    assert course(half, 4)[0] == [(0.5, 0), (1, 0), (1.5, 0), (1.5, 1)]


def test_arrivals_are_deterministic_and_can_be_repeated():
    def made(seed):
        return Arrivals(Durations(30, seed=seed), 10, among=Bernoulli(30, 0.2, seed=seed))

    one = made(1)
    first, rest = course(one, 100), course(one, 100)
    assert first == course(made(1), 100) != course(made(2), 100)
    assert first[0] == sorted(first[0])
    again = made(1)
    again.skip(100)
    assert course(again, 100) == rest
    assert {client for _, client in first[0] + rest[0]} == set(range(30))


def test_clients_that_are_never_available_are_an_error(durations, monkeypatch):
    monkeypatch.setattr(clock, "MOST_IDLE", 5)
    with pytest.raises(RangeError, match=r"participation: no client .* for 5 periods"):
        course(Arrivals(durations, 2, among=Bernoulli(5, 0.0)), 1)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: Durations(3, median=0.0), "median"),
        (lambda: Durations(3, spread=-1.0), "spread"),
        (lambda: Durations(3, jitter=11.0), "jitter"),
        (lambda: Clock(Durations(3), policy={"min_clients": 1}), "policy=.* uses only"),
        (lambda: Clock(Durations(3), policy={"over_selection": 2.0}), "over_selection=2: needs cohort"),
        (lambda: Clock(Durations(3), policy={"min_share": 0.5}, cohort=2), "min_share=0.5"),
        (lambda: Clock(Durations(3), cohort=4), "cohort"),
        (lambda: Clock(Durations(3), among=Bernoulli(4, 0.5)), "among"),
        (lambda: Arrivals(Durations(3), 4), "concurrency"),
    ],
)
def test_a_wrong_argument_is_rejected_by_name(call, name):
    with pytest.raises(FedcoreError, match=rf"^{name}"):
        call()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("client,time\n0,1\n", "header"),
        ("client,seconds\n0,1\n", "client 1 has no row"),
        ("client,seconds\n0,1\n2,1\n", r"line 3: .* 0 \.\. 1"),
        ("client,seconds\n0,1\n1,0\n", "line 3: seconds"),
        ("client,seconds\n0,1\n1,x\n", "line 3"),
    ],
)
def test_a_malformed_file_is_rejected(tmp_path, text, problem):
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(MissingDataError, match=problem):
        Durations(2, trace=tmp_path / "bad.csv")
