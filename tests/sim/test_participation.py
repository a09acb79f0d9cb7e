"""The contract of all patterns, and compositions of patterns."""

import dataclasses
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcore.errors import FedcoreError, RangeError, UnknownNameError
from fedcore.sim import participation
from fedcore.sim.participation import Active, Always, Bernoulli, Schedule, Trace, Uniform, Weighted, named
from fedcore.sim.traces import Generated


def test_steps_are_shares_rounded_down_to_at_least_one():
    clients = np.arange(5)
    assert Active(clients).steps(7).tolist() == [7] * 5
    shares = np.array([1, 0.5, 0.3, 0.29, 1e-6])
    assert Active(clients, shares).steps(10).tolist() == [10, 5, 3, 2, 1]
    assert Active(clients, shares).steps(np.array([3, 3, 10, 100, 9])).tolist() == [3, 1, 3, 29, 1]


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_share_of_an_integer_number_of_steps_is_not_rounded_down(steps, full):
    steps, full = sorted((steps, full))
    assert Active(np.array([0]), np.array([steps / full])).steps(full).tolist() == [steps]


@given(st.floats(1e-12, 1), st.integers(1, 10**6))
def test_steps_are_between_one_and_all(share, full):
    (steps,) = Active(np.array([0]), np.array([share])).steps(full)
    assert 1 <= steps <= full
    assert steps <= max(share * full, 1) + 1e-6
    assert steps > share * full - 1


@pytest.mark.parametrize("kept", [np.array([False, True, True]), np.array([1, 2])])
def test_only_selects_shares_and_counts_too(kept):
    some = Active(np.array([3, 5, 9]), np.array([0.1, 0.2, 0.3]), np.array([4, 5, 6])).only(kept)
    assert (some.clients.tolist(), some.shares.tolist(), some.counts.tolist()) == ([5, 9], [0.2, 0.3], [5, 6])
    bare = Active(np.array([3, 5, 9])).only(kept)
    assert (bare.clients.tolist(), bare.shares, bare.counts) == ([5, 9], None, None)


def test_working_multiplies_shares_and_drops_zeros():
    once = Active(np.array([1, 2, 3]), counts=np.array([7, 8, 9])).working(np.array([0.5, 0.0, 1.0]))
    assert (once.clients.tolist(), once.shares.tolist(), once.counts.tolist()) == ([1, 3], [0.5, 1], [7, 9])
    twice = once.working(np.array([0.5, 0.5]))
    assert (twice.clients.tolist(), twice.shares.tolist()) == ([1, 3], [0.25, 0.5])
    assert len(twice) == 2


# The contract: a new pattern is a row in the registry and in OPTIONS.


OPTIONS = {
    "Always": {},
    "AtLeast": {"least": 3, "among": {"name": "Bernoulli", "p": 0.1}},
    "Bernoulli": {"p": 0.4},
    "Fluctuating": {"p": 0.5, "period": 4},
    "Markov": {"p_up": 0.3, "p_down": 0.4},
    "OverSelection": {"k": 5, "policy": {"over_selection": 1.3, "deadline": 1.0}},
    "RoundRobin": {"tau_max": 6, "phase": "random"},
    "Schedule": {"arrivals": {3: 2, 4: 4}, "departures": {3: 5, 17: 1}},
    "TimeVarying": {"share": 0.3},
    "Trace": {"first": 7},
    "Uniform": {"k": 6},
    "Weighted": {"k": 6, "weights": list(range(20)), "replacement": True},
}
NOT_RANDOM = {"Always", "Schedule"}
RANDOM = [name for name in OPTIONS if name not in NOT_RANDOM]


def make(name, **options):
    return named(name, 20, **OPTIONS[name], **options)


def plain(active):
    return [None if part is None else part.tolist() for part in (active.clients, active.shares, active.counts)]


def test_every_pattern_has_options_in_this_file():
    assert OPTIONS.keys() == participation.REGISTRY.keys()
    assert all(pattern.__name__ == name and pattern.__doc__ for name, pattern in participation.REGISTRY.items())


