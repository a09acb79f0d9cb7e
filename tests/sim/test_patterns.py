"""The random numbers and the laws of each pattern."""

import numpy as np
import pytest

import fedcore.sim.participation as module
from fedcore import RoundPolicy
from fedcore.errors import FedcoreError, RangeError
from fedcore.runtime import generator
from fedcore.sampling import bernoulli, weighted_without_replacement, with_replacement, without_replacement
from fedcore.sim import participation
from fedcore.sim.experiment import load_preset

# The streams of each pattern. A changed purpose, seed or round would give clients with the same law, but other clients.


N, SEED, T = 20, 5, 4
PRESENT = [1, 2, 3, 5, 8, 13]
SOME = participation.Schedule(N, departures={i: 1 for i in range(N) if i not in PRESENT})
WEIGHTS = np.arange(N, dtype=np.float64)


def stream(purpose):
    """The arguments of a draw in round T."""
    return dict(seed=SEED, round=T, purpose=f"participation: {purpose}")


def random(purpose, round=0):
    return generator(SEED, f"participation: {purpose}", round=round)


def test_uniform_draws_from_its_stream():
    expected = np.sort(without_replacement(N, 6, **stream("uniform")))
    assert participation.Uniform(N, 6, seed=SEED).active(T).clients.tolist() == expected.tolist()


def test_patterns_of_one_class_have_different_streams():
    inner = participation.Uniform(N, 15, seed=SEED)
    second = participation.Uniform(N, 9, seed=SEED, among=participation.Schedule(N, among=inner))
    expected = inner.active(T).clients[np.sort(without_replacement(15, 9, **stream("uniform (2)")))]
    assert second.active(T).clients.tolist() == expected.tolist()
    expected = expected[np.sort(without_replacement(9, 4, **stream("uniform (3)")))]
    assert participation.Uniform(N, 4, seed=SEED, among=second).active(T).clients.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", [participation.Bernoulli, participation.Fluctuating])
def test_a_subclass_has_another_stream_than_an_inner_pattern_of_its_class(kind):
    class Own(kind):
        pass

    pairs = (kind, kind), (Own, kind), (kind, Own), (Own, Own)
    patterns = [outer(N, 0.7, seed=SEED, among=inner(N, 0.7, seed=SEED)) for outer, inner in pairs]
    assert len({tuple(pattern.active(T).clients) for pattern in patterns}) == 1


def test_at_least_draws_from_its_stream():
    expected = np.array(PRESENT)[np.sort(without_replacement(len(PRESENT), 3, **stream("at least")))]
    pattern = participation.AtLeast(N, 3, seed=SEED, among=participation.Bernoulli(N, 0.0, among=SOME))
    assert pattern.active(T).clients.tolist() == expected.tolist()


@pytest.mark.parametrize("p", [np.full(N, 0.4), np.linspace(0, 1, N)], ids=["one p", "a p for each client"])
def test_bernoulli_draws_from_its_stream(p):
    expected = bernoulli(N, p, **stream("bernoulli"))
    assert participation.Bernoulli(N, p.tolist(), seed=SEED).active(T).clients.tolist() == expected.tolist()
    if len(set(p)) == 1:
        assert participation.Bernoulli(N, float(p[0]), seed=SEED).active(T).clients.tolist() == expected.tolist()


def test_fluctuating_draws_from_its_stream_with_the_round_s_chances():
    """p f(t), f = 0.3 sin(2 pi t / 20) + 0.7: 0.7, 1, 0.7 and 0.4 at the quarters of a period."""
    pattern, p = participation.Fluctuating(N, WEIGHTS / N, seed=SEED), WEIGHTS / N
    expected = bernoulli(N, p * (0.3 * np.sin(2 * np.pi * T / 20) + 0.7), **stream("fluctuating"))
    assert pattern.active(T).clients.tolist() == expected.tolist()
    for t, f in ((0, 0.7), (5, 1.0), (10, 0.7), (15, 0.4), (20, 0.7), (10**9 + 5, 1.0)):
        np.testing.assert_allclose(pattern.chances(t), p * f, rtol=1e-12)
    interleaved = participation.Fluctuating(N, WEIGHTS / N, least=0.09)
    np.testing.assert_allclose(interleaved.chances(15), np.where(p * 0.4 < 0.09, 0, p * 0.4), rtol=1e-12)


