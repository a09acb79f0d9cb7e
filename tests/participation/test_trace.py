import numpy as np
import pytest

from fedcore.participation import Generated, Recorded, Trace

RECORDED = [Recorded("a", (0.0, 0.5, 1.0)), Recorded("b", (0.25, 0.75))]


def test_devices_get_one_of_the_first_traces_with_equal_probability():
    pattern = Trace(8000, first=4, seed=1)
    assert [trace.name for trace in pattern.traces] == ["1", "2", "3", "4"]
    np.testing.assert_allclose(np.bincount(pattern.assigned) / 8000, 0.25, atol=4.5 * np.sqrt(3 / 16 / 8000))
    assert Trace(5, first=2, assign="order").assigned.tolist() == [0, 1, 0, 1, 0]


def test_the_first_trace_does_all_steps_always():
    for t in range(5):
        assert Trace(6, first=1).active(t).steps(7).tolist() == [7] * 6


@pytest.mark.parametrize("trace", range(5))
def test_traces_one_to_five_never_do_nothing(trace):
    pattern = Trace(4000, Trace(1).traces[trace : trace + 1])
    assert len(pattern.active(0)) == 4000
    assert pattern.active(0).steps(5).min() >= 1


@pytest.mark.parametrize("trace", range(5, 8))
def test_traces_six_to_eight_can_do_nothing_and_are_seldom_complete(trace):
    pattern = Trace(40_000, Trace(1).traces[trace : trace + 1])
    active = pattern.active(0)
    assert len(active) < 40_000
    assert 0 < (active.shares == 1).mean() < 0.1


def test_shares_are_independent_over_devices_and_rounds():
    pattern = Trace(2000, Trace(1).traces[5:6], seed=4)
    one, other = pattern.shares(1), pattern.shares(2)
    for a, b in ((one, other), (one[1:], one[:-1])):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4.5 / np.sqrt(1999)


def test_recorded_shares_are_sampled_row_by_row():
    pattern = Trace(6000, RECORDED[:1])
    shares = pattern.shares(0)
    np.testing.assert_allclose([np.mean(shares == s) for s in (0, 0.5, 1)], 1 / 3, atol=4.5 * np.sqrt(2 / 9 / 6000))
    active = pattern.active(0)
    np.testing.assert_array_equal(active.clients, np.flatnonzero(shares))
    np.testing.assert_array_equal(active.shares, shares[active.clients])


def test_recorded_traces_are_replayed_as_they_were_measured():
    pattern = Trace(3, RECORDED, assign="order", draw="replay")
    due = [[0, 0.25, 0], [0.5, 0.75, 0.5], [1, 0.25, 1], [0, 0.75, 0], [0.5, 0.25, 0.5], [1, 0.75, 1], [0, 0.25, 0]]
    assert [pattern.shares(t).tolist() for t in range(7)] == due
    assert [pattern.active(t).clients.tolist() for t in range(2)] == [[1], [0, 1, 2]]
    assert pattern.active(0).steps(8).tolist() == [2]


def test_each_device_follows_its_own_trace():
    pattern = Trace(
        3000, [Generated("slow", 0.2, 0.05), Generated("fast", 0.8, 0.05), Recorded("half", (0.5,))], seed=1
    )
    shares = pattern.shares(3)
    for number, (mean, stdev) in enumerate([(0.2, 0.05), (0.8, 0.05), (0.5, 0)]):
        its = shares[pattern.assigned == number]
        assert abs(its.mean() - mean) <= 4.5 * 0.05 / np.sqrt(len(its))
        assert abs(its.std() - stdev) < 0.006
