"""Every promise over every pattern: a new one is a row in the registry and in OPTIONS."""

from collections.abc import Callable

import numpy as np
import pytest

from fedcore.errors import FedcoreError, RangeError, UnknownNameError
from fedcore.participation import (
    REGISTRY,
    Active,
    Always,
    AtLeast,
    Bernoulli,
    OverSelection,
    Participation,
    Recorded,
    RoundRobin,
    Schedule,
    TimeVarying,
    Trace,
    Uniform,
    Weighted,
    named,
)

OPTIONS = {
    "Always": {},
    "AtLeast": {"least": 3, "among": {"name": "Bernoulli", "p": 0.1}},
    "Bernoulli": {"p": 0.4},
    "OverSelection": {"k": 5, "deadline": 1.0},
    "RoundRobin": {"tau_max": 6, "phase": "random"},
    "Schedule": {"arrivals": {3: 2, 4: 4}, "departures": {3: 5, 17: 1}},
    "TimeVarying": {"share": 0.3},
    "Trace": {"first": 7},
    "Uniform": {"k": 6},
    "Weighted": {"k": 6, "weights": list(range(20)), "replacement": True},
}
NOT_RANDOM = {"Always", "Schedule"}
RANDOM = [name for name in OPTIONS if name not in NOT_RANDOM]


def make(name: str, **options: object) -> Participation:
    return named(name, 20, **OPTIONS[name], **options)


def plain(active: Active) -> list[object]:
    return [None if part is None else part.tolist() for part in (active.clients, active.shares, active.counts)]


def test_every_pattern_is_tested_here() -> None:
    assert OPTIONS.keys() == REGISTRY.keys()


@pytest.mark.parametrize("name", OPTIONS)
def test_a_pattern_is_a_documented_class_of_its_own_name(name: str) -> None:
    assert REGISTRY[name].__name__ == name
    assert REGISTRY[name].__doc__


@pytest.mark.parametrize("name", OPTIONS)
def test_a_round_is_the_same_in_any_order_of_calls(name: str) -> None:
    forward, backward = make(name, seed=3), make(name, seed=3)
    there = [plain(forward.active(t)) for t in range(12)]
    assert [plain(backward.active(t)) for t in reversed(range(12))][::-1] == there
    assert [plain(forward.active(t)) for t in range(12)] == there


@pytest.mark.parametrize("name", OPTIONS)
def test_answers_are_sorted_distinct_clients_that_do_something(name: str) -> None:
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
def test_rounds_and_seeds_differ(name: str) -> None:
    sets = [str(plain(make(name, seed=seed).active(t))) for seed in (0, 1) for t in (1, 2)]
    assert len(set(sets)) == 4


@pytest.mark.parametrize("name", RANDOM)
def test_first_round_all_changes_round_0_only(name: str) -> None:
    everyone, ordinary = make(name, first_round="all"), make(name)
    assert plain(everyone.active(0)) == [list(range(20)), None, None]
    assert plain(ordinary.active(0)) != [list(range(20)), None, None]
    for t in range(1, 6):
        assert plain(everyone.active(t)) == plain(ordinary.active(t))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_pattern_keeps_what_all_patterns_are_given(name: str) -> None:
    among = Always(20)
    options = {key: value for key, value in OPTIONS[name].items() if key != "among"}
    pattern = named(name, 20, seed=7, first_round="all", among=among, **options)
    assert (pattern.clients, pattern.seed, pattern.first_round) == (20, 7, "all")
    assert pattern.among is among


def test_a_pattern_that_is_made_here_to_choose_from_has_the_same_seed_and_first_round() -> None:
    pattern = named("Uniform", 9, k=2, seed=7, first_round="all", among="Always")
    assert (pattern.among.seed, pattern.among.first_round) == (7, "all")
    own = named("Uniform", 9, k=2, seed=7, among={"name": "Bernoulli", "p": 0.5, "seed": 8})
    assert (own.among.seed, own.among.first_round) == (8, None)


@pytest.mark.parametrize(
    "vector",
    [
        lambda: Bernoulli(6, 0.2, levels=5).p,
        lambda: Bernoulli(2, [0.2, 0.3]).p,
        lambda: RoundRobin(3, 2).tau,
        lambda: Trace(3).assigned,
        lambda: Trace(3, assign="order").assigned,
        lambda: Weighted(2, 1, [1, 2]).weights,
    ],
)
def test_what_a_pattern_says_of_its_clients_is_read_only(vector: Callable[[], np.ndarray]) -> None:
    with pytest.raises(ValueError, match="read-only"):
        vector()[0] = 0


