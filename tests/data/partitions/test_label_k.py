import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fedcore.data import label_k
from fedcore.errors import RangeError


@given(
    classes=st.integers(1, 7),
    k=st.integers(1, 7),
    clients=st.integers(1, 20),
    seed=st.integers(0, 2**32),
    most=st.none() | st.integers(1, 5),
)
def test_k_classes_each_split_evenly(labels, check, classes, k, clients, seed, most):
    assume(k <= classes)
    y = labels([20 + 3 * label for label in range(classes)])
    parts, dealt = check(lambda: label_k(y, clients, k, seed=seed, most_per_class=most), y, clients)
    holders = np.zeros(classes, int)
    for client, part in enumerate(parts):
        held = np.unique(y[part]) // 3
        assert len(held) == k
        assert client % classes in held
        holders[held] += 1
    for label in range(classes):
        sizes = [np.count_nonzero(y[part] == 3 * label) for part in parts]
        sizes = [size for size in sizes if size]
        assert max(sizes, default=0) - min(sizes, default=0) <= 1
        everything = dealt[y == 3 * label].all()
        if most is None:
            assert everything == (holders[label] > 0)
        else:
            assert max(sizes, default=0) <= most


def test_the_other_classes_are_drawn_uniformly():
    y = np.repeat(np.arange(5), 3000)
    parts = label_k(y, 1000, 3, seed=0)
    pairs = np.zeros((5, 5))
    for client, part in enumerate(parts):
        pairs[client % 5, np.unique(y[part])] += 1
    others = pairs[~np.eye(5, dtype=bool)]
    assert pairs.diagonal().tolist() == [200] * 5
    assert others.mean() == 100  # 2 of the other 4
    assert np.abs(others - 100).max() < 5 * np.sqrt(200 * 0.25)


def test_with_all_classes_it_is_stratified():
    y = np.repeat(np.arange(10), 60)
    for part in label_k(y, 6, 10, seed=0):
        assert np.bincount(y[part]).tolist() == [10] * 10


def test_the_mimic_codes_setting():
    parts = label_k(np.repeat(np.arange(10), 6000), 30, 2, seed=0, most_per_class=1000)
    assert all(len(part) <= 2000 for part in parts)
    assert max(len(part) for part in parts) == 2000


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: label_k(np.zeros(5, int), 0, 1, seed=0), "^clients: expected an integer >= 1, got 0"),
        (lambda: label_k(np.zeros(5, int), 1, 0, seed=0), "^classes_per_client: expected an integer >= 1, got 0"),
        (
            lambda: label_k(np.zeros(5, int), 1, 1, seed=0, most_per_class=0),
            "^most_per_class: expected an integer >= 1",
        ),
        (lambda: label_k(np.zeros(0, int), 1, 1, seed=0), "^labels: .* got none"),
        (lambda: label_k(np.zeros(5, int), 1, 2, seed=0), "^labels: expected at least 2 classes, .* got 1"),
        (lambda: label_k(np.zeros(5, int), 6, 1, seed=0), "^labels: expected at least 6 examples of class 0, .* got 5"),
    ],
)
def test_what_is_impossible_is_refused(call, message):
    with pytest.raises(RangeError, match=message):
        call()
