"""The draws and the laws of each pattern."""

from itertools import combinations
from math import factorial, prod

import numpy as np
import pytest

import fedcore.simulation.participation as module
from fedcore.errors import RangeError
from fedcore.experiment import load_preset
from fedcore.randomness import generator
from fedcore.sampling import bernoulli, weighted_without_replacement, with_replacement, without_replacement
from fedcore.simulation.participation import (
    AtLeast,
    Bernoulli,
    Generated,
    OverSelection,
    Recorded,
    RoundRobin,
    Schedule,
    TimeVarying,
    Trace,
    Uniform,
    Weighted,
    read_traces,
)
from tests.sampling.laws import assert_law, successive

# The draws of each pattern, from the streams that it says: a pattern's rounds stay the same whatever else changes.
#
# A purpose, a seed or a round that went missing on the way would still give clients of the right law, only others.


N, SEED, T = 20, 5, 4
PRESENT = [1, 2, 3, 5, 8, 13]
THERE = Schedule(N, departures={i: 1 for i in range(N) if i not in PRESENT})
WEIGHTS = np.arange(N, dtype=np.float64)


def stream(purpose):
    """The arguments of a draw in round T."""
    return dict(seed=SEED, round=T, purpose=f"participation: {purpose}")


def random(purpose, round=0):
    return generator(SEED, f"participation: {purpose}", round=round)


def test_a_uniform_draw():
    due = np.sort(without_replacement(N, 6, **stream("uniform")))
    assert Uniform(N, 6, seed=SEED).active(T).clients.tolist() == due.tolist()


def test_a_second_and_a_third_of_one_kind_have_streams_of_their_own():
    inner = Uniform(N, 15, seed=SEED)
    second = Uniform(N, 9, seed=SEED, among=Schedule(N, among=inner))
    due = inner.active(T).clients[np.sort(without_replacement(15, 9, **stream("uniform (2)")))]
    assert second.active(T).clients.tolist() == due.tolist()
    due = due[np.sort(without_replacement(9, 4, **stream("uniform (3)")))]
    assert Uniform(N, 4, seed=SEED, among=second).active(T).clients.tolist() == due.tolist()


def test_who_fills_up_a_round():
    due = np.array(PRESENT)[np.sort(without_replacement(len(PRESENT), 3, **stream("at least")))]
    pattern = AtLeast(N, 3, seed=SEED, among=Bernoulli(N, 0.0, among=THERE))
    assert pattern.active(T).clients.tolist() == due.tolist()


def test_chances():
    due = bernoulli(N, np.full(N, 0.4), **stream("bernoulli"))
    assert Bernoulli(N, 0.4, seed=SEED).active(T).clients.tolist() == due.tolist()


def test_draws_by_weights():
    due = np.sort(weighted_without_replacement(WEIGHTS, 6, **stream("weighted")))
    assert Weighted(N, 6, WEIGHTS, seed=SEED).active(T).clients.tolist() == due.tolist()
    drawn = with_replacement(WEIGHTS, 30, **stream("weighted, with replacement"))
    active = Weighted(N, 30, WEIGHTS, replacement=True, seed=SEED).active(T)
    assert np.repeat(active.clients, active.counts).tolist() == sorted(drawn.tolist())


def test_weights_of_a_round():
    a = random("weights", T).uniform(1, 10, N)
    due = np.sort(weighted_without_replacement(a, 6, **stream("time-varying")))
    assert TimeVarying(N, 0.3, seed=SEED).active(T).clients.tolist() == due.tolist()


@pytest.mark.parametrize("phase", ["zero", "random"])
def test_periods_and_phases(phase):
    tau = random("periods").integers(0, 7, N)
    due = np.zeros(N, int) if phase == "zero" else random("phases").integers(0, np.maximum(tau, 1))
    pattern = RoundRobin(N, 6, phase=phase, seed=SEED)
    assert pattern.tau.tolist() == tau.tolist()
    assert pattern.active(T).clients.tolist() == [i for i in range(N) if (T + due[i]) % max(tau[i], 1) == 0]


def test_the_public_codes_periods():
    z = random("half-normal periods").normal(0, 3, N)
    due = [min(round(abs(each)), 4) for each in z.tolist()]
    assert RoundRobin(N, 4, periods="half-normal", seed=SEED).tau.tolist() == due


