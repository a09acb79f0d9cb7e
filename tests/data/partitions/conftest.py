import numpy as np
import pytest


@pytest.fixture(scope="session")
def labels():
    """Labels with the given class sizes, mixed, and not counted from 0."""

    def make(sizes, seed=0):
        return np.random.default_rng(seed).permutation(np.repeat(3 * np.arange(len(sizes)), sizes))

    return make


@pytest.fixture(scope="session")
def check():
    """Checks what every partition promises, and returns how often each example was dealt."""

    def checked(deal, labels, clients):
        kept = labels.copy()
        parts, again = deal(), deal()
        np.testing.assert_array_equal(labels, kept)  # read-only
        assert len(parts) == clients
        for part, twin in zip(parts, again, strict=True):
            assert part.dtype == np.int64
            assert (np.diff(part) > 0).all()
            np.testing.assert_array_equal(part, twin)
        dealt = np.bincount(np.concatenate(parts), minlength=len(labels))
        assert dealt.max(initial=0) <= 1
        assert len(dealt) == len(labels)
        return parts, dealt

    return checked