@pytest.mark.parametrize("name", OPTIONS)
def test_rounds_do_not_depend_on_the_order_of_calls(name):
    forward, backward = make(name, seed=3), make(name, seed=3)
    there = [plain(forward.active(t)) for t in range(12)]
    assert [plain(backward.active(t)) for t in reversed(range(12))][::-1] == there
    assert [plain(forward.active(t)) for t in range(12)] == there


@pytest.mark.parametrize("name", OPTIONS)
def test_active_clients_are_sorted_distinct_and_present(name):
    pattern = make(name)
    for t in range(12):
        active = pattern.active(t)
        assert active.clients.dtype == np.int64
        assert (np.diff(active.clients) > 0).all()
        assert ((active.clients >= 0) & (active.clients < 20)).all()
        assert np.isin(active.clients, pattern.present(t)).all()
        assert active.shares is None or (active.shares.dtype, active.shares.shape) == (np.float64, (len(active),))
        assert active.shares is None or ((active.shares > 0) & (active.shares <= 1)).all()
        assert active.counts is None or (active.counts.dtype, active.counts.shape) == (np.int64, (len(active),))
        assert active.counts is None or (active.counts >= 1).all()


@pytest.mark.parametrize("name", RANDOM)
def test_rounds_and_seeds_differ(name):
    sets = [str(plain(make(name, seed=seed).active(t))) for seed in (0, 1) for t in (1, 2)]
    assert len(set(sets)) == 4


@pytest.mark.parametrize("name", RANDOM)
def test_first_round_all_changes_only_round_0(name):
    everyone, ordinary = make(name, first_round="all"), make(name)
    assert plain(everyone.active(0)) == [list(range(20)), None, None]
    assert plain(ordinary.active(0)) != [list(range(20)), None, None]
    for t in range(1, 6):
        assert plain(everyone.active(t)) == plain(ordinary.active(t))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_pattern_keeps_the_common_arguments(name):
    among = Always(20)
    options = {key: value for key, value in OPTIONS[name].items() if key != "among"}
    pattern = named(name, 20, seed=7, first_round="all", among=among, **options)
    assert (pattern.clients, pattern.seed, pattern.first_round) == (20, 7, "all")
    assert pattern.among is among


def test_an_inner_pattern_given_by_name_gets_the_same_seed_and_first_round():
    pattern = named("Uniform", 9, k=2, seed=7, first_round="all", among="Always")
    assert (pattern.among.seed, pattern.among.first_round) == (7, "all")
    own = named("Uniform", 9, k=2, seed=7, among={"name": "Bernoulli", "p": 0.5, "seed": 8})
    assert (own.among.seed, own.among.first_round) == (8, None)


@pytest.mark.parametrize(
    "vector",
    [
        lambda: Bernoulli(6, 0.2, levels=5).p,
        lambda: Bernoulli(2, [0.2, 0.3]).p,
        lambda: participation.Markov(2, 0.2, 0.3).stationary,
        lambda: participation.RoundRobin(3, 2).tau,
        lambda: Trace(3).assigned,
        lambda: Trace(3, assign="order").assigned,
        lambda: Weighted(2, 1, [1, 2]).weights,
    ],
)
def test_arrays_of_a_pattern_are_read_only(vector):
    with pytest.raises(ValueError, match="read-only"):
        vector()[0] = 0


def test_the_repr_of_a_pattern_has_its_arguments():
    pattern = Schedule(3, arrivals={1: 2}, among=Uniform(3, 2, seed=3))
    assert repr(pattern) == "Schedule(clients=3, among=Uniform(clients=3, k=2, seed=3), arrivals={1: 2}, departures={})"