def test_times_of_answers_and_who_is_asked():
    pattern = OverSelection(N, 4, select=9, spread=0.5, jitter=0.25, seed=SEED)
    normals = random("speeds").standard_normal(N), random("answers", T).standard_normal(N)
    np.testing.assert_allclose(pattern.times(T), np.exp(0.5 * normals[0] + 0.25 * normals[1]), rtol=1e-14)
    asked = without_replacement(N, 9, **stream("over-selection"))
    assert pattern.active(T).clients.tolist() == sorted(sorted(asked.tolist(), key=pattern.times(T).__getitem__)[:4])


def test_traces_and_shares():
    traces = read_traces("flexible")
    pattern = Trace(N, seed=SEED)
    assigned = with_replacement(np.ones(8), N, seed=SEED, round=0, purpose="participation: traces")
    assert pattern.assigned.tolist() == assigned.tolist()
    shares, drawn = np.empty(N), random("shares", T)
    for number, trace in enumerate(traces):
        shares[assigned == number] = trace.draw(drawn, int((assigned == number).sum()))
    np.testing.assert_array_equal(pattern.shares(T), shares)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_every_set_of_k_is_as_likely(k):
    pattern = Uniform(5, k, seed=3)
    sets = list(combinations(range(5), k))
    assert_law([pattern.active(t).clients.tolist() for t in range(4000)], dict.fromkeys(sets, 1 / len(sets)))


def test_every_set_of_those_there_is_as_likely():
    there = [0, 3, 4, 6]
    pattern = Uniform(7, 2, among=Schedule(7, departures={i: 1 for i in range(7) if i not in there}))
    sets = list(combinations(there, 2))
    drawn = [pattern.active(t).clients.tolist() for t in range(1, 3000)]
    assert_law(drawn, dict.fromkeys(sets, 1 / len(sets)))


def test_rounds_are_independent():
    pattern = Uniform(2, 1, seed=8)
    heard = [int(pattern.active(t).clients[0]) for t in range(8001)]
    pairs = np.stack([heard[:-1], heard[1:]], axis=1)[::2]
    assert_law(pairs.tolist(), {(i, j): 0.25 for i in range(2) for j in range(2)})


def test_one_of_very_many_costs_no_more_than_what_is_drawn():
    assert len(Uniform(10**6, 20).active(0)) == 20


def sets_of(law):
    """The law of the sets, from that of the sequences."""
    due = {}
    for order, probability in law.items():
        due[tuple(sorted(order))] = due.get(tuple(sorted(order)), 0) + probability
    return due


@pytest.mark.parametrize("k", [1, 2, 3])
def test_sets_are_those_of_successive_draws(k):
    weights = [1.0, 2.0, 0.0, 5.0, 10.0]
    pattern = Weighted(5, k, weights, seed=k)
    drawn = [pattern.active(t).clients.tolist() for t in range(8000)]
    assert_law(drawn, sets_of(successive(np.array(weights), k)))


def test_inclusion_probabilities_by_hand():
    """Two draws of (1, 2, 3): 0 comes first with 1/6, else second after 1 (1/3 x 1/4) or after 2 (1/2 x 1/3)."""
    pattern, rounds = Weighted(3, 2, [1, 2, 3], seed=1), 12_000
    heard = np.bincount(np.concatenate([pattern.active(t).clients for t in range(rounds)]), minlength=3) / rounds
    due = np.array([1 / 6 + 1 / 12 + 1 / 6, 1 / 3 + 1 / 15 + 1 / 3, 1 / 2 + 1 / 10 + 1 / 4])
    assert abs(due.sum() - 2) < 1e-12
    assert (np.abs(heard - due) < 4.5 * np.sqrt(due * (1 - due) / rounds)).all()


def test_counts_with_replacement_are_multinomial():
    q, k = np.array([0.2, 0.5, 0.3]), 3
    pattern = Weighted(3, k, q.tolist(), replacement=True, seed=4)
    drawn = []
    for t in range(10_000):
        active, counts = pattern.active(t), np.zeros(3, int)
        counts[active.clients] = active.counts
        drawn.append(counts.tolist())
    law = {
        (a, b, k - a - b): factorial(k)
        / prod(factorial(c) for c in (a, b, k - a - b))
        * prod(float(p) ** c for p, c in zip(q, (a, b, k - a - b), strict=True))
        for a in range(k + 1)
        for b in range(k + 1 - a)
    }
    assert_law(drawn, law)


