import numpy as np

from fedcore.data import holdings


def test_every_example_is_counted_where_it_is_held():
    labels = np.array([2, 0, 2, 1, 2])
    counts = holdings(labels, [np.array([0, 2, 3]), np.empty(0, np.int64), np.array([1])], classes=4)
    assert counts.dtype == np.int64
    assert counts.tolist() == [[0, 1, 2, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
