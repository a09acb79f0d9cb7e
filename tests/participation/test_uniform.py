from itertools import combinations

import numpy as np
import pytest

from fedcore.participation import Schedule, Uniform
from tests.sampling.laws import assert_law


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