def test_weights_need_not_add_up_to_one():
    for replacement in (False, True):
        one = Weighted(4, 2, [0.1, 0.2, 0.3, 0.4], replacement=replacement)
        four = Weighted(4, 2, [0.4, 0.8, 1.2, 1.6], replacement=replacement)
        assert [one.active(t).clients.tolist() for t in range(50)] == [
            four.active(t).clients.tolist() for t in range(50)
        ]


def test_with_replacement_more_draws_than_clients():
    active = Weighted(3, 50, [1, 1, 2], replacement=True).active(0)
    assert active.clients.tolist() == [0, 1, 2]
    assert active.counts.sum() == 50


def test_a_draw_by_weights_is_among_those_there():
    pattern = Weighted(4, 1, [1, 2, 3, 6], among=Schedule(4, departures={3: 1}), seed=2)
    drawn = [pattern.active(t).clients.tolist() for t in range(1, 6001)]
    assert_law(drawn, {(0,): 1 / 6, (1,): 2 / 6, (2,): 3 / 6})


def test_the_callers_weights_are_copied():
    weights = np.ones(3)
    pattern = Weighted(3, 1, weights)
    weights[:] = 0
    assert pattern.weights.tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="read-only"):
        pattern.weights[0] = 2


def test_enough_clients_are_left_as_they_are():
    inner = Trace(9, first=5, among=Bernoulli(9, 0.4))
    pattern, replaced = AtLeast(9, 3, among=inner), 0
    for t in range(40):
        given, active = inner.active(t), pattern.active(t)
        assert len(active) >= 3
        if len(given) >= 3:
            assert active.clients.tolist() == given.clients.tolist()
            assert active.shares.tolist() == given.shares.tolist()
        else:
            assert len(active) == 3
            assert active.shares is None
            replaced += 1
    assert 0 < replaced < 40


def test_too_few_are_replaced_by_a_uniform_draw():
    pattern = AtLeast(4, 2, among=Bernoulli(4, 0.0))
    drawn = [pattern.active(t).clients.tolist() for t in range(4000)]
    assert_law(drawn, dict.fromkeys(combinations(range(4), 2), 1 / 6))


@pytest.mark.parametrize("tau_max", [20, 50, 100])
def test_the_public_codes_bounded_pattern(tau_max):
    """In phase, short periods, never fewer than two clients."""
    pattern = AtLeast(30, 2, among=RoundRobin(30, tau_max, periods="half-normal"))
    sizes = [len(pattern.active(t)) for t in range(300)]
    assert sizes[0] == 30
    assert min(sizes) >= 2


def test_the_ends_of_the_range() -> None:
    assert Bernoulli(5, 0).active(1).clients.tolist() == []
    assert Bernoulli(5, 1).active(1).clients.tolist() == [0, 1, 2, 3, 4]
    assert Bernoulli(5, [0, 1, 0, 1, 1]).active(1).clients.tolist() == [1, 3, 4]


def test_clients_are_active_with_p_and_independently() -> None:
    clients, rounds, p = 6, 4000, 0.3
    pattern = Bernoulli(clients, p, seed=11)
    mask = np.zeros((rounds, clients))
    for t in range(rounds):
        mask[t, pattern.active(t).clients] = 1
    spread = np.sqrt(p * (1 - p) / rounds)
    np.testing.assert_allclose(mask.mean(0), p, atol=4.5 * spread)
    correlation = np.corrcoef(mask.T) - np.eye(clients)
    assert np.abs(correlation).max() < 4.5 / np.sqrt(rounds)
    after = [np.corrcoef(mask[:-1, i], mask[1:, i])[0, 1] for i in range(clients)]
    assert np.abs(after).max() < 4.5 / np.sqrt(rounds)


