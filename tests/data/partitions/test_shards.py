from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fedcore.data import shards
from fedcore.data.partitions.shards import _repair
from fedcore.errors import FedcoreError, RangeError, ShapeError


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=7),
    clients=st.integers(1, 9),
    per_client=st.integers(1, 5),
    seed=st.integers(0, 2**32),
    distinct=st.booleans(),
)
def test_every_deal_is_a_partition(sizes: list[int], clients: int, per_client: int, seed: int, distinct: bool) -> None:
    classes, total = len(sizes), clients * per_client
    assume(total >= classes and min(sizes) >= -(-total // classes))
    assume(not distinct or per_client <= classes)
    labels = np.random.default_rng(0).permutation(np.repeat(3 * np.arange(classes), sizes))

    parts = shards(labels, clients, per_client, seed=seed, distinct_classes=distinct)

    assert len(parts) == clients
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    for part in parts:
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()
        held = len(np.unique(labels[part]))
        assert held == per_client if distinct else 1 <= held <= per_client
    again = shards(labels, clients, per_client, seed=seed, distinct_classes=distinct)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@given(clients=st.integers(2, 9), per_client=st.integers(1, 6), data=st.data())
def test_the_repair_ends_from_any_deal(clients: int, per_client: int, data: st.DataObject) -> None:
    classes = data.draw(st.integers(per_client, clients * per_client))
    cards = [i % classes for i in range(clients * per_client)]
    dealt = data.draw(st.permutations(cards))
    hands = [dealt[i * per_client : (i + 1) * per_client] for i in range(clients)]
    _repair(hands)
    assert sorted(label for hand in hands for label in hand) == sorted(cards)
    assert all(len(set(hand)) == per_client for hand in hands)


def test_the_worst_deal_is_repaired() -> None:
    hands = [[label] * 4 for label in range(4)]
    _repair(hands)
    assert [sorted(hand) for hand in hands] == [[0, 1, 2, 3]] * 4


def test_the_mimic_setting() -> None:
    labels = np.repeat(np.arange(10), 6000)
    parts = shards(labels, 30, 2, seed=0)
    assert [len(part) for part in parts] == [2000] * 30
    pairs = [tuple(np.unique(labels[part], return_counts=True)[1].tolist()) for part in parts]
    assert set(pairs) <= {(1000, 1000), (2000,)}
    parts = shards(labels, 30, 2, seed=0, distinct_classes=True)
    assert all(np.unique(labels[part], return_counts=True)[1].tolist() == [1000, 1000] for part in parts)


def test_left_over_shards_go_to_the_largest_classes() -> None:
    labels = np.repeat([0, 1, 2], [10, 30, 20])
    parts = shards(labels, 5, 1, seed=0)
    held = np.bincount([labels[part[0]] for part in parts])
    assert held.tolist() == [1, 2, 2]
    assert sorted(len(part) for part in parts) == [10, 10, 10, 15, 15]


def test_examples_and_shards_are_dealt_at_random() -> None:
    labels = np.repeat(np.arange(4), 50)
    first, second = (shards(labels, 4, 2, seed=seed) for seed in (0, 1))
    assert any(not np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    inside = first[0][labels[first[0]] == labels[first[0][0]]]
    assert (np.diff(inside) > 1).any()  # a block of the file would be no random shard


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: shards(np.zeros(5, int), 0, 2, seed=0), RangeError, "^clients: expected an integer >= 1, got 0"),
        (
            lambda: shards(np.zeros(5, int), 2, 0, seed=0),
            RangeError,
            "^shards_per_client: expected an integer >= 1",
        ),
        (lambda: shards(np.zeros(0, int), 2, 2, seed=0), RangeError, "^labels: .* got none"),
        (lambda: shards(np.arange(5), 2, 2, seed=0), RangeError, "^labels: expected 1 .. 4 classes"),
        (
            lambda: shards(np.arange(4), 4, 2, seed=0),
            RangeError,
            "^labels: expected at least 2 examples of class 0",
        ),
        (
            lambda: shards(np.repeat([0, 1], 9), 2, 3, seed=0, distinct_classes=True),
            RangeError,
            "^shards_per_client: expected at most the 2 classes, got 3",
        ),
        (lambda: shards(np.zeros((2, 2), int), 1, 1, seed=0), ShapeError, "^labels: expected int"),
        (lambda: shards(np.zeros(4), 1, 1, seed=0), FedcoreError, "^labels: expected int.* got float64"),
    ],
)
def test_what_is_impossible_is_refused(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
