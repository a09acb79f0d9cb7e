"""The 8x8 digits that come with scikit-learn: real data without a download."""

from importlib.metadata import PackageNotFoundError, distribution

import numpy as np

from fedcore.data.dataset import Dataset
from fedcore.errors import MissingDependencyError
from fedcore.randomness import generator

TRAIN = 1437
"""Training examples; the other 360 of the 1,797 are for the test."""


def load() -> Dataset:
    """The digits: pixels / 16 as float32[m, 1, 8, 8], 10 classes, 1,437 for training and 360 for the test.

    Raises:
        MissingDependencyError: scikit-learn is not installed.

    Determinism: the split is one fixed permutation, the same in every run.

    Reference: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998 (its test part).
    """
    try:
        scikit_learn = distribution("scikit-learn")
    except PackageNotFoundError as error:
        raise MissingDependencyError.of("digits", "scikit-learn", extra="sim") from error
    # From its file: to import scikit-learn takes two seconds in each process.
    table = np.loadtxt(str(scikit_learn.locate_file("sklearn/datasets/data/digits.csv.gz")), delimiter=",")
    x = (table[:, :64] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    y = table[:, 64].astype(np.int64)
    order = generator(0, "data: digits split").permutation(len(x))
    train, test = order[:TRAIN], order[TRAIN:]
    return Dataset("digits", x[train], y[train], x[test], y[test], classes=10)