def test_each_client_has_its_own_p() -> None:
    p, rounds = np.array([0.1, 0.5, 0.9, 0.0, 1.0]), 4000
    pattern = Bernoulli(5, p.tolist(), seed=2)
    heard = np.bincount(np.concatenate([pattern.active(t).clients for t in range(rounds)]), minlength=5) / rounds
    assert (np.abs(heard - p) <= 4.5 * np.sqrt(p * (1 - p) / rounds)).all()


def test_one_p_for_all_is_that_p_for_each() -> None:
    one, each = Bernoulli(40, 0.3, seed=6), Bernoulli(40, [0.3] * 40, seed=6)
    for t in range(20):
        np.testing.assert_array_equal(one.active(t).clients, each.active(t).clients)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.3, 0.5, 0.9, 1.0])
def test_the_public_codes_five_levels(p: float) -> None:
    """p + (i mod 5) (1 - p) / 4; the last level is exactly 1."""
    pattern = Bernoulli(12, p, levels=5)
    due = [p + (i % 5) * (1 - p) / 4 for i in range(12)]
    np.testing.assert_allclose(pattern.p, due, rtol=1e-15)
    assert pattern.p[4] == pattern.p[9] == 1
    assert all({4, 9} <= set(pattern.active(t).clients.tolist()) for t in range(50))


def test_two_levels_are_the_chance_and_one() -> None:
    np.testing.assert_array_equal(Bernoulli(4, 0.25, levels=2).p, [0.25, 1, 0.25, 1])


def test_chances_may_change_with_the_round() -> None:
    """p_i^t, for all or for each, from the rounds of a table on; and the same draws as without one."""
    rounds, each = 3000, [0.9, 0.1, 0.5, 1.0]
    pattern = Bernoulli(4, {"0": 0.2, 3000: each}, seed=3)
    for began, p in ((0, np.full(4, 0.2)), (3000, np.array(each))):
        heard = np.concatenate([pattern.active(t).clients for t in range(began, began + rounds)])
        mean = np.bincount(heard, minlength=4) / rounds
        assert (np.abs(mean - p) <= 4.5 * np.sqrt(p * (1 - p) / rounds)).all()
    alone = Bernoulli(4, each, seed=3)
    assert all((pattern.active(t).clients == alone.active(t).clients).all() for t in range(3000, 3020))
    assert "3000" in repr(pattern)


@pytest.mark.parametrize("p", [{}, {1: 0.5}, {0: 0.5, "0": 0.5}, {0: 0.5, -1: 0.5}, {0: 0.5, "x": 0.1}, {0: 1.5}])
def test_chances_that_say_too_little_are_refused(p: object) -> None:
    with pytest.raises(RangeError, match="p"):
        Bernoulli(4, p)


def test_a_table_may_hold_them() -> None:
    changed = ["participation.p={0 = 0.2, 50 = 0.4}", "partition.clients=30"]
    assert load_preset("mimic/figure7", changed).participation.options["p"] == {"0": 0.2, "50": 0.4}


@pytest.mark.parametrize(
    ("clients", "k", "select"), [(100, 10, 13), (100, 1, 2), (10, 8, 10), (10, 10, 10), (50, 20, 26)]
)
def test_a_third_more_are_asked_unless_it_is_said(clients, k, select):
    assert OverSelection(clients, k).select == select


def test_the_first_k_of_those_asked_are_kept():
    pattern = OverSelection(30, 4, select=9, seed=3)
    for t in range(30):
        asked = without_replacement(30, 9, seed=3, round=t, purpose="participation: over-selection")
        times = pattern.times(t)
        fastest = sorted(asked.tolist(), key=lambda i, times=times: times[i])[:4]
        assert pattern.active(t).clients.tolist() == sorted(fastest)


def test_of_two_that_answer_at_once_the_one_of_the_lower_number_is_kept():
    pattern = OverSelection(100, 10, select=100, spread=0.0, jitter=1e-16)
    times = pattern.times(0)
    assert len(set(times.tolist())) < 10
    fastest = sorted(range(100), key=lambda i: (times[i], i))[:10]
    assert pattern.active(0).clients.tolist() == sorted(fastest)


def test_without_over_selection_it_is_a_uniform_draw():
    pattern = OverSelection(8, 3, select=3)
    heard = np.bincount(np.concatenate([pattern.active(t).clients for t in range(4000)]), minlength=8) / 4000
    assert (np.abs(heard - 3 / 8) < 4.5 * np.sqrt(3 / 8 * 5 / 8 / 4000)).all()
    assert len(Uniform(8, 3).active(0)) == len(pattern.active(0))


