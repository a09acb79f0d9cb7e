"""The virtual clock: durations, the end of synchronous rounds, and the order of arrivals."""

import numpy as np
import pytest

from fedcore.errors import FedcoreError, MissingDataError
from fedcore.runtime import generator
from fedcore.sampling import without_replacement
from fedcore.simulation.clock import Clock, Durations, arrivals
from fedcore.simulation.participation import Bernoulli, Recorded, Schedule, Trace, Uniform


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


def test_slow_clients_are_late_more_often():
    """Of 200 rounds with one median of time, the fastest client misses fewer than the slowest."""
    law = Durations(20, seed=3)
    clock, met = Clock(law, policy={"deadline": 1.0}, among=Uniform(20, 10, seed=3)), np.zeros(20)
    for t in range(200):
        met[clock.active(t).clients] += 1
    assert met[np.argmin(law._own)] > 2 * met[np.argmax(law._own)]


def test_arrivals_by_hand(durations):
    """0 and 1 start at 0. 1 arrives at 1 and 2 starts; 0 and 2 arrive at 4, 0 first; 3 starts at 4, 4 at 4."""
    started = []

    def choose(number, busy):
        started.append((number, list(busy)))
        return number if number < 5 else None

    found = [(arrival.time, arrival.client, arrival.number) for arrival in arrivals(durations, 2, choose)]
    assert found == [(1, 1, 1), (4, 0, 0), (4, 2, 2), (6, 4, 4), (7, 3, 3)]
    assert started[:4] == [(0, []), (1, [0]), (2, [0]), (3, [2])]


def test_arrivals_are_ordered_by_time_and_client_and_are_deterministic():
    def course(seed):
        law, free = Durations(30, seed=seed), np.random.default_rng(0)
        busy_at = []

        def choose(number, busy):
            busy_at.append(len(busy))
            return int(free.choice(np.setdiff1d(np.arange(30), list(busy))))

        found = [arrival for arrival, _ in zip(arrivals(law, 10, choose), range(200), strict=False)]
        assert max(busy_at) == 9
        return found

    one = course(1)
    assert one == course(1) != course(2)
    assert [(a.time, a.client) for a in one] == sorted((a.time, a.client) for a in one)


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
        (lambda: next(arrivals(Durations(3), 4, min)), "concurrency"),
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