@pytest.mark.parametrize("name", OPTIONS)
def test_without_candidates_no_client_is_active(name):
    options = {key: value for key, value in OPTIONS[name].items() if key != "among"}
    empty = Schedule(20, departures=dict.fromkeys(range(20), 1))
    active = named(name, 20, among=empty, **options).active(1)
    assert len(active) == 0
    assert active.clients.dtype == np.int64


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Always(2.0), "clients"),
        (lambda: Bernoulli(3, 0.5, first_round="none"), "first_round"),
        (lambda: Bernoulli(3, 0.5, among=Always(4)), "among"),
        (lambda: Bernoulli(3, 0.5, among="Always"), "among"),
        (lambda: Bernoulli(3, 0.5).active(0.5), "round"),
        (lambda: Bernoulli(3, float("nan")), "p"),
        (lambda: Bernoulli(3, "1"), "p"),
        (lambda: Bernoulli(3, True), "p"),
        (lambda: Bernoulli(3, [0.1, 0.2]), r"p: .*\[2\]"),
        (lambda: Bernoulli(3, [0.1, 0.2, -0.1]), r"p\[2\]"),
        (lambda: Bernoulli(3, [0.1, 0.2, 0.3], levels=5), "levels"),
        (lambda: Bernoulli(3, [0.1, 0.2, 0.3], levels=2), "levels"),
        (lambda: Bernoulli(3, {0: 0.5, 10: 1.5}), r"p\[10\]"),
        (lambda: participation.Fluctuating(3, 0.5, shape="cosine"), "shape"),
        (lambda: participation.Markov(3, [0.1, 0.2], 0.5), r"p_up: .*\[2\]"),
        (lambda: participation.Markov(2, [0.1, 0.0], [0.0, 0.0]), "p_up: client 1"),
        (lambda: named("Bernoulli", 3, p={"popularity": "third"}), "popularity"),
        (lambda: named("Bernoulli", 3, p={"popularity": "halves", "means": 1.0}), "p: .* did you mean 'mean'"),
        (lambda: participation.RoundRobin(3, 2, phase="zeros"), "phase: .* did you mean 'zero'"),
        (lambda: participation.RoundRobin(3, 2, periods="normal"), "periods: .* did you mean 'half-normal'"),
        (lambda: Weighted(3, 1, [0, 0, 0]), "weights"),
        (lambda: Weighted(2, 1, [1e308, 1e308]), "weights"),
        (lambda: Weighted(3, 1, [1, 2]), "weights"),
        (lambda: Weighted(3, 1, [1, 2, float("inf")]), r"weights\[2\]"),
        (lambda: Weighted(3, 1, "abc"), "weights"),
        (lambda: participation.OverSelection(10, 5, jitter=float("nan")), "jitter"),
        (lambda: participation.OverSelection(10, 5, policy={"grace": 1}), "policy=.* uses only over_selection"),
        (lambda: participation.OverSelection(10, 5, policy={"dead_line": 1}), "policy: .* did you mean 'deadline'"),
        (lambda: Schedule(3, arrivals=[1]), "arrivals"),
        (lambda: Schedule(3, arrivals={"x": 1}), "arrivals: client='x'"),
        (lambda: Schedule(3, arrivals={1: 1, "1": 2}), "arrivals: .* 1 "),
        (lambda: Schedule(3, arrivals={1: 9}, departures={1: 9}), "departures: client 1"),
        (lambda: Trace(3, []), "traces"),
        (lambda: Trace(3, 5), "traces"),
        (lambda: Trace(3, [participation.Recorded("half", (0.5,)), 0.5]), "traces"),
        (lambda: Trace(3, "flexibel"), "traces: .* did you mean 'flexible'"),
        (lambda: Trace(3, assign="randomly"), "assign"),
        (lambda: Trace(3, draw="replays"), "draw"),
        (lambda: Trace(3, draw="replay"), "draw.*trace '1'"),
    ],
)
def test_a_wrong_argument_is_rejected_by_name(call, message):
    with pytest.raises(FedcoreError, match=rf"^{message}"):
        call()