def test_who_comes_late_is_not_waited_for():
    waiting, hurried = OverSelection(40, 10, seed=1), OverSelection(40, 10, seed=1, deadline=1.0)
    sizes = set()
    for t in range(40):
        in_time = waiting.active(t).clients[waiting.times(t)[waiting.active(t).clients] <= 1]
        assert hurried.active(t).clients.tolist() == in_time.tolist()
        sizes.add(len(in_time))
    assert min(sizes) < 10
    assert len(OverSelection(40, 10, deadline=1e-9).active(0)) == 0


def test_fast_clients_are_kept_more_often():
    pattern, rounds = OverSelection(20, 5, select=10, jitter=0.0, seed=5), 1500
    order = np.argsort(pattern.times(0))
    np.testing.assert_array_equal(pattern.times(0), pattern.times(9))
    heard = np.bincount(np.concatenate([pattern.active(t).clients for t in range(rounds)]), minlength=20)[order]
    # The five fastest of all are kept whenever they are asked; the five slowest of all are never the first of ten.
    np.testing.assert_allclose(heard[:5] / rounds, 0.5, atol=4.5 * np.sqrt(0.25 / rounds))
    assert heard[-5:].sum() == 0


def test_the_law_of_the_times():
    pattern = OverSelection(20_000, 1, spread=0.4, jitter=0.3, seed=2)
    one, other = np.log(pattern.times(0)), np.log(pattern.times(1))
    for logs in (one, other):
        assert abs(logs.mean()) < 4.5 * 0.5 / np.sqrt(20_000)
        assert abs(logs.std() - 0.5) < 0.012
    assert abs(np.corrcoef(one, other)[0, 1] - 0.16 / 0.25) < 0.025


def test_equal_times_keep_the_lowest_numbers_and_the_deadline_itself_is_in_time():
    """Without a spread and jitter everybody answers at 1."""
    pattern = OverSelection(400, 100, select=200, spread=0, jitter=0, deadline=1.0)
    asked = without_replacement(400, 200, seed=0, round=3, purpose="participation: over-selection")
    assert (pattern.times(3) == 1).all()
    assert pattern.active(3).clients.tolist() == sorted(asked.tolist())[:100]


def test_of_those_who_are_as_fast_the_first_by_id_are_kept():
    pattern = OverSelection(60, 5, select=40, spread=0, jitter=0)
    for t in range(5):
        asked = without_replacement(60, 40, seed=0, round=t, purpose="participation: over-selection")
        assert pattern.active(t).clients.tolist() == sorted(asked)[:5]