def test_a_staircase_by_hand():
    pattern = participation.Fluctuating(1, {0: 1.0, 4: 0.5}, shape="staircase", period=3, depth=0.25)
    assert [pattern.chances(t).item() for t in range(6)] == [1, 1, 0.75, 1, 0.5, 0.375]


def test_markov_draws_from_its_streams():
    up_down = np.linspace(0.1, 1, N), np.linspace(1, 0, N)
    up = random("markov").random(N) < up_down[0] / (up_down[0] + up_down[1])
    for t in range(1, T + 1):
        u = random("markov", t).random(N)
        up = np.where(up, u < 1 - up_down[1], u < up_down[0])
    found = participation.Markov(N, *map(list, up_down), seed=SEED).active(T).clients
    assert found.tolist() == np.flatnonzero(up).tolist()


def test_markovs_stationary_law_and_absences():
    """In each round, p_up / (p_up + p_down) of the clients are up; an absence lasts 1 / p_up rounds on average."""
    clients, rounds, p_up, p_down = 2000, 60, 0.2, 0.05
    pattern = participation.Markov(clients, p_up, p_down, seed=1)
    up = np.zeros((rounds, clients), bool)
    for t in range(rounds):
        up[t, pattern.active(t).clients] = True
    assert (np.abs(up.mean(axis=1) - 0.8) < 4.5 * np.sqrt(0.8 * 0.2 / clients)).all()
    comes = (~up[:-1] & up[1:]).sum() / (~up[:-1]).sum()
    goes = (up[:-1] & ~up[1:]).sum() / up[:-1].sum()
    assert (comes, goes) == (pytest.approx(p_up, rel=0.05), pytest.approx(p_down, rel=0.05))


def test_chances_by_class():
    labels = [np.array([0, 0, 1, 3]), np.array([2, 3]), np.array([3])]
    u = random("class popularity").random(4) * [1, 1, 0.5, 0.5]
    due = [u[0] / 2 + u[1] / 4 + u[3] / 4, u[2] / 2 + u[3] / 2, u[3]]
    np.testing.assert_allclose(participation.class_chances(labels, seed=SEED), due, rtol=1e-12)
    one, other = (
        participation.class_chances(labels, seed=seed, popularity="dirichlet", mean=0.3, least=0.02) for seed in (1, 2)
    )
    assert (one != other).any()
    assert one.min() >= 0.02
    assert one.mean() == pytest.approx(0.3, abs=0.03)  # but for the least
    pattern = participation.named(
        "Uniform", 3, k=2, seed=SEED, labels=labels, among={"name": "Bernoulli", "p": {"popularity": "halves"}}
    )
    np.testing.assert_allclose(pattern.among.p, due, rtol=1e-12)


@pytest.mark.parametrize(("among", "ids"), [(None, list(range(N))), (SOME, PRESENT)], ids=["all", "present"])
def test_weighted_and_time_varying_draw_from_their_streams(among, ids):
    ids = np.array(ids)
    drawn = ids[np.sort(weighted_without_replacement(WEIGHTS[ids], 3, **stream("weighted")))]
    assert participation.Weighted(N, 3, WEIGHTS, seed=SEED, among=among).active(T).clients.tolist() == drawn.tolist()
    drawn = ids[with_replacement(WEIGHTS[ids], 30, **stream("weighted, with replacement"))]
    active = participation.Weighted(N, 30, WEIGHTS, replacement=True, seed=SEED, among=among).active(T)
    assert np.repeat(active.clients, active.counts).tolist() == sorted(drawn.tolist())
    a = random("weights", T).uniform(1, 10, N)
    k = round(0.5 * len(ids))
    drawn = ids[np.sort(weighted_without_replacement(a[ids], k, **stream("time-varying")))]
    assert participation.TimeVarying(N, 0.5, seed=SEED, among=among).active(T).clients.tolist() == drawn.tolist()


