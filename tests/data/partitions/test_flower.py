import sys

import numpy as np
import pytest

from fedcore.data import from_flower
from fedcore.errors import DtypeError, MissingDependencyError, RangeError

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(5), 40))


@pytest.fixture
def partitioner():
    reason = "Flower Datasets is not installed (pip install flwr-datasets)"
    return pytest.importorskip("flwr_datasets.partitioner", reason=reason)


def check(parts, clients):
    assert len(parts) == clients
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(200))
    for part in parts:
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()


def test_in_equal_parts(partitioner):
    parts = from_flower(partitioner.IidPartitioner(4), LABELS)
    check(parts, 4)
    assert [len(part) for part in parts] == [50] * 4


def test_by_the_label(partitioner):
    parts = from_flower(
        partitioner.PathologicalPartitioner(5, "label", 1, class_assignment_mode="deterministic"), LABELS
    )
    check(parts, 5)
    assert [len(set(LABELS[part])) for part in parts] == [1] * 5


def test_by_a_dirichlet_law_with_a_seed_of_its_own(partitioner):
    first, again = (
        from_flower(partitioner.DirichletPartitioner(4, "label", 0.5, min_partition_size=1, seed=7), LABELS)
        for _ in range(2)
    )
    check(first, 4)
    assert all(np.array_equal(part, twin) for part, twin in zip(first, again, strict=True))


def test_one_that_has_a_data_set_is_refused(partitioner):
    used = partitioner.IidPartitioner(4)
    from_flower(used, LABELS)
    with pytest.raises(RangeError, match="partitioner: expected one without a data set"):
        from_flower(used, LABELS)


def test_labels_are_checked(partitioner):
    with pytest.raises(DtypeError, match="labels: expected int"):
        from_flower(partitioner.IidPartitioner(4), LABELS / 2)


def test_where_it_is_not_installed_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match="pip install flwr-datasets"):
        from_flower(object(), LABELS)