def test_a_pattern_shows_what_it_was_made_of() -> None:
    pattern = Schedule(3, arrivals={1: 2}, among=Uniform(3, 2, seed=3))
    assert repr(pattern) == "Schedule(clients=3, arrivals={1: 2}, departures={}, among=Uniform(clients=3, k=2, seed=3))"


@pytest.mark.parametrize("name", OPTIONS)
def test_nobody_to_choose_from_is_nobody_chosen(name: str) -> None:
    options = {key: value for key, value in OPTIONS[name].items() if key != "among"}
    nobody = Schedule(20, departures=dict.fromkeys(range(20), 1))
    active = named(name, 20, among=nobody, **options).active(1)
    assert len(active) == 0
    assert active.clients.dtype == np.int64


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Bernoulli(0, 0.5), "clients: expected an integer in 1"),
        (lambda: Always(2.0), "clients: expected an int"),
        (lambda: Bernoulli(3, 0.5, seed=-1), "seed: expected"),
        (lambda: Bernoulli(3, 0.5, first_round="none"), "first_round: expected"),
        (lambda: Bernoulli(3, 0.5, among=Always(4)), "among: expected a pattern of 3 clients, got one of 4"),
        (lambda: Bernoulli(3, 0.5, among="Always"), "among: expected a participation pattern, got 'Always'"),
        (lambda: Bernoulli(3, 0.5).active(-1), "round: expected"),
        (lambda: Bernoulli(3, 0.5).active(0.5), "round: expected"),
        (lambda: Bernoulli(3, 1.01), r"p: expected a number in \[0, 1\], got 1.01"),
        (lambda: Bernoulli(3, float("nan")), "p: expected"),
        (lambda: Bernoulli(3, "1"), "p: expected a number"),
        (lambda: Bernoulli(3, True), "p: expected a number"),
        (lambda: Bernoulli(3, [0.1, 0.2]), r"p: expected 3 numbers, one a client, got shape \[2\]"),
        (lambda: Bernoulli(3, [0.1, 0.2, -0.1]), r"p\[2\]: expected a number in \[0, 1\], got -0.1"),
        (lambda: Bernoulli(3, [0.1, 0.2, 0.3], levels=5), "levels: expected 1 where there is a p for each client"),
        (lambda: Bernoulli(3, [0.1, 0.2, 0.3], levels=2), "levels: expected 1 .*, got 2"),
        (lambda: Bernoulli(3, {0: 0.5, 10: 1.5}), r"p\[10\]: expected a number in \[0, 1\], got 1.5"),
        (lambda: Bernoulli(3, 0.1, levels=0), "levels: expected"),
        (lambda: RoundRobin(3, -1), "tau_max: expected"),
        (lambda: RoundRobin(3, 2, phase="zeros"), "phase: 'zeros' is unknown; did you mean 'zero'"),
        (lambda: RoundRobin(3, 2, periods="normal"), "periods: 'normal' is unknown; did you mean 'half-normal'"),
        (lambda: TimeVarying(3, 0), "share: expected"),
        (lambda: TimeVarying(3, 1.5), "share: expected"),
        (lambda: Uniform(3, 0), "k: expected an integer in 1..3, got 0"),
        (lambda: Uniform(3, 4), "k: expected an integer in 1..3, got 4"),
        (lambda: Weighted(3, 3, [1, 0, 1]), "k: expected an integer in 1..2, got 3"),
        (lambda: Weighted(3, 0, [1, 0, 1], replacement=True), "k: expected"),
        (lambda: Weighted(3, 1, [0, 0, 0]), "weights: expected a finite sum > 0, got 0.0"),
        (lambda: Weighted(2, 1, [1e308, 1e308]), "weights: expected a finite sum > 0, got inf"),
        (lambda: Weighted(3, 1, [1, 2]), "weights: expected 3 numbers"),
        (lambda: Weighted(3, 1, [1, 2, float("inf")]), r"weights\[2\]: expected"),
        (lambda: Weighted(3, 1, "abc"), r"weights: expected 3 numbers"),
        (lambda: AtLeast(3, 4), "least: expected"),
        (lambda: OverSelection(10, 11), "k: expected"),
        (lambda: OverSelection(10, 5, select=4), "select: expected an integer in 5..10, got 4"),
        (lambda: OverSelection(10, 5, deadline=0), "deadline: expected"),
        (lambda: OverSelection(10, 5, spread=-1), "spread: expected"),
        (lambda: OverSelection(10, 5, jitter=float("nan")), "jitter: expected"),
        (lambda: Schedule(3, arrivals={3: 1}), "arrivals: client: expected an integer in 0..2, got 3"),
        (lambda: Schedule(3, arrivals={"x": 1}), "arrivals: client: expected an integer in 0..2, got 'x'"),
        (lambda: Schedule(3, arrivals={1: 1, "1": 2}), "arrivals: expected client 1 once, got it twice"),
        (lambda: Schedule(3, arrivals={1: -1}), "arrivals: client 1: expected an integer in 0"),
        (lambda: Schedule(3, departures={1: 0}), "departures: expected client 1 to leave after round 0"),
        (lambda: Schedule(3, arrivals={1: 9}, departures={1: 9}), "departures: .* after round 9, its first, got 9"),
        (lambda: Schedule(3, departures={3: 1}), "departures: client: expected an integer in 0..2, got 3"),
        (lambda: Trace(3, [Recorded("half", (0.5,)), 0.5]), r"traces: expected at least one .* got \[Recorded"),
        (lambda: Trace(3, first=9), "first: expected an integer in 1..8, got 9"),
        (lambda: Trace(3, []), "traces: expected at least one"),
        (lambda: Trace(3, 5), "traces: expected at least one trace, and nothing else, got 5"),
        (lambda: Schedule(3, arrivals=[1]), r"arrivals: expected clients and their rounds, got \[1\]"),
        (lambda: Trace(3, [0.5]), "traces: expected at least one trace, and nothing else"),
        (lambda: Trace(3, "flexibel"), "traces: 'flexibel' is unknown; did you mean 'flexible'"),
        (lambda: Trace(3, assign="randomly"), "assign: 'randomly' is unknown"),
        (lambda: Trace(3, draw="replays"), "draw: 'replays' is unknown"),
        (lambda: Trace(3, draw="replay"), "draw: expected 'sample', since trace '1' is not recorded"),
    ],
)
def test_an_argument_out_of_range_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(FedcoreError, match=rf"^{message}"):
        call()


