import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcore.participation import Active


def test_steps_by_hand():
    clients = np.arange(5)
    assert Active(clients).steps(7).tolist() == [7] * 5
    shares = np.array([1, 0.5, 0.3, 0.29, 1e-6])
    assert Active(clients, shares).steps(10).tolist() == [10, 5, 3, 2, 1]
    assert Active(clients, shares).steps(np.array([3, 3, 10, 100, 9])).tolist() == [3, 1, 3, 29, 1]


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_share_that_is_a_whole_number_of_steps_is_that_many(steps, full):
    steps, full = sorted((steps, full))
    assert Active(np.array([0]), np.array([steps / full])).steps(full).tolist() == [steps]


@given(st.floats(1e-12, 1), st.integers(1, 10**6))
def test_steps_lie_between_one_and_all(share, full):
    (steps,) = Active(np.array([0]), np.array([share])).steps(full)
    assert 1 <= steps <= full
    assert steps <= max(share * full, 1) + 1e-6
    assert steps > share * full - 1


@pytest.mark.parametrize("kept", [np.array([False, True, True]), np.array([1, 2])])
def test_only_keeps_what_belongs_to_a_client(kept):
    some = Active(np.array([3, 5, 9]), np.array([0.1, 0.2, 0.3]), np.array([4, 5, 6])).only(kept)
    assert (some.clients.tolist(), some.shares.tolist(), some.counts.tolist()) == ([5, 9], [0.2, 0.3], [5, 6])
    bare = Active(np.array([3, 5, 9])).only(kept)
    assert (bare.clients.tolist(), bare.shares, bare.counts) == ([5, 9], None, None)


def test_shares_multiply_and_who_does_nothing_is_left_out():
    once = Active(np.array([1, 2, 3]), counts=np.array([7, 8, 9])).working(np.array([0.5, 0.0, 1.0]))
    assert (once.clients.tolist(), once.shares.tolist(), once.counts.tolist()) == ([1, 3], [0.5, 1], [7, 9])
    twice = once.working(np.array([0.5, 0.5]))
    assert (twice.clients.tolist(), twice.shares.tolist()) == ([1, 3], [0.25, 0.5])
    assert len(twice) == 2