@pytest.mark.parametrize(
    ("make", "name", "bounds", "beyond"),
    [
        (lambda end: Always(end), "clients", (1, 2**53), (0, 2**53 + 1)),
        (lambda end: Always(1, seed=end), "seed", (0, 2**64 - 1), (-1, 2**64)),
        (lambda end: Always(1).active(end), "round", (0, 2**63 - 1), (-1, 2**63)),
        (lambda end: participation.AtLeast(3, end), "least", (1, 3), (0, 4)),
        (lambda end: Bernoulli(3, end), "p", (0, 1), (-1e-9, 1.01)),
        (lambda end: Bernoulli(3, 0.1, levels=end), "levels", (1, 2**31), (0, 2**31 + 1)),
        (lambda end: Bernoulli(3, {0: 0.1, end: 0.2}), "p: round", (1, 2**53), (-1, 2**53 + 1)),
        (lambda end: participation.Fluctuating(3, 0.1, period=end), "period", (1, 2**31), (0, 2**31 + 1)),
        (lambda end: participation.Fluctuating(3, 0.1, depth=end), "depth", (0, 1), (-1e-9, 1.01)),
        (lambda end: participation.Fluctuating(3, 0.1, least=end), "least", (0, 1), (-1e-9, 1.01)),
        (lambda end: participation.Markov(3, end, 0.5), "p_up", (0, 1), (-1e-9, 1.01)),
        (lambda end: participation.Markov(3, 0.5, end), "p_down", (0, 1), (-1e-9, 1.01)),
        (lambda end: participation.OverSelection(3, end), "k", (1, 3), (0, 4)),
        (lambda end: participation.OverSelection(3, 2, spread=end), "spread", (0, 10), (-1e-9, 10.1)),
        (lambda end: participation.OverSelection(3, 2, jitter=end), "jitter", (0, 10), (-1e-9, 10.1)),
        (lambda end: participation.OverSelection(3, 2, policy={"deadline": end}), "deadline", (1e-9, 1e300), (0, -1)),
        (lambda end: participation.RoundRobin(3, end), "tau_max", (0, 2**31), (-1, 2**31 + 1)),
        (lambda end: Schedule(3, arrivals={end: 1}), "arrivals: client", (0, 2), (-1, 3)),
        (lambda end: Schedule(3, arrivals={1: end}), "arrivals: client 1", (0, 2**53), (-1, 2**53 + 1)),
        (lambda end: Schedule(3, departures={end: 1}), "departures: client", (0, 2), (-1, 3)),
        (lambda end: Schedule(3, departures={1: end}), "departures: client 1", (1, 2**53), (-1, 0, 2**53 + 1)),
        (lambda end: participation.TimeVarying(3, end), "share", (1e-9, 1), (0, 1.001)),
        (lambda end: Trace(3, first=end), "first", (1, 8), (0, 9)),
        (lambda end: Uniform(3, end), "k", (1, 3), (0, 4)),
        (lambda end: Weighted(3, end, [1, 0, 2]), "k", (1, 2), (0, 3)),
        (lambda end: Weighted(3, end, [1, 0, 2], replacement=True), "k", (1, 2**31), (0, 2**31 + 1)),
    ],
)
def test_numeric_arguments_have_exact_bounds(make, name, bounds, beyond):
    for end in bounds:
        make(end)
    for end in beyond:
        with pytest.raises(RangeError, match=rf"^{name}\b"):
            make(end)


def test_an_unknown_pattern_gets_a_suggestion():
    with pytest.raises(UnknownNameError, match=r"participation: 'Bernouli' is unknown; did you mean 'Bernoulli'"):
        named("Bernouli", 3, p=0.5)
    with pytest.raises(UnknownNameError, match=r"participation: 'Unifrom' is unknown; did you mean 'Uniform'"):
        named("Bernoulli", 3, p=0.5, among={"name": "Unifrom"})
    with pytest.raises(RangeError, match=r"^among\b"):
        named("Bernoulli", 3, p=0.5, among={"k": 2})


# Defaults, and values that cannot be changed.


ARGUMENTS = {
    "Bernoulli": (0.5,),
    "Fluctuating": (0.5,),
    "Markov": (0.5, 0.5),
    "OverSelection": (2,),
    "RoundRobin": (3,),
    "TimeVarying": (0.5,),
    "Uniform": (2,),
    "Weighted": (2, [1.0] * 4),
}


