"""What patterns give when they choose from each other."""

from itertools import permutations

import numpy as np
import pytest

from fedcore.participation import (
    Active,
    Always,
    AtLeast,
    Bernoulli,
    OverSelection,
    Participation,
    Recorded,
    Schedule,
    TimeVarying,
    Trace,
    Uniform,
    Weighted,
    named,
)

N, ROUNDS = 12, 40
SCHEDULE = {"arrivals": {0: 5, 7: 20}, "departures": {3: 10, 7: 30}}
HALF = [Recorded("half", (0.5,))]
# Patterns that decide over each client for itself.
FILTERS = {
    "Always": {},
    "Bernoulli": {"p": 0.5},
    "RoundRobin": {"tau_max": 4, "phase": "random"},
    "Trace": {"first": 8},
    "Schedule": SCHEDULE,
}


def rounds(pattern: Participation) -> list[list[object]]:
    answers = [pattern.active(t) for t in range(ROUNDS)]
    return [[None if part is None else part.tolist() for part in (a.clients, a.shares, a.counts)] for a in answers]


def test_nothing_in_between_changes_anything():
    for name, options in (FILTERS | {"Uniform": {"k": 4}, "TimeVarying": {"share": 0.3}}).items():
        alone = rounds(named(name, N, **options, seed=5))
        assert rounds(named(name, N, **options, seed=5, among="Always")) == alone
        assert rounds(Always(N, among=named(name, N, **options, seed=5))) == alone


@pytest.mark.parametrize(("inner", "outer"), [*permutations(FILTERS, 2)])
def test_what_decides_over_each_client_for_itself_changes_places(outer, inner):
    one = named(outer, N, **FILTERS[outer], seed=1, among={"name": inner, **FILTERS[inner]})
    other = named(inner, N, **FILTERS[inner], seed=1, among={"name": outer, **FILTERS[outer]})
    assert rounds(one) == rounds(other)
    separate = [named(name, N, **FILTERS[name], seed=1) for name in (outer, inner)]
    for t in range(ROUNDS):
        both = np.intersect1d(*(pattern.active(t).clients for pattern in separate))
        assert one.active(t).clients.tolist() == both.tolist()


def test_draws_among_those_present_and_those_present_of_the_drawn():
    present = Schedule(N, **SCHEDULE)
    drawn_of_present, present_of_drawn = Uniform(N, 6, among=present), Schedule(N, **SCHEDULE, among=Uniform(N, 6))
    sizes = set()
    for t in range(ROUNDS):
        there = present.active(t).clients
        of_present = drawn_of_present.active(t).clients
        assert len(of_present) == 6
        assert np.isin(of_present, there).all()
        of_drawn = present_of_drawn.active(t).clients
        assert of_drawn.tolist() == np.intersect1d(Uniform(N, 6).active(t).clients, there).tolist()
        sizes.add(len(of_drawn))
    assert min(sizes) < 6


def test_a_draw_takes_all_where_there_are_fewer():
    few = Schedule(N, departures=dict.fromkeys(range(2, N), 1))
    weights = [1.0, 0.0, *[1.0] * (N - 2)]
    for t in range(1, 5):
        assert Uniform(N, 6, among=few).active(t).clients.tolist() == [0, 1]
        assert OverSelection(N, 6, among=few).active(t).clients.tolist() == [0, 1]
        assert TimeVarying(N, 0.5, among=few).active(t).clients.tolist() in ([0], [1])
        assert Weighted(N, 6, weights, among=few).active(t).clients.tolist() == [0]
        again = Weighted(N, 6, weights, replacement=True, among=few).active(t)
        assert (again.clients.tolist(), again.counts.tolist()) == ([0], [6])
    unwanted = Schedule(N, departures={i: 1 for i in range(N) if i != 1})
    assert len(Weighted(N, 6, weights, among=unwanted).active(2)) == 0
    assert len(Weighted(N, 6, weights, replacement=True, among=unwanted).active(2)) == 0


