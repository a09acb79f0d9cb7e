from dataclasses import replace

import pytest
from scipy.stats import ttest_rel

from fedcore.reports.statistics import Difference, difference, differences_to_first


def test_the_interval_is_that_of_the_paired_t_test(record):
    ours, theirs = [0.5, 0.7, 0.6, 0.9], [0.4, 0.65, 0.61, 0.7]
    records = [
        record(label, order, seed, [value])
        for order, (label, values) in enumerate((("A", ours), ("B", theirs)))
        for seed, value in enumerate(values)
    ]
    found = difference(records, "A", "B")
    expected = ttest_rel(ours, theirs).confidence_interval(0.95)
    assert found.interval == pytest.approx((expected.low, expected.high))
    assert found.mean == pytest.approx(0.085)


def test_pairs_that_did_not_see_the_same_clients_are_left_out(record):
    one, other = record("A", 0, 0, [0.5, 0.5]), record("B", 1, 0, [0.6, 0.6])
    other.rounds[1] = replace(other.rounds[1], active=[3])
    records = [one, other, record("A", 0, 1, [0.5, 0.5]), record("B", 1, 1, [0.7, 0.7])]
    found = difference(records, "B", "A")
    assert found.values == pytest.approx((0.2,))
    assert found.apart == (0,)


def test_seeds_that_one_of_them_lacks_are_left_out(record):
    records = [record("A", 0, 0, [0.5]), record("A", 0, 1, [0.5]), record("B", 1, 1, [0.7])]
    (found,) = differences_to_first(records)
    assert (found.of, found.over, len(found.values)) == ("B", "A", 1)
    assert found.interval is None
    assert Difference("A", "B", ()).mean is None
