"""Medians, histories and populations by hand."""

import numpy as np
import pytest

from fedcore.rules.windows import ClaimWindow, NormWindow, median
from fedcore.server.step import History, Population, _median


@pytest.mark.parametrize(
    ("values", "counts", "due"),
    [
        ([7.0], [1], 7),
        ([3.0, 1.0, 2.0], [1, 1, 1], 2),
        ([4.0, 1.0, 3.0, 2.0], [1, 1, 1, 1], 2),  # the lower of two
        ([10.0, 1.0], [1, 1], 1),
        ([10.0, 1.0], [3, 1], 10),
        ([10.0, 1.0], [1, 3], 1),
        ([5.0, 6.0, 7.0], [1, 1, 3], 7),
        ([5.0, 6.0, 7.0], [1, 1, 2], 6),
    ],
)
def test_the_lower_median_of_draws(values, counts, due):
    assert _median(np.array(values), np.array(counts, np.float64)) == due
    assert median(np.repeat(values, counts)) == due


@pytest.mark.parametrize(
    ("heard", "beside", "due"),
    [
        ([], [], None),
        ([4], [], 4),
        ([9, 1], [], 1),
        ([9, 1, 5], [], 5),
        ([4, 3, 2, 1], [], 2),
        ([], [5, 1], 1),
        ([], [0, 5], 5),
        ([], [0, 0, 5], None),  # one beside zeros vouches for nothing
        ([], [0, 0], None),
        ([1], [0, 0, 5], 1),
        ([1], [0, 0, 5, 6], 5),
        ([2, 8], [0], 2),
        ([0, -1], [], None),
        ([0, 3], [], 3),
    ],
)
def test_the_median_of_norms_ignores_zeros(heard, beside, due):
    norms = NormWindow()
    for norm in heard:
        norms.add(norm)
    assert norms.median(beside) == due
    assert len(norms) == sum(norm > 0 for norm in heard)


def test_a_claim_is_capped_at_the_ratio_times_the_median():
    window = ClaimWindow(10)
    assert window.most(np.empty(0)) == np.inf
    assert window.most(np.array([3.0])) == 30
    window.add(np.array([2.0, 4.0]))
    assert (len(window), window.most(np.empty(0)), window.most(np.array([5.0]))) == (2, 20, 40)
    assert window.agree(np.array([20.0]))
    assert not window.agree(np.array([20.5]))
    assert window.agree(np.array([0.01]))  # earlier claims are not compared again
    assert not window.agree(np.array([0.01, 0.2]))
    window.add(np.empty(0))
    assert len(window) == 2
    assert ClaimWindow(10).agree(np.array([1.0, 10.0]))  # a single claim has nothing to agree with
    assert not ClaimWindow(10).agree(np.array([1.0]))
    assert ClaimWindow(None).agree(np.array([1.0, 1e300]))


def vector(value):
    return np.full(2, value, np.float32)


@pytest.fixture
def history():
    """v[0] with five rows, v[1] and v[2] with two each, v[3] with one."""
    made = History()
    for t, rows in enumerate([5, 2, 2, 1]):
        made = made.after(t, vector(t), rows, [])
    return made


@pytest.mark.parametrize(("most", "due"), [(10, []), (4, []), (3, [1]), (2, [1, 2]), (1, [1, 2, 0]), (0, [1, 2, 0])])
def test_the_rounds_of_the_fewest_rows_are_folded_and_of_equals_the_oldest(history, most, due):
    assert history.surplus(most) == due


def test_the_newest_round_is_never_folded(history):
    assert 3 not in history.surplus(0)
    assert History().surplus(0) == []


def test_folded_rounds_leave_the_history(history):
    rest = history.folded([2, 0, 9])
    assert (list(rest), dict(rest.references)) == ([1, 3], {1: 2, 3: 1})
    assert rest.get(1) is history.get(1)
    assert len(history) == 4


def test_a_direction_leaves_with_its_last_row(history):
    assert list(history.without([1])) == [0, 1, 2, 3]
    assert list(history.without([1, 1])) == [0, 2, 3]
    assert list(history.without([None, 7])) == [0, 1, 2, 3]
    assert history.get(None) is None
    later = history.after(4, vector(4), 2, [1, 1, None, 3])
    assert dict(later.references) == {0: 5, 2: 2, 4: 2}


def test_a_round_without_references_keeps_no_direction():
    assert len(History().after(0, np.zeros(1, np.float32), 0, [])) == 0


@pytest.mark.parametrize(("clients", "room"), [(1, 64), (64, 64), (65, 128), (128, 128), (129, 256)])
def test_a_column_has_room_for_a_power_of_two(clients, room):
    (column,) = Population().with_clients(range(clients), range(clients), [1] * clients, None).sizes
    assert column.shape == (2, room)


def test_a_population_without_sizes():
    none = Population().with_clients([0], ["a"], None, 3)
    assert (none.sizes, none.listed(), none.total) == ((), None, 0)
    assert none.arrived[0][:, 0].tolist() == [0, 3]
    gone = none.without_client(0, "a", from_objective=False)
    assert (gone.arrived, gone.total, dict(gone.included)) == ((), 0, {})
