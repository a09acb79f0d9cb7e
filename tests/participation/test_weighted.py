from math import factorial, prod

import numpy as np
import pytest

from fedcore.participation import Schedule, Weighted
from tests.sampling.laws import assert_law, successive


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