@pytest.mark.parametrize("phase", ["zero", "random"])
def test_round_robin_draws_from_its_streams(phase):
    tau = random("periods").integers(0, 7, N)
    phases = np.zeros(N, int) if phase == "zero" else random("phases").integers(0, np.maximum(tau, 1))
    pattern = participation.RoundRobin(N, 6, phase=phase, seed=SEED)
    assert pattern.tau.tolist() == tau.tolist()
    for t in range(12):
        assert pattern.active(t).clients.tolist() == [i for i in range(N) if (t + phases[i]) % max(tau[i], 1) == 0]
    z = random("half-normal periods").normal(0, 3, N)
    expected = [min(round(abs(each)), 4) for each in z.tolist()]
    assert participation.RoundRobin(N, 4, periods="half-normal", phase=phase, seed=SEED).tau.tolist() == expected


def test_over_selection_draws_from_its_streams():
    pattern = participation.OverSelection(N, 4, policy={"over_selection": 9 / 4}, seed=SEED)
    normals = random("speeds").standard_normal(N), random("answers", T).standard_normal(N)
    np.testing.assert_allclose(pattern.times(T), np.exp(0.5 * normals[0] + 0.25 * normals[1]), rtol=1e-14)
    drawn = without_replacement(N, 9, **stream("over-selection"))
    assert pattern.active(T).clients.tolist() == sorted(sorted(drawn.tolist(), key=pattern.times(T).__getitem__)[:4])


def test_trace_draws_from_its_streams():
    traces = participation.read_traces("flexible")
    pattern = participation.Trace(N, seed=SEED)
    assigned = with_replacement(np.ones(8), N, seed=SEED, round=0, purpose="participation: traces")
    assert pattern.assigned.tolist() == assigned.tolist()
    shares, drawn = np.empty(N), random("shares", T)
    for number, trace in enumerate(traces):
        shares[assigned == number] = trace.draw(drawn, int((assigned == number).sum()))
    np.testing.assert_array_equal(pattern.shares(T), shares)


def test_a_draw_from_a_million_clients():
    assert len(participation.Uniform(10**6, 20).active(0)) == 20


def test_weights_are_copied():
    weights = np.ones(3)
    pattern = participation.Weighted(3, 1, weights)
    weights[:] = 0
    assert pattern.weights.tolist() == [1, 1, 1]


def test_at_least_leaves_enough_clients_unchanged():
    inner = participation.Trace(9, first=5, among=participation.Bernoulli(9, 0.4))
    pattern, replaced = participation.AtLeast(9, 3, among=inner), 0
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


def test_probabilities_0_and_1():
    assert participation.Bernoulli(5, 0).active(1).clients.tolist() == []
    assert participation.Bernoulli(5, 1).active(1).clients.tolist() == [0, 1, 2, 3, 4]
    assert participation.Bernoulli(5, [0, 1, 0, 1, 1]).active(1).clients.tolist() == [1, 3, 4]


@pytest.mark.parametrize("p", [0.0, 0.1, 0.3, 0.5, 0.9, 1.0])
def test_the_five_levels_of_the_public_code(p):
    """p + (i mod 5) (1 - p) / 4; the last level is exactly 1."""
    pattern = participation.Bernoulli(12, p, levels=5)
    expected = [p + (i % 5) * (1 - p) / 4 for i in range(12)]
    np.testing.assert_allclose(pattern.p, expected, rtol=1e-15)
    np.testing.assert_array_equal(participation.Bernoulli(4, p, levels=2).p, [p, 1, p, 1])
    assert pattern.p[4] == pattern.p[9] == 1
    assert all({4, 9} <= set(pattern.active(t).clients.tolist()) for t in range(50))


def test_p_may_change_with_the_round():
    """p_i^t for all or for each client, with the same draws as for a constant p."""
    pattern = participation.Bernoulli(4, {"0": 0.2, 3000: [0.9, 0.1, 0.5, 1.0]}, seed=3)
    for began, p in ((0, 0.2), (2980, 0.2), (3000, [0.9, 0.1, 0.5, 1.0]), (10**6, [0.9, 0.1, 0.5, 1.0])):
        constant = participation.Bernoulli(4, p, seed=3)
        for t in range(began, began + 20):
            assert pattern.active(t).clients.tolist() == constant.active(t).clients.tolist()
    assert "3000" in repr(pattern)


