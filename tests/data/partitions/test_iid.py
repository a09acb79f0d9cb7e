import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fedcore.data import iid, iid_pareto, one_label
from fedcore.errors import DtypeError, RangeError, ShapeError

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=7)


@given(sizes=SIZES, clients=st.integers(1, 30), seed=st.integers(0, 2**32))
def test_every_example_is_dealt_once_in_equal_sizes(labels, check, sizes, clients, seed):
    y = labels(sizes)
    assume(len(y) >= clients)
    parts, dealt = check(lambda: iid(y, clients, seed=seed), y, clients)
    assert dealt.min() == 1
    held = [len(part) for part in parts]
    assert max(held) - min(held) <= 1


def test_every_client_has_the_whole_in_small():
    y = np.repeat(np.arange(10), 600)
    counts = [np.bincount(y[part], minlength=10) for part in iid(y, 10, seed=0)]
    assert np.abs(np.array(counts) - 60).max() < 5 * np.sqrt(60)
    assert np.std(counts) > 1  # drawn, not stratified


@given(
    sizes=SIZES,
    clients=st.integers(1, 30),
    seed=st.integers(0, 2**32),
    smallest=st.integers(1, 3),
    index=st.floats(0.1, 5),
)
def test_pareto_sizes_without_a_cap_of_ones_own_always_fit(labels, check, sizes, clients, seed, smallest, index):
    y = labels(sizes)
    cap = len(y) // clients
    assume(cap >= smallest)
    parts, _ = check(lambda: iid_pareto(y, clients, seed=seed, smallest=smallest, index=index), y, clients)
    assert all(smallest <= len(part) <= cap for part in parts)


def test_the_twin_of_one_label_has_its_sizes():
    y = np.repeat(np.arange(10), 600)
    numbers = {"seed": 5, "smallest": 10, "largest": 60}
    sizes = [[len(part) for part in deal(y, 100, **numbers)] for deal in (iid_pareto, one_label)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: iid(np.zeros(5, int), 0, seed=0), RangeError, "^clients: expected an integer >= 1, got 0"),
        (lambda: iid(np.zeros(5, int), 6, seed=0), RangeError, "^labels: expected at least 6 examples .* got 5"),
        (lambda: iid(np.zeros(0, int), 1, seed=0), RangeError, "^labels: .* got none"),
        (lambda: iid(np.zeros(5), 1, seed=0), DtypeError, "^labels: expected int.* got float64"),
        (lambda: iid(np.zeros((5, 1), int), 1, seed=0), ShapeError, r"^labels: .* got shape \(5, 1\)"),
        (
            lambda: iid_pareto(np.zeros(9, int), 3, seed=0, smallest=0),
            RangeError,
            "^smallest: expected an integer >= 1",
        ),
        (
            lambda: iid_pareto(np.zeros(9, int), 3, seed=0, largest=3),
            RangeError,
            "^largest: expected an integer in 20..",
        ),
        (
            lambda: iid_pareto(np.zeros(9, int), 3, seed=0, index=0.0),
            RangeError,
            "^index: expected a finite number > 0",
        ),
        (
            lambda: iid_pareto(np.zeros(9, int), 3, seed=0, smallest=4),
            RangeError,
            "^labels: expected at least 4 examples a client, got 9 for 3",
        ),
        (
            lambda: iid_pareto(np.zeros(9, int), 3, seed=0, smallest=4, largest=4),
            RangeError,
            "^labels: expected 12 examples for the clients' sizes, got 9; lower 'largest'",
        ),
    ],
)
def test_what_is_impossible_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
