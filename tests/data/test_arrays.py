import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from fedcore.data import from_arrays, from_torch
from fedcore.errors import ArrayError, DtypeError, RangeError, ShapeError

X, Y = np.random.default_rng(0).random((8, 2, 3)), np.array([0, 1, 2, 0, 1, 2, 3, 0], np.uint8)


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy, lambda array: array.tolist()])
def test_whatever_holds_numbers(make):
    dataset = from_arrays(make(X[:5]), make(Y[:5]), make(X[5:]), make(Y[5:]), name="mine")
    assert (dataset.name, dataset.classes) == ("mine", 4)
    assert (dataset.train_x.dtype, dataset.train_y.dtype) == (np.float32, np.int64)
    np.testing.assert_array_equal(dataset.train_x, X[:5].astype(np.float32))
    np.testing.assert_array_equal(dataset.test_y, Y[5:])


def test_float32_is_not_copied():
    x = X.astype(np.float32)
    dataset = from_arrays(x, Y, x, Y)
    assert np.shares_memory(dataset.train_x, x)


def test_parameters_of_torch_are_taken():
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
        ({"train_x": (255 * X).astype(np.uint8)}, DtypeError, r"train_x: expected floating.* got uint8"),
        ({"test_x": X.astype(complex)}, DtypeError, "test_x: expected floating.* got complex128"),
        ({"test_x": np.where(X[0, 0, 0] == X, np.nan, X)}, RangeError, "test_x: expected finite"),
        ({"train_x": 1e300 * X}, RangeError, "train_x: expected finite numbers in float32's range"),
        ({"train_y": Y / 2}, DtypeError, r"train_y: expected int\[m\], got float64"),
        ({"train_y": -Y.astype(int)}, RangeError, "train_y: expected 0 .. 3, got -3 .. 0"),
        ({"classes": 3}, RangeError, "train_y: expected 0 .. 2, got 0 .. 3"),
        ({"train_y": Y[1:]}, ShapeError, r"train_y: expected int64\[8\]"),
        ({"test_x": X[:, :1]}, ShapeError, "test_x: .* one example shape"),
        ({"clients": np.zeros(7, int)}, ShapeError, "clients: expected one for each of 8 training examples, got"),
        ({"clients": [1.5] * 8}, DtypeError, "clients: expected integers or strings, got 1.5"),
        ({"clients": np.array(["a"] * 7 + [np.nan], object)}, DtypeError, "clients: expected integers .*, got nan"),
        ({"clients": [0] * 8, "parts": []}, ArrayError, "clients: expected either parts or clients, got both"),
        ({"train_x": [[1.0], [1.0, 2.0]]}, ArrayError, "train_x: expected an array"),
        ({"train_x": torch.zeros(8, 2, 3, dtype=torch.bfloat16)}, ArrayError, "train_x: expected an array"),
        ({"train_x": torch.zeros(8, 2, 3, device="meta")}, ArrayError, "train_x: expected an array in CPU memory"),
    ],
)
def test_wrong_arrays_are_refused(change, error, message):
    given = {"train_x": X, "train_y": Y, "test_x": X, "test_y": Y} | change
    with pytest.raises(error, match=message):
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
        ([], ArrayError, "train: expected at least one example"),
        ([([0.5], 0), [0.5]], ArrayError, r"train\[1\]: expected a pair of an input and a label, got list"),
        ([([0.5], 0), ([0.5, 1.0], 1)], ShapeError, r"train\[1\]: expected an input of \(1,\), got \(2,\)"),
        ([([0.5], [0, 1])], ShapeError, r"train\[0\]: expected one label, got \(2,\)"),
        ([([1], 0)], DtypeError, "train_x: expected floating"),
        ([([0.5], 0.5)], DtypeError, "train_y: expected int"),
    ],
)
def test_wrong_data_sets_are_refused(train, error, message):
    with pytest.raises(error, match=message):
        from_torch(train, [([0.5], 0)])