@pytest.mark.parametrize("p", [{}, {1: 0.5}, {0: 0.5, "0": 0.5}, {0: 0.5, -1: 0.5}, {0: 0.5, "x": 0.1}, {0: 1.5}])
def test_incomplete_p_by_round_is_rejected(p):
    with pytest.raises(RangeError, match="p"):
        participation.Bernoulli(4, p)


def test_a_config_may_have_p_by_round():
    changed = ["participation.p={0 = 0.2, 50 = 0.4}", "partition.clients=30"]
    assert load_preset("mimic/figure7", changed).participation.options["p"] == {"0": 0.2, "50": 0.4}


def test_a_config_may_have_a_policy():
    changed = "participation={name='OverSelection', k=5, policy={over_selection=2, deadline=1.0}}"
    policy = load_preset("mimic/figure7", [changed]).participation.options["policy"]
    assert policy == {"over_selection": 2, "deadline": 1.0}
    with pytest.raises(FedcoreError, match=r"participation: .*did you mean 'deadline'"):
        load_preset("mimic/figure7", [changed.replace("deadline", "dead_line")])


@pytest.mark.parametrize(
    ("clients", "k", "asked"), [(100, 10, 13), (100, 1, 2), (10, 8, 10), (10, 10, 10), (50, 20, 26)]
)
def test_the_default_over_selection_is_30_percent(clients, k, asked):
    pattern = participation.OverSelection(clients, k)
    drawn = without_replacement(clients, asked, seed=0, round=0, purpose="participation: over-selection").tolist()
    assert pattern.active(0).clients.tolist() == sorted(sorted(sorted(drawn), key=pattern.times(0).__getitem__)[:k])


def test_of_equal_times_the_lowest_ids_are_kept():
    pattern = participation.OverSelection(100, 10, policy={"over_selection": 10}, spread=0.0, jitter=1e-16)
    times = pattern.times(0)
    assert len(set(times.tolist())) < 10
    fastest = sorted(range(100), key=lambda i: (times[i], i))[:10]
    assert pattern.active(0).clients.tolist() == sorted(fastest)


def test_late_clients_are_dropped():
    hurry = RoundPolicy(over_selection=1.3, deadline=1.0)
    waiting, hurried = (
        participation.OverSelection(40, 10, seed=1),
        participation.OverSelection(40, 10, seed=1, policy=hurry),
    )
    sizes = set()
    for t in range(40):
        in_time = waiting.active(t).clients[waiting.times(t)[waiting.active(t).clients] <= 1]
        assert hurried.active(t).clients.tolist() == in_time.tolist()
        sizes.add(len(in_time))
    assert min(sizes) < 10
    assert len(participation.OverSelection(40, 10, policy={"deadline": 1e-9}).active(0)) == 0
    for deadline, count in ((1, 10), (1 - 2**-53, 0)):  # a client that takes 1 is in time
        pattern = participation.OverSelection(40, 10, policy={"deadline": deadline}, spread=0, jitter=0)
        assert len(pattern.active(3)) == count


@pytest.fixture
def periods(monkeypatch):
    """Periods 0, 1, 2, 3 and phases 0, 0, 1, 2 instead of random ones."""

    class Fixed:
        def __init__(self, seed, purpose, round):
            self.answer = np.array([0, 1, 2, 3] if "periods" in purpose else [0, 0, 1, 2])

        def integers(self, *_):
            return self.answer

        def normal(self, mean, stdev, count):
            assert (mean, stdev, count) == (0, 3, 4)
            return np.array([-0.4, 1.6, -2.4, 7.0])

    monkeypatch.setattr(module, "generator", Fixed)


@pytest.mark.usefixtures("periods")
def test_round_robin_in_phase():
    pattern = participation.RoundRobin(4, 3)
    expected = [[0, 1, 2, 3], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 2], [0, 1], [0, 1, 2, 3]]
    assert [pattern.active(t).clients.tolist() for t in range(7)] == expected