@pytest.fixture
def periods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Periods 0, 1, 2, 3 and phases 0, 0, 1, 2 instead of random ones."""

    class Fixed:
        def __init__(self, seed: int, purpose: str, round: int) -> None:
            self.answer = np.array([0, 1, 2, 3] if "periods" in purpose else [0, 0, 1, 2])

        def integers(self, *_: object) -> np.ndarray:
            return self.answer

        def normal(self, mean: float, stdev: float, count: int) -> np.ndarray:
            assert (mean, stdev, count) == (0, 3, 4)
            return np.array([-0.4, 1.6, -2.4, 7.0])

    monkeypatch.setattr(module, "generator", Fixed)


@pytest.mark.usefixtures("periods")
def test_by_hand_in_phase() -> None:
    pattern = RoundRobin(4, 3)
    assert [pattern.active(t).clients.tolist() for t in range(7)] == [
        [0, 1, 2, 3],
        [0, 1],
        [0, 1, 2],
        [0, 1, 3],
        [0, 1, 2],
        [0, 1],
        [0, 1, 2, 3],
    ]


@pytest.mark.usefixtures("periods")
def test_by_hand_with_phases() -> None:
    pattern = RoundRobin(4, 3, phase="random")
    assert [pattern.active(t).clients.tolist() for t in range(4)] == [[0, 1], [0, 1, 2, 3], [0, 1], [0, 1, 2]]


def test_everyone_is_there_in_round_0_when_in_phase() -> None:
    assert len(RoundRobin(50, 20).active(0)) == 50
    assert len(RoundRobin(50, 20, phase="random").active(0)) < 50


def test_periods_are_uniform_and_the_same_for_both_phases() -> None:
    pattern = RoundRobin(6000, 3, seed=2)
    np.testing.assert_allclose(np.bincount(pattern.tau) / 6000, 0.25, atol=4.5 * np.sqrt(0.25 * 0.75 / 6000))
    np.testing.assert_array_equal(RoundRobin(6000, 3, seed=2, phase="random").tau, pattern.tau)


def test_a_client_comes_exactly_once_a_period() -> None:
    pattern = RoundRobin(40, 5, phase="random", seed=4)
    heard = np.zeros(40)
    for t in range(60):  # 60 is a multiple of 1, 2, 3, 4, 5
        heard[pattern.active(t).clients] += 1
    np.testing.assert_array_equal(heard, 60 // np.maximum(pattern.tau, 1))


@pytest.mark.usefixtures("periods")
def test_the_public_codes_periods_by_hand() -> None:
    assert RoundRobin(4, 5, periods="half-normal").tau.tolist() == [0, 2, 2, 5]


def test_the_public_codes_periods_are_short_whatever_tau_max() -> None:
    short, long = (RoundRobin(4000, tau_max, periods="half-normal", seed=3) for tau_max in (4, 50))
    np.testing.assert_array_equal(short.tau, np.minimum(long.tau, 4))
    within = [0.1324, 0.2506, 0.2124, 0.1613]  # P(round(|z|) = 0, 1, 2, 3), z of standard deviation 3
    np.testing.assert_allclose(np.bincount(long.tau)[:4] / 4000, within, atol=4.5 * np.sqrt(0.25 * 0.75 / 4000))
    assert long.tau.max() < 15


def test_by_hand():
    pattern = Schedule(4, arrivals={1: 2, 2: 3}, departures={0: 1, 2: 5})
    due = [[0, 3], [3], [1, 3], [1, 2, 3], [1, 2, 3], [1, 3], [1, 3]]
    assert [pattern.active(t).clients.tolist() for t in range(7)] == due
    assert [pattern.present(t).tolist() for t in range(7)] == due
    assert pattern.active(10**12).clients.tolist() == [1, 3]


def test_clients_may_be_named_as_files_name_them():
    written, given = (
        Schedule(3, arrivals={"2": 4}, departures={"0": 1}),
        Schedule(3, arrivals={2: 4}, departures={0: 1}),
    )
    assert (written.arrivals, written.departures) == (given.arrivals, given.departures) == ({2: 4}, {0: 1})
    for t in range(6):
        np.testing.assert_array_equal(written.active(t).clients, given.active(t).clients)


@pytest.mark.parametrize("key", ["-1", "1.0", " 1", "²", "", 1.0, None])
def test_what_is_no_number_of_a_client(key):
    with pytest.raises(ValueError, match=r"arrivals: client: expected an integer in 0\.\.2"):
        Schedule(3, arrivals={key: 4})


def test_arriving_in_round_0_is_being_there_from_the_start():
    assert Schedule(2, arrivals={0: 0}).active(0).clients.tolist() == [0, 1]


def test_everybody_may_be_away():
    pattern = Schedule(2, arrivals={0: 3, 1: 4})
    assert [len(pattern.active(t)) for t in range(5)] == [0, 0, 0, 1, 2]


@pytest.mark.parametrize(("clients", "share", "k"), [(30, 0.1, 3), (30, 0.5, 15), (5, 0.01, 1), (7, 1, 7)])
def test_the_number_of_active_clients(clients: int, share: float, k: int) -> None:
    pattern = TimeVarying(clients, share)
    assert {len(pattern.active(t)) for t in range(20)} == {k}


def test_the_weights_are_drawn_anew_each_round() -> None:
    pattern, rounds = TimeVarying(5, 0.2, seed=1), 4000
    heard = np.bincount([int(pattern.active(t).clients[0]) for t in range(rounds)], minlength=5)
    np.testing.assert_allclose(heard / rounds, 0.2, atol=4.5 * np.sqrt(0.2 * 0.8 / rounds))


def test_inclusion_within_a_round_follows_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights that are given instead of drawn, the sets are those of successive draws."""

    class Given:
        def uniform(self, least: float, most: float, _: int) -> np.ndarray:
            assert (least, most) == (1, 10)  # which the sets themselves cannot show
            return np.array([1.0, 2.0, 5.0, 10.0])

    monkeypatch.setattr(module, "generator", lambda *_, **__: Given())
    pattern = TimeVarying(4, 0.5, seed=7)
    law: dict[tuple[int, ...], float] = {}
    for order, probability in successive(np.array([1.0, 2.0, 5.0, 10.0]), 2).items():
        law[tuple(sorted(order))] = law.get(tuple(sorted(order)), 0) + probability
    assert_law([pattern.active(t).clients.tolist() for t in range(6000)], law)


