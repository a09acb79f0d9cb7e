import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fedcore.data import one_label
from fedcore.data.sizes import pareto
from fedcore.errors import RangeError


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=7),
    clients=st.integers(1, 30),
    seed=st.integers(0, 2**32),
    smallest=st.integers(1, 3),
)
def test_each_client_holds_one_label_and_everything_fits(labels, check, sizes, clients, seed, smallest):
    y = labels(sizes)
    turns = [len(range(turn, clients, len(sizes))) for turn in range(len(sizes))]
    cap = min(size // turn for size, turn in zip(sizes, turns, strict=True) if turn)
    assume(cap >= smallest)
    parts, _ = check(lambda: one_label(y, clients, seed=seed, smallest=smallest), y, clients)
    for client, part in enumerate(parts):
        assert set(y[part]) == {3 * (client % len(sizes))}
        assert smallest <= len(part) <= cap


def test_the_flexible_papers_setting():
    y = np.repeat(np.arange(10), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])  # MNIST's
    parts = one_label(y, 100, seed=0)
    sizes = np.array([len(part) for part in parts])
    np.testing.assert_array_equal(sizes, pareto(100, seed=0, smallest=20, largest=542))
    assert sizes.max() == 542
    other = one_label(y, 100, seed=1)
    assert [len(part) for part in other] != sizes.tolist()


def test_a_cap_of_ones_own_may_be_above_an_even_share():
    y = np.repeat([0, 1], 1000)
    sizes = [len(part) for part in one_label(y, 8, seed=4, smallest=10, largest=700)]
    assert max(sizes) > 250


def test_equal_sizes():
    parts = one_label(np.repeat(np.arange(10), 600), 10, seed=0, smallest=500, largest=500)
    assert [len(part) for part in parts] == [500] * 10


def test_examples_are_drawn_at_random():
    y = np.zeros(1000, int)
    first, second = (one_label(y, 1, seed=seed, smallest=50, largest=50)[0] for seed in (0, 1))
    assert not np.array_equal(first, second)
    assert first.max() > 500


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: one_label(np.zeros(5, int), 0, seed=0), "^clients: expected an integer >= 1, got 0"),
        (lambda: one_label(np.zeros(5, int), 1, seed=0, smallest=0), "^smallest: expected an integer >= 1, got 0"),
        (lambda: one_label(np.zeros(5, int), 1, seed=0, largest=4), "^largest: expected an integer in 20.*got 4"),
        (lambda: one_label(np.zeros(5, int), 1, seed=0, index=-1.0), "^index: expected a finite number > 0"),
        (lambda: one_label(np.zeros(0, int), 1, seed=0), "^labels: .* got none"),
        (lambda: one_label(np.zeros(39, int), 2, seed=0), "^labels: expected 20 examples for each client .* got 19"),
        (
            lambda: one_label(np.repeat([0, 7], [40, 39]), 4, seed=0, largest=20),
            "^labels: expected 40 examples of class 7 for its clients, got 39; lower 'largest'",
        ),
    ],
)
def test_what_is_impossible_is_refused(call, message):
    with pytest.raises(RangeError, match=message):
        call()