def test_two_of_a_kind_are_independent():
    rounds, p = 4000, 0.5
    both = Bernoulli(2, p, among=Bernoulli(2, p))
    heard = sum(len(both.active(t)) for t in range(rounds)) / (2 * rounds)
    assert abs(heard - p * p) < 4.5 * np.sqrt(p * p * (1 - p * p) / (2 * rounds))
    three = Bernoulli(2, p, among=Always(2, among=both))
    heard = sum(len(three.active(t)) for t in range(rounds)) / (2 * rounds)
    assert abs(heard - p**3) < 4.5 * np.sqrt(p**3 * (1 - p**3) / (2 * rounds))


def test_shares_multiply_and_counts_stay():
    inner = Weighted(N, 30, [1.0] * N, replacement=True)
    halved = Trace(N, HALF, among=inner).active(2)
    assert halved.shares.tolist() == [0.5] * len(halved)
    assert halved.counts.tolist() == inner.active(2).counts.tolist()
    assert halved.counts.sum() == 30
    quartered = Trace(N, HALF, among=Trace(N, HALF)).active(2)
    assert quartered.shares.tolist() == [0.25] * N
    some = Uniform(N, 4, among=Trace(N, HALF)).active(2)
    assert some.shares.tolist() == [0.5] * 4
    redrawn = Weighted(N, 5, [1.0] * N, replacement=True, among=Weighted(N, 30, [1.0] * N, replacement=True)).active(2)
    assert redrawn.counts.sum() == 5


def test_a_schedule_over_a_trace_over_a_draw():
    pattern = named(
        "Schedule",
        N,
        **SCHEDULE,
        seed=9,
        among={"name": "Trace", "first": 5, "among": {"name": "Uniform", "k": 6}},
    )
    trace, drawn, present = Trace(N, first=5, seed=9), Uniform(N, 6, seed=9), Schedule(N, **SCHEDULE)
    for t in range(ROUNDS):
        active = pattern.active(t)
        due = np.intersect1d(drawn.active(t).clients, present.active(t).clients)
        assert active.clients.tolist() == due.tolist()
        np.testing.assert_array_equal(active.shares, trace.shares(t)[due])
        assert pattern.present(t).tolist() == present.active(t).clients.tolist()


def test_first_round_all_reaches_every_draw_but_not_a_schedule():
    inner = {"name": "Trace", "first": 8, "among": {"name": "Schedule", **SCHEDULE}}
    active = named("Uniform", N, k=2, first_round="all", among=inner).active(0)
    assert active.clients.tolist() == [i for i in range(N) if i not in (0, 7)]
    assert active.shares is None
    outermost = named("Schedule", N, **SCHEDULE, first_round="all", among={"name": "Uniform", "k": 2}).active(0)
    assert outermost.clients.tolist() == active.clients.tolist()


def test_at_least_draws_from_those_present():
    present = Schedule(N, departures=dict.fromkeys(range(3, N), 1))
    pattern = AtLeast(N, 2, among=Bernoulli(N, 0.0, among=present))
    drawn = [tuple(pattern.active(t).clients.tolist()) for t in range(1, 60)]
    assert set(drawn) == {(0, 1), (0, 2), (1, 2)}
    everyone = AtLeast(N, 5, among=Bernoulli(N, 0.0, among=present)).active(1)
    assert everyone.clients.tolist() == [0, 1, 2]


def test_a_pattern_of_ones_own_composes():
    class Even(Participation):
        def _choose(self, round: int, candidates: Active) -> Active:
            return candidates.only(candidates.clients % 2 == 0)

    drawn = [Uniform(N, 3, among=Even(N)).active(t).clients for t in range(20)]
    assert {len(clients) for clients in drawn} == {3}
    assert set(np.concatenate(drawn).tolist()) == {0, 2, 4, 6, 8, 10}
    assert Even(N, among=Schedule(N, departures={0: 1})).active(1).clients.tolist() == [2, 4, 6, 8, 10]
