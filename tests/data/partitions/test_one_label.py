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
def test_balanced_each_client_holds_one_label_and_everything_fits(labels, check, sizes, clients, seed, smallest):
    y = labels(sizes)
    turns = [len(range(turn, clients, len(sizes))) for turn in range(len(sizes))]
    cap = min(size // turn for size, turn in zip(sizes, turns, strict=True) if turn)
    assume(cap >= smallest)
    parts, _ = check(lambda: one_label(y, clients, seed=seed, smallest=smallest, balanced=True), y, clients)
    for client, part in enumerate(parts):
        assert set(y[part]) == {3 * (client % len(sizes))}
        assert smallest <= len(part) <= cap


MNIST = np.repeat(np.arange(10), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])


def test_the_flexible_papers_setting():
    """Each device's label is drawn uniformly: the counts of 200 deals to 100 clients are multinomial."""
    drawn = np.zeros((200, 10), int)
    for seed in range(200):
        parts = one_label(MNIST, 100, seed=seed)
        labels = [np.unique(MNIST[part]) for part in parts]
        assert all(len(label) == 1 for label in labels)
        held = np.concatenate(parts)
        assert len(np.unique(held)) == len(held)
        drawn[seed] = np.bincount(np.ravel(labels), minlength=10)
    # Of one deal, the counts' squared distance from 10 over 10 is chi-square's with 9 degrees of freedom.
    squares = (np.square(drawn - 10) / 10).sum(axis=1)
    assert squares.mean() == pytest.approx(9, abs=4 * np.sqrt(18 / 200))
    assert squares.var() == pytest.approx(18, rel=0.5)
    total = drawn.sum(axis=0)
    assert (np.square(total - 2000) / 2000).sum() < 30


def test_the_cap_is_what_the_scarcest_class_can_give():
    parts = one_label(MNIST, 100, seed=0)
    clients = np.bincount([MNIST[part[0]] for part in parts], minlength=10)
    cap = min(held // count for held, count in zip(np.bincount(MNIST), clients, strict=True) if count)
    np.testing.assert_array_equal([len(part) for part in parts], pareto(100, seed=0, smallest=20, largest=cap))
    balanced = [len(part) for part in one_label(MNIST, 100, seed=0, balanced=True)]
    np.testing.assert_array_equal(balanced, pareto(100, seed=0, smallest=20, largest=542))


def test_a_cap_of_ones_own_may_be_above_an_even_share():
    y = np.repeat([0, 1], 1000)
    sizes = [len(part) for part in one_label(y, 8, seed=4, smallest=10, largest=700)]
    assert max(sizes) > 250


def test_equal_sizes():
    parts = one_label(np.repeat(np.arange(10), 600), 10, seed=0, smallest=500, largest=500, balanced=True)
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