@pytest.mark.parametrize(
    ("make", "ends", "beyond"),
    [
        (lambda end: Always(end), (1, 2**53), (0, 2**53 + 1)),
        (lambda end: Always(1, seed=end), (0, 2**64 - 1), (-1, 2**64)),
        (lambda end: Always(1).active(end), (0, 2**63 - 1), (-1, 2**63)),
        (lambda end: AtLeast(3, end), (1, 3), (0, 4)),
        (lambda end: Bernoulli(3, 0.1, levels=end), (1, 2**31), (0, 2**31 + 1)),
        (lambda end: Bernoulli(3, {0: 0.1, end: 0.2}), (1, 2**53), (-1, 2**53 + 1)),
        (lambda end: OverSelection(3, end), (1, 3), (0, 4)),
        (lambda end: OverSelection(3, 2, select=end), (2, 3), (1, 4)),
        (lambda end: OverSelection(3, 2, spread=end), (0, 10), (-1e-9, 10.1)),
        (lambda end: OverSelection(3, 2, jitter=end), (0, 10), (-1e-9, 10.1)),
        (lambda end: OverSelection(3, 2, deadline=end), (1e-9, float("inf")), (0, -1)),
        (lambda end: RoundRobin(3, end), (0, 2**31), (-1, 2**31 + 1)),
        (lambda end: Schedule(3, arrivals={end: 1}), (0, 2), (-1, 3)),
        (lambda end: Schedule(3, arrivals={1: end}), (0, 2**53), (-1, 2**53 + 1)),
        (lambda end: Schedule(3, departures={1: end}), (1, 2**53), (-1, 0, 2**53 + 1)),
        (lambda end: TimeVarying(3, end), (1e-9, 1), (0, 1.001)),
        (lambda end: Trace(3, first=end), (1, 8), (0, 9)),
        (lambda end: Uniform(3, end), (1, 3), (0, 4)),
        (lambda end: Weighted(3, end, [1, 0, 2]), (1, 2), (0, 3)),
        (lambda end: Weighted(3, end, [1, 0, 2], replacement=True), (1, 2**31), (0, 2**31 + 1)),
    ],
)
def test_a_range_holds_its_ends_and_nothing_beyond(
    make: Callable[[float], object], ends: tuple[float, ...], beyond: tuple[float, ...]
) -> None:
    for end in ends:
        make(end)
    for end in beyond:
        with pytest.raises(RangeError):
            make(end)


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"participation: 'Bernouli' is unknown; did you mean 'Bernoulli'"):
        named("Bernouli", 3, p=0.5)
    with pytest.raises(UnknownNameError, match=r"participation: 'Unifrom' is unknown; did you mean 'Uniform'"):
        named("Bernoulli", 3, p=0.5, among={"name": "Unifrom"})
    with pytest.raises(RangeError, match=r"among: expected the name of a pattern and its options, got \{'k': 2\}"):
        named("Bernoulli", 3, p=0.5, among={"k": 2})
