"""Sums of words modulo 2^64, beside NumPy's."""

import numpy as np
import pytest

from fedcore.arrays import core
from fedcore.errors import ArrayError, DtypeError, ShapeError


@pytest.mark.parametrize("n", [0, 1, 7, 16384, 16385, 300_001])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_words_are_added_modulo_2_to_the_64(n, k):
    rng = np.random.default_rng(n + k)
    total, *terms = (rng.integers(-(2**63), 2**63 - 1, n, np.int64, endpoint=True) for _ in range(k + 1))
    due = total.view(np.uint64) + sum((term.view(np.uint64) for term in terms), np.zeros(n, np.uint64))
    core.add_words(total, terms)
    np.testing.assert_array_equal(total.view(np.uint64), due)


def test_arguments():
    words = np.zeros(3, np.int64)
    for total, terms, error in (
        (words, [np.zeros(4, np.int64)], ShapeError),
        (words, [np.zeros(3)], DtypeError),
        (words, [words], ArrayError),
        (np.frombuffer(bytes(24), np.int64), [words], ArrayError),
    ):
        with pytest.raises(error):
            core.add_words(total, terms)
    assert not words.any()
