import numpy as np
import pytest

from fedcore.data import divide, load, partitions
from fedcore.errors import UnknownNameError

OPTIONS = {
    "shards": {"shards_per_client": 2},
    "label-k": {"classes_per_client": 2},
    "dirichlet": {"alpha": 0.5},
    "one-label": {"smallest": 3},
}


@pytest.fixture(scope="module")
def dataset():
    return load("synthetic-iid", clients=10, seed=0, smallest=200, largest=200)


@pytest.mark.parametrize("name", partitions.REGISTRY)
def test_every_partition_by_its_name(dataset, name):
    parts = divide(dataset, name, 10, seed=3, **OPTIONS.get(name, {}))
    assert len(parts) == 10
    held = np.concatenate(parts)
    assert len(np.unique(held)) == len(held)
    if name != "natural":
        due = partitions.REGISTRY[name](dataset.train_y, 10, seed=3, **OPTIONS.get(name, {}))
        assert all(np.array_equal(part, twin) for part, twin in zip(parts, due, strict=True))
        other = divide(dataset, name, 10, seed=4, **OPTIONS.get(name, {}))
        assert any(not np.array_equal(part, twin) for part, twin in zip(parts, other, strict=True))


def test_an_unknown_name(dataset):
    with pytest.raises(UnknownNameError, match="partition: 'dirichle' is unknown; did you mean 'dirichlet'"):
        divide(dataset, "dirichle", 3, seed=0)
