import numpy as np
import pytest

from fedcore.experiment import load_preset
from fedcore.experiment.presets import load_and_partition
from fedcore.simulation.data import shards


def test_a_seed_divides_the_same_data_anew():
    experiment = load_preset("quickstart")
    (first, parts), (second, others) = load_and_partition(experiment, 0), load_and_partition(experiment, 1)
    assert first is second  # loaded once
    due = shards(first.train_y, 30, 2, seed=1, distinct_classes=True)
    assert all(np.array_equal(part, twin) for part, twin in zip(others, due, strict=True))
    assert any(not np.array_equal(part, other) for part, other in zip(parts, others, strict=True))


def test_made_data_is_made_for_the_clients_from_the_seed():
    changes = ["data={name='synthetic', alpha=1, beta=1, largest=60}", "partition={name='natural', clients=4}"]
    experiment = load_preset("quickstart", [*changes, "model=logistic"])
    (first, parts), (second, _) = load_and_partition(experiment, 0), load_and_partition(experiment, 1)
    assert [len(part) for part in parts] == [len(part) for part in first.parts]
    assert len(parts) == 4
    assert not np.array_equal(first.train_x[:50], second.train_x[:50])


@pytest.mark.parametrize(
    "partition",
    [
        "{name='label-k', clients=6, classes_per_client=3}",
        "{name='dirichlet', clients=6, alpha=0.3, least=5}",
        "{name='one-label', clients=6, smallest=5}",
        "{name='iid', clients=6}",
        "{name='iid-pareto', clients=6, smallest=5, largest=100}",
    ],
)
def test_every_partition_can_be_said_in_a_file(partition):
    dataset, parts = load_and_partition(load_preset("quickstart", [f"partition={partition}"]), 0)
    assert len(parts) == 6
    assert 0 <= min(part.min() for part in parts) <= max(part.max() for part in parts) < len(dataset.train_y)
