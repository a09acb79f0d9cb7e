from itertools import permutations

import numpy as np
import pytest

from fedcore.participation import TimeVarying
from fedcore.participation.time_varying import _successive
from fedcore.randomness import generator


def enumerated(a: np.ndarray, k: int) -> dict[tuple[int, ...], float]:
    """The probability of each set of k clients, by summing over every order of the draws."""
    law: dict[tuple[int, ...], float] = {}
    for order in permutations(range(len(a)), k):
        probability, left = 1.0, a.sum()
        for i in order:
            probability *= a[i] / left
            left -= a[i]
        drawn = tuple(sorted(order))
        law[drawn] = law.get(drawn, 0.0) + probability
    return law


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_draws_have_the_law_of_successive_draws(k: int) -> None:
    a, draws = np.array([1.0, 2.0, 5.0, 10.0]), 20000
    random = generator(0, "a test")
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(draws):
        drawn = tuple(np.flatnonzero(_successive(a, k, random)).tolist())
        counts[drawn] = counts.get(drawn, 0) + 1
    law = enumerated(a, k)
    assert sum(law.values()) == pytest.approx(1)
    assert counts.keys() <= law.keys()
    for drawn, probability in law.items():
        spread = np.sqrt(probability * (1 - probability) / draws)
        assert abs(counts.get(drawn, 0) / draws - probability) < 4.5 * spread, drawn


@pytest.mark.parametrize(("clients", "share", "k"), [(30, 0.1, 3), (30, 0.5, 15), (5, 0.01, 1), (7, 1, 7)])
def test_the_number_of_active_clients(clients: int, share: float, k: int) -> None:
    pattern = TimeVarying(clients, share)
    assert {len(pattern.active(t)) for t in range(20)} == {k}


def test_the_weights_are_drawn_anew_each_round() -> None:
    pattern, rounds = TimeVarying(5, 0.2, seed=1), 4000
    heard = np.bincount([int(pattern.active(t)[0]) for t in range(rounds)], minlength=5)
    np.testing.assert_allclose(heard / rounds, 0.2, atol=4.5 * np.sqrt(0.2 * 0.8 / rounds))