@pytest.mark.parametrize("name", sorted(participation.REGISTRY.own))
def test_the_default_seed_is_0(name):
    pattern = participation.REGISTRY[name](4, *ARGUMENTS.get(name, ()))
    assert (pattern.seed, pattern.first_round, pattern.among) == (0, None, None)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Active(np.arange(3)), "clients"),
        (lambda: Generated("a", 0.5, 0.1), "mean"),
        (lambda: participation.Recorded("a", (0.5, 1.0)), "shares"),
    ],
)
def test_values_are_frozen(make, field):
    frozen = make()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(frozen, field, getattr(frozen, field))


def test_active_compares_by_identity():
    """Arrays have no single result of ==."""
    one, other = Active(np.arange(3)), Active(np.arange(3))
    assert one == one
    assert one != other
    assert len({one, other}) == 2
    assert repr(one) == "Active(clients=int64[3])"


# Compositions.


N, ROUNDS = 12, 40
SCHEDULE = {"arrivals": {0: 5, 7: 20}, "departures": {3: 10, 7: 30}}
HALF = [participation.Recorded("half", (0.5,))]
# Patterns that decide for each client separately.
FILTERS = {
    "Always": {},
    "Bernoulli": {"p": 0.5},
    "Fluctuating": {"p": 0.5, "shape": "staircase"},
    "Markov": {"p_up": 0.3, "p_down": 0.2},
    "RoundRobin": {"tau_max": 4, "phase": "random"},
    "Trace": {"first": 8},
    "Schedule": SCHEDULE,
}


def rounds(pattern):
    return [plain(pattern.active(t)) for t in range(ROUNDS)]


def test_always_changes_nothing_in_a_composition():
    for name, options in (FILTERS | {"Uniform": {"k": 4}, "TimeVarying": {"share": 0.3}}).items():
        expected = rounds(named(name, N, **options, seed=5))
        assert rounds(named(name, N, **options, seed=5, among="Always")) == expected
        assert rounds(Always(N, among=named(name, N, **options, seed=5))) == expected


@pytest.mark.parametrize(("inner", "outer"), [*permutations(FILTERS, 2)])
def test_patterns_that_decide_for_each_client_commute(outer, inner):
    one = named(outer, N, **FILTERS[outer], seed=1, among={"name": inner, **FILTERS[inner]})
    other = named(inner, N, **FILTERS[inner], seed=1, among={"name": outer, **FILTERS[outer]})
    assert rounds(one) == rounds(other)
    separate = [named(name, N, **FILTERS[name], seed=1) for name in (outer, inner)]
    for t in range(ROUNDS):
        both = np.intersect1d(*(pattern.active(t).clients for pattern in separate))
        assert one.active(t).clients.tolist() == both.tolist()


def test_the_order_of_a_draw_and_a_schedule_matters():
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


def test_a_draw_from_too_few_clients_takes_all():
    few = Schedule(N, departures=dict.fromkeys(range(2, N), 1))
    weights = [1.0, 0.0, *[1.0] * (N - 2)]
    for t in range(1, 5):
        assert Uniform(N, 6, among=few).active(t).clients.tolist() == [0, 1]
        assert participation.OverSelection(N, 6, among=few).active(t).clients.tolist() == [0, 1]
        assert participation.TimeVarying(N, 0.5, among=few).active(t).clients.tolist() in ([0], [1])
        assert Weighted(N, 6, weights, among=few).active(t).clients.tolist() == [0]
        again = Weighted(N, 6, weights, replacement=True, among=few).active(t)
        assert (again.clients.tolist(), again.counts.tolist()) == ([0], [6])
    unwanted = Schedule(N, departures={i: 1 for i in range(N) if i != 1})
    assert len(Weighted(N, 6, weights, among=unwanted).active(2)) == 0
    assert len(Weighted(N, 6, weights, replacement=True, among=unwanted).active(2)) == 0


