"""Data sets in memory."""

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from fedcore.errors import ArrayError, DtypeError, RangeError, ShapeError
from fedcore.sim.data import Dataset, from_arrays, from_torch, holdings


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"train_x": np.zeros((4, 2))}, DtypeError, "train_x"),
        ({"test_y": np.zeros(3, np.int32)}, DtypeError, "test_y"),
        ({"test_x": np.zeros((3, 5), np.float32)}, ShapeError, "test_x"),
        ({"train_y": np.zeros(5, np.int64)}, ShapeError, "train_y"),
        ({"train_y": np.array([0, 1, 2, 3])}, RangeError, "train_y: .*0 .. 3"),
        ({"train_y": np.array([0, 1, 2, -1])}, RangeError, "train_y: .*-1 .. 2"),
    ],
)
def test_a_wrong_data_set_is_rejected(change, error, message):
    arrays = {
        "train_x": np.zeros((4, 2), np.float32),
        "train_y": np.zeros(4, np.int64),
        "test_x": np.zeros((3, 2), np.float32),
        "test_y": np.zeros(3, np.int64),
    }
    Dataset("test", **arrays, classes=3)
    with pytest.raises(error, match=rf"^{message}"):
        Dataset("test", **(arrays | change), classes=3)


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([np.array([0.0])], DtypeError, r"parts\[0\]"),
        ([np.arange(1), np.zeros((1, 1), int)], DtypeError, r"parts\[1\]"),
        ([np.array([4])], RangeError, "parts: .*4 .. 4"),
        ([np.array([-1])], RangeError, "parts: .*-1 .. -1"),
        ([np.array([1, 2]), np.array([2])], RangeError, "parts: .*two clients"),
    ],
)
def test_wrong_parts_are_rejected(parts, error, message):
    x, y = np.zeros((4, 2), np.float32), np.zeros(4, np.int64)
    Dataset("test", x, y, x, y, classes=1, parts=(np.array([3]), np.empty(0, np.int64)))
    with pytest.raises(error, match=rf"^{message}"):
        Dataset("test", x, y, x, y, classes=1, parts=tuple(parts))


X, Y = np.random.default_rng(0).random((8, 2, 3)), np.array([0, 1, 2, 0, 1, 2, 3, 0], np.uint8)


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy, lambda array: array.tolist()])
def test_arrays_tensors_and_lists_are_converted(make):
    dataset = from_arrays(make(X[:5]), make(Y[:5]), make(X[5:]), make(Y[5:]), name="mine")
    assert (dataset.name, dataset.classes) == ("mine", 4)
    assert (dataset.train_x.dtype, dataset.train_y.dtype) == (np.float32, np.int64)
    np.testing.assert_array_equal(dataset.train_x, X[:5].astype(np.float32))
    np.testing.assert_array_equal(dataset.test_y, Y[5:])


def test_float32_is_not_copied():
    x = X.astype(np.float32)
    assert np.shares_memory(from_arrays(x, Y, x, Y).train_x, x)


def test_torch_parameters_are_converted():
    x = torch.nn.Parameter(torch.rand(3, 2))
    assert from_arrays(x, [0, 1, 2], x, [0, 0, 0]).train_x.shape == (3, 2)


@pytest.mark.parametrize(
    "clients", [[20, 3, 20, 3, 7], np.array(["z", "a", "z", "a", "b"]), np.array(["z", "a", "z", "a", "b"], object)]
)
def test_a_client_for_each_example_makes_a_natural_partition(clients):
    dataset = from_arrays(X[:5], Y[:5], X, Y, clients=clients)
    assert [part.tolist() for part in dataset.parts] == [[1, 3], [4], [0, 2]]


def test_parts_make_a_natural_partition():
    dataset = from_arrays(X, Y, X, Y, parts=[np.array([0, 3]), np.array([5])])
    assert [part.tolist() for part in dataset.parts] == [[0, 3], [5]]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"train_x": (255 * X).astype(np.uint8)}, DtypeError, "train_x"),
        ({"test_x": X.astype(complex)}, DtypeError, "test_x"),
        ({"test_x": np.where(X[0, 0, 0] == X, np.nan, X)}, RangeError, "test_x"),
        ({"train_x": 1e300 * X}, RangeError, "train_x"),
        ({"train_y": Y / 2}, DtypeError, r"train_y: expected int\[m\], got float64$"),
        ({"train_y": np.array(["low"] * 8, object)}, DtypeError, "train_y: .* pandas.factorize"),
        ({"train_y": -Y.astype(int)}, RangeError, "train_y"),
        ({"classes": 3}, RangeError, "train_y"),
        ({"train_y": Y[1:]}, ShapeError, "train_y"),
        ({"test_x": X[:, :1]}, ShapeError, "test_x"),
        ({"clients": np.zeros(7, int)}, ShapeError, "clients"),
        ({"clients": [1.5] * 8}, DtypeError, "clients"),
        ({"clients": np.array(["a"] * 7 + [np.nan], object)}, DtypeError, "clients"),
        ({"clients": [0] * 8, "parts": []}, ArrayError, "clients"),
        ({"train_x": [[1.0], [1.0, 2.0]]}, ArrayError, "train_x"),
        ({"train_x": torch.zeros(8, 2, 3, dtype=torch.bfloat16)}, ArrayError, "train_x"),
        ({"train_x": torch.zeros(8, 2, 3, device="meta")}, ArrayError, "train_x"),
    ],
)
def test_wrong_arrays_are_rejected(change, error, message):
    given = {"train_x": X, "train_y": Y, "test_x": X, "test_y": Y} | change
    with pytest.raises(error, match=rf"^{message}"):
        from_arrays(**given)


@pytest.mark.parametrize("labels", [torch.from_numpy(Y), torch.from_numpy(Y).long()])
def test_torchs_data_sets(labels):
    whole = TensorDataset(torch.from_numpy(X), labels)
    dataset = from_torch(whole, torch.utils.data.Subset(whole, [6, 0]))
    np.testing.assert_array_equal(dataset.train_x, X.astype(np.float32))
    assert dataset.train_y.tolist() == Y.tolist()
    assert dataset.test_y.tolist() == [3, 0]


@pytest.mark.parametrize(
    ("train", "error", "message"),
    [
        ([], ArrayError, "train"),
        ([([0.5], 0), [0.5]], ArrayError, r"train\[1\]"),
        ([([0.5], 0), ([0.5, 1.0], 1)], ShapeError, r"train\[1\]"),
        ([([0.5], [0, 1])], ShapeError, r"train\[0\]"),
        ([([1], 0)], DtypeError, "train_x"),
        ([([0.5], 0.5)], DtypeError, "train_y"),
    ],
)
def test_wrong_torch_data_sets_are_rejected(train, error, message):
    with pytest.raises(error, match=rf"^{message}"):
        from_torch(train, [([0.5], 0)])


def test_holdings_count_examples_by_client_and_class():
    labels = np.array([2, 0, 2, 1, 2])
    counts = holdings(labels, [np.array([0, 2, 3]), np.empty(0, np.int64), np.array([1])], classes=4)
    assert counts.dtype == np.int64
    assert counts.tolist() == [[0, 1, 2, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
