"""The draws of each pattern, from the streams that it says: a pattern's rounds stay the same whatever else changes.

A purpose, a seed or a round that went missing on the way would still give clients of the right law, only others.
"""

import numpy as np
import pytest

from fedcore.participation import (
    AtLeast,
    Bernoulli,
    OverSelection,
    RoundRobin,
    Schedule,
    TimeVarying,
    Trace,
    Uniform,
    Weighted,
    read_traces,
)
from fedcore.randomness import generator
from fedcore.sampling import bernoulli, weighted_without_replacement, with_replacement, without_replacement

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
