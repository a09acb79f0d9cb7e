"""SYNTHETIC and its IID variant."""

import numpy as np
import pytest

from fedcore.errors import RangeError, UnknownNameError
from fedcore.sim.data import holdings, load


def synthetic(alpha=1.0, beta=1.0, **options):
    return load("synthetic", alpha=alpha, beta=beta, **{"clients": 5, "seed": 3, "largest": 400} | options)


def client(dataset, index):
    return dataset.train_x[dataset.parts[index]], dataset.train_y[dataset.parts[index]]


def test_shapes_and_sizes():
    dataset = synthetic()
    assert dataset.train_x.shape[1:] == (60,)
    assert dataset.classes == 10
    sizes = [len(part) for part in dataset.parts]
    assert len(sizes) == 5
    assert 50 <= min(sizes) <= max(sizes) <= 400
    np.testing.assert_array_equal(np.concatenate(dataset.parts), np.arange(len(dataset.train_y)))
    assert len(dataset.test_y) == sum(-(-size // 10) for size in sizes)


def test_the_data_depends_on_the_seed():
    first, again, other = synthetic(), synthetic(), synthetic(seed=4)
    np.testing.assert_array_equal(first.train_x, again.train_x)
    np.testing.assert_array_equal(first.test_y, again.test_y)
    assert not np.array_equal(client(first, 0)[0][:50], client(other, 0)[0][:50])


def test_a_client_does_not_depend_on_other_clients_or_its_size():
    few, many = synthetic(), synthetic(clients=8)
    for index in range(5):
        np.testing.assert_array_equal(client(few, index)[0], client(many, index)[0])
    small, large = (synthetic(smallest=size, largest=size) for size in (20, 30))
    np.testing.assert_array_equal(client(small, 2)[0], client(large, 2)[0][:20])
    np.testing.assert_array_equal(client(small, 2)[1], client(large, 2)[1][:20])


def test_features_have_the_law_of_the_paper():
    """x ~ N(v_k, diag(j^-1.2)) and v_k ~ N(B_k, 1), B_k ~ N(0, beta^2)."""
    dataset = load("synthetic", alpha=0.0, beta=3.0, clients=400, seed=0, smallest=60, largest=60)
    x = dataset.train_x.reshape(400, 60, 60).astype(np.float64)
    np.testing.assert_allclose(x.var(axis=1, ddof=1).mean(axis=0), np.arange(1, 61) ** -1.2, rtol=0.05)
    v = x.mean(axis=1)
    B = v.mean(axis=1)
    assert B.std() == pytest.approx(3, rel=0.1)
    assert (v - B[:, None]).std() == pytest.approx(1, rel=0.05)
    assert abs(B.mean()) < 0.5


def test_labels_are_linear_in_each_client():
    """A softmax regression on the client's examples fits them."""
    dataset = load("synthetic", alpha=1.0, beta=1.0, clients=1, seed=1, smallest=600, largest=600)
    x, y = client(dataset, 0)
    features, W = np.column_stack([x - x.mean(axis=0), np.ones(600)]), np.zeros((61, 10))
    for _ in range(3000):
        scores = features @ W
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        W += 0.01 * features.T @ (np.eye(10)[y] - p / p.sum(axis=1, keepdims=True))
    assert len(np.unique(y)) > 2
    assert ((features @ W).argmax(axis=1) == y).mean() > 0.99


def test_alpha_changes_no_label():
    one, other = (synthetic(alpha=alpha) for alpha in (0.0, 2.0))
    np.testing.assert_array_equal(one.train_x, other.train_x)
    np.testing.assert_array_equal(one.train_y, other.train_y)


def test_clients_have_different_models_except_in_the_iid_variant():
    apart = load("synthetic", alpha=0.0, beta=0.0, clients=20, seed=0, smallest=200, largest=200)
    alike = load("synthetic-iid", clients=20, seed=0, smallest=200, largest=200)
    held = [(holdings(data.train_y, data.parts, 10) > 0).sum(axis=1).mean() for data in (apart, alike)]
    assert held[0] < 5 < 9 < held[1]


def test_the_iid_variant_shares_one_law():
    dataset = load("synthetic-iid", clients=300, seed=0, smallest=60, largest=60)
    x = dataset.train_x.reshape(300, 60, 60).astype(np.float64)
    assert np.abs(x.mean(axis=(0, 1))).max() < 4 / np.sqrt(300 * 60)  # v_k = 0
    again = load("synthetic-iid", clients=2, seed=0, smallest=60, largest=60)
    np.testing.assert_array_equal(again.train_y, dataset.train_y[:120])


def test_an_unknown_law_gets_a_suggestion():
    with pytest.raises(UnknownNameError, match="sizes: 'parto' is unknown; did you mean 'pareto'"):
        synthetic(sizes="parto")


def test_lognormal_sizes():
    sizes = [len(part) for part in synthetic(sizes="lognormal", clients=50, largest=10**5).parts]
    assert min(sizes) >= 50
    assert np.median(sizes) == pytest.approx(50 + np.exp(4), rel=0.5)


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": -1.0},
        {"beta": float("inf")},
        {"test_share": 0.0},
        {"smallest": 0},
        {"largest": 40},
        {"clients": 0},
        {"clients": None},
    ],
)
def test_numbers_out_of_range_are_rejected(options):
    with pytest.raises(RangeError, match=rf"^{next(iter(options))}"):
        synthetic(**options)