@pytest.mark.usefixtures("periods")
def test_round_robin_with_phases():
    pattern = participation.RoundRobin(4, 3, phase="random")
    assert [pattern.active(t).clients.tolist() for t in range(4)] == [[0, 1], [0, 1, 2, 3], [0, 1], [0, 1, 2]]


def test_a_schedule_by_hand():
    pattern = participation.Schedule(4, arrivals={1: 2, 2: 3}, departures={0: 1, 2: 5})
    expected = [[0, 3], [3], [1, 3], [1, 2, 3], [1, 2, 3], [1, 3], [1, 3]]
    assert [pattern.active(t).clients.tolist() for t in range(7)] == expected
    assert [pattern.present(t).tolist() for t in range(7)] == expected
    assert pattern.active(10**12).clients.tolist() == [1, 3]
    assert participation.Schedule(2, arrivals={0: 0}).active(0).clients.tolist() == [0, 1]
    absent = participation.Schedule(2, arrivals={0: 3, 1: 4})
    assert [len(absent.active(t)) for t in range(5)] == [0, 0, 0, 1, 2]


def test_keys_may_be_strings():
    pattern = participation.Schedule(3, arrivals={"2": 4}, departures={"0": 1})
    assert (pattern.arrivals, pattern.departures) == ({2: 4}, {0: 1})
    assert [pattern.active(t).clients.tolist() for t in (0, 1, 4)] == [[0, 1], [1], [1, 2]]


@pytest.mark.parametrize("key", ["-1", "1.0", " 1", "²", "", 1.0, None])
def test_wrong_keys_are_rejected(key):
    with pytest.raises(ValueError, match=r"^arrivals: client\b"):
        participation.Schedule(3, arrivals={key: 4})


@pytest.mark.parametrize(("clients", "share", "k"), [(30, 0.1, 3), (30, 0.5, 15), (5, 0.01, 1), (7, 1, 7)])
def test_the_number_of_active_clients(clients, share, k):
    pattern = participation.TimeVarying(clients, share)
    assert {len(pattern.active(t)) for t in range(20)} == {k}


RECORDED = [participation.Recorded("a", (0.0, 0.5, 1.0)), participation.Recorded("b", (0.25, 0.75))]


def test_the_first_trace_always_does_all_steps():
    for t in range(5):
        assert participation.Trace(6, first=1).active(t).steps(7).tolist() == [7] * 6


@pytest.mark.parametrize("trace", range(5))
def test_traces_one_to_five_always_do_some_steps(trace):
    pattern = participation.Trace(4000, participation.Trace(1).traces[trace : trace + 1])
    assert len(pattern.active(0)) == 4000
    assert pattern.active(0).steps(5).min() >= 1


@pytest.mark.parametrize("trace", range(5, 8))
def test_traces_six_to_eight_may_do_no_steps_and_are_rarely_complete(trace):
    pattern = participation.Trace(40_000, participation.Trace(1).traces[trace : trace + 1])
    active = pattern.active(0)
    assert len(active) < 40_000
    assert 0 < (active.shares == 1).mean() < 0.1


def test_recorded_shares_are_sampled_row_by_row():
    pattern = participation.Trace(6000, RECORDED[:1])
    shares = pattern.shares(0)
    np.testing.assert_allclose([np.mean(shares == s) for s in (0, 0.5, 1)], 1 / 3, atol=4.5 * np.sqrt(2 / 9 / 6000))
    active = pattern.active(0)
    np.testing.assert_array_equal(active.clients, np.flatnonzero(shares))
    np.testing.assert_array_equal(active.shares, shares[active.clients])


def test_recorded_traces_are_replayed_row_by_row():
    pattern = participation.Trace(3, RECORDED, assign="order", draw="replay")
    expected = [
        [0, 0.25, 0],
        [0.5, 0.75, 0.5],
        [1, 0.25, 1],
        [0, 0.75, 0],
        [0.5, 0.25, 0.5],
        [1, 0.75, 1],
        [0, 0.25, 0],
    ]
    assert [pattern.shares(t).tolist() for t in range(7)] == expected
    assert [pattern.active(t).clients.tolist() for t in range(2)] == [[1], [0, 1, 2]]
    assert pattern.active(0).steps(8).tolist() == [2]