def test_compositions_multiply_shares_and_keep_counts():
    inner = Weighted(N, 30, [1.0] * N, replacement=True)
    halved = Trace(N, HALF, among=inner).active(2)
    assert halved.shares.tolist() == [0.5] * len(halved)
    assert halved.counts.tolist() == inner.active(2).counts.tolist()
    assert halved.counts.sum() == 30
    assert Trace(N, HALF, among=Trace(N, HALF)).active(2).shares.tolist() == [0.25] * N
    assert Uniform(N, 4, among=Trace(N, HALF)).active(2).shares.tolist() == [0.5] * 4
    redrawn = Weighted(N, 5, [1.0] * N, replacement=True, among=Weighted(N, 30, [1.0] * N, replacement=True)).active(2)
    assert redrawn.counts.sum() == 5


def test_a_schedule_over_a_trace_over_a_draw():
    among = {"name": "Trace", "first": 5, "among": {"name": "Uniform", "k": 6}}
    pattern = named("Schedule", N, **SCHEDULE, seed=9, among=among)
    trace, drawn, present = Trace(N, first=5, seed=9), Uniform(N, 6, seed=9), Schedule(N, **SCHEDULE)
    for t in range(ROUNDS):
        active = pattern.active(t)
        expected = np.intersect1d(drawn.active(t).clients, present.active(t).clients)
        assert active.clients.tolist() == expected.tolist()
        np.testing.assert_array_equal(active.shares, trace.shares(t)[expected])
        assert pattern.present(t).tolist() == present.active(t).clients.tolist()


def test_first_round_all_skips_draws_but_not_a_schedule():
    inner = {"name": "Trace", "first": 8, "among": {"name": "Schedule", **SCHEDULE}}
    active = named("Uniform", N, k=2, first_round="all", among=inner).active(0)
    assert active.clients.tolist() == [i for i in range(N) if i not in (0, 7)]
    assert active.shares is None
    outermost = named("Schedule", N, **SCHEDULE, first_round="all", among={"name": "Uniform", "k": 2}).active(0)
    assert outermost.clients.tolist() == active.clients.tolist()


def test_at_least_draws_from_present_clients():
    present = Schedule(N, departures=dict.fromkeys(range(3, N), 1))
    pattern = participation.AtLeast(N, 2, among=Bernoulli(N, 0.0, among=present))
    drawn = [tuple(pattern.active(t).clients.tolist()) for t in range(1, 60)]
    assert set(drawn) == {(0, 1), (0, 2), (1, 2)}
    everyone = participation.AtLeast(N, 5, among=Bernoulli(N, 0.0, among=present)).active(1)
    assert everyone.clients.tolist() == [0, 1, 2]


def test_a_custom_pattern_composes():
    class Even(participation.Participation):
        def _choose(self, round, candidates):
            return candidates.only(candidates.clients % 2 == 0)

    drawn = [Uniform(N, 3, among=Even(N)).active(t).clients for t in range(20)]
    assert {len(clients) for clients in drawn} == {3}
    assert set(np.concatenate(drawn).tolist()) == {0, 2, 4, 6, 8, 10}
    assert Even(N, among=Schedule(N, departures={0: 1})).active(1).clients.tolist() == [2, 4, 6, 8, 10]
    assert Even(N).seed == 0


TWO = np.array([0, 1])
BAD = [[[0, 1]], [TWO.astype(np.int32)], *([np.array(own)] for own in ([[0, 1]], [0, 2, 2], [-1, 2], [0, N]))]
BAD += [[TWO, shares] for shares in ([0.5, 1.0], *map(np.array, ([0.5], [0.5, 0.0], [1.1, 0.5], [0.5, np.nan])))]


@pytest.mark.parametrize("chosen", [TWO, *(Active(*bad) for bad in BAD)], ids=repr)
def test_a_custom_pattern_that_breaks_its_promise_is_named(chosen):
    class Own(participation.Participation):
        def _choose(self, round, candidates):
            return chosen

    with pytest.raises(RangeError, match=r"^participation: Own\._choose must return an Active"):
        participation.AtLeast(N, 2, among=Own(N)).active(3)
    for chosen in (Active(np.array([0, N - 1]), np.array([0.5, 1.0])), Active(np.array([], np.int64))):
        assert Own(N).active(3) is chosen