RECORDED = [Recorded("a", (0.0, 0.5, 1.0)), Recorded("b", (0.25, 0.75))]


def test_devices_get_one_of_the_first_traces_with_equal_probability():
    pattern = Trace(8000, first=4, seed=1)
    assert [trace.name for trace in pattern.traces] == ["1", "2", "3", "4"]
    np.testing.assert_allclose(np.bincount(pattern.assigned) / 8000, 0.25, atol=4.5 * np.sqrt(3 / 16 / 8000))
    assert Trace(5, first=2, assign="order").assigned.tolist() == [0, 1, 0, 1, 0]


def test_the_first_trace_does_all_steps_always():
    for t in range(5):
        assert Trace(6, first=1).active(t).steps(7).tolist() == [7] * 6


@pytest.mark.parametrize("trace", range(5))
def test_traces_one_to_five_never_do_nothing(trace):
    pattern = Trace(4000, Trace(1).traces[trace : trace + 1])
    assert len(pattern.active(0)) == 4000
    assert pattern.active(0).steps(5).min() >= 1


@pytest.mark.parametrize("trace", range(5, 8))
def test_traces_six_to_eight_can_do_nothing_and_are_seldom_complete(trace):
    pattern = Trace(40_000, Trace(1).traces[trace : trace + 1])
    active = pattern.active(0)
    assert len(active) < 40_000
    assert 0 < (active.shares == 1).mean() < 0.1


def test_shares_are_independent_over_devices_and_rounds():
    pattern = Trace(2000, Trace(1).traces[5:6], seed=4)
    one, other = pattern.shares(1), pattern.shares(2)
    for a, b in ((one, other), (one[1:], one[:-1])):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4.5 / np.sqrt(1999)


def test_recorded_shares_are_sampled_row_by_row():
    pattern = Trace(6000, RECORDED[:1])
    shares = pattern.shares(0)
    np.testing.assert_allclose([np.mean(shares == s) for s in (0, 0.5, 1)], 1 / 3, atol=4.5 * np.sqrt(2 / 9 / 6000))
    active = pattern.active(0)
    np.testing.assert_array_equal(active.clients, np.flatnonzero(shares))
    np.testing.assert_array_equal(active.shares, shares[active.clients])


def test_recorded_traces_are_replayed_as_they_were_measured():
    pattern = Trace(3, RECORDED, assign="order", draw="replay")
    due = [[0, 0.25, 0], [0.5, 0.75, 0.5], [1, 0.25, 1], [0, 0.75, 0], [0.5, 0.25, 0.5], [1, 0.75, 1], [0, 0.25, 0]]
    assert [pattern.shares(t).tolist() for t in range(7)] == due
    assert [pattern.active(t).clients.tolist() for t in range(2)] == [[1], [0, 1, 2]]
    assert pattern.active(0).steps(8).tolist() == [2]


def test_each_device_follows_its_own_trace():
    pattern = Trace(
        3000, [Generated("slow", 0.2, 0.05), Generated("fast", 0.8, 0.05), Recorded("half", (0.5,))], seed=1
    )
    shares = pattern.shares(3)
    for number, (mean, stdev) in enumerate([(0.2, 0.05), (0.8, 0.05), (0.5, 0)]):
        its = shares[pattern.assigned == number]
        assert abs(its.mean() - mean) <= 4.5 * 0.05 / np.sqrt(len(its))
        assert abs(its.std() - stdev) < 0.006
