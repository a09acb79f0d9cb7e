import numpy as np

from fedcore.data import load


def test_shapes_and_range() -> None:
    digits = load("digits")
    assert digits.train_x.shape == (1437, 1, 8, 8)
    assert digits.test_x.shape == (360, 1, 8, 8)
    assert digits.classes == 10
    assert digits.train_x.dtype == np.float32
    assert (digits.train_x.min(), digits.train_x.max()) == (0, 1)
    assert (np.bincount(digits.test_y, minlength=10) > 20).all()


def test_the_split_holds_every_example_once_and_never_changes() -> None:
    from sklearn.datasets import load_digits

    digits, again = load("digits"), load("digits")
    raw = load_digits()
    x = np.concatenate([digits.train_x, digits.test_x]).reshape(1797, 64)
    y = np.concatenate([digits.train_y, digits.test_y])
    rows = np.column_stack([x * 16, y])
    due = np.column_stack([raw.data, raw.target])
    np.testing.assert_array_equal(rows[np.lexsort(rows.T)], due[np.lexsort(due.T)])
    np.testing.assert_array_equal(digits.test_x, again.test_x)
    assert digits.test_y[:12].tolist() == [1, 8, 2, 6, 2, 0, 0, 1, 1, 2, 9, 4]
