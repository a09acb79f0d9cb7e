"""Data sets in memory."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from fedcore.errors import ArrayError, DtypeError, FedcoreError, RangeError, ShapeError, UnknownNameError
from fedcore.simulation.data import REGISTRY, Dataset, from_arrays, from_torch, holdings, load


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"train_x": np.zeros((4, 2))}, DtypeError, r"train_x: expected float32\[m, ...\], got float64"),
        ({"test_y": np.zeros(3, np.int32)}, DtypeError, r"test_y: expected int64\[m\], got int32"),
        ({"test_x": np.zeros((3, 5), np.float32)}, ShapeError, "test_x: .* one example shape"),
        ({"train_y": np.zeros(5, np.int64)}, ShapeError, r"train_y: expected int64\[4\], got shape \(5,\)"),
        ({"train_y": np.array([0, 1, 2, 3])}, RangeError, r"train_y: expected 0 .. 2, got 0 .. 3"),
        ({"train_y": np.array([0, 1, 2, -1])}, RangeError, r"train_y: expected 0 .. 2, got -1 .. 2"),
    ],
)
def test_a_wrong_data_set_is_refused(change: dict[str, np.ndarray], error: type[FedcoreError], message: str) -> None:
    arrays = {
        "train_x": np.zeros((4, 2), np.float32),
        "train_y": np.zeros(4, np.int64),
        "test_x": np.zeros((3, 2), np.float32),
        "test_y": np.zeros(3, np.int64),
    }
    Dataset("made up", **arrays, classes=3)
    with pytest.raises(error, match=message):
        Dataset("made up", **(arrays | change), classes=3)


def test_an_unknown_name() -> None:
    with pytest.raises(UnknownNameError, match="data: 'minst' is unknown; did you mean 'mnist'"):
        load("minst")


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([np.array([0.0])], DtypeError, r"parts\[0\]: expected int64\[m_i\], got float64\[1\]"),
        ([np.arange(1), np.zeros((1, 1), int)], DtypeError, r"parts\[1\]: expected int64\[m_i\], got int64\[1, 1\]"),
        ([np.array([4])], RangeError, "parts: expected 0 .. 3, got 4 .. 4"),
        ([np.array([-1])], RangeError, "parts: expected 0 .. 3, got -1 .. -1"),
        ([np.array([1, 2]), np.array([2])], RangeError, "parts: expected each example once at most"),
    ],
)
def test_wrong_parts_are_refused(parts: list[np.ndarray], error: type[FedcoreError], message: str) -> None:
    x, y = np.zeros((4, 2), np.float32), np.zeros(4, np.int64)
    Dataset("made up", x, y, x, y, classes=1, parts=(np.array([3]), np.empty(0, np.int64)))
    with pytest.raises(error, match=message):
        Dataset("made up", x, y, x, y, classes=1, parts=tuple(parts))


@pytest.mark.parametrize("name", ["digits", "synthetic", "synthetic-iid"])
def test_the_registry_says_what_is_loaded(name: str) -> None:
    options = {"alpha": 1.0, "beta": 1.0} if name == "synthetic" else {}
    dataset = load(name, clients=2, seed=0, **options)
    source = REGISTRY[name]
    assert (dataset.name, dataset.train_x.shape[1:], dataset.classes) == (name, source.shape, source.classes)
    assert (dataset.parts is not None) == source.generated


FOLDERS = {"mnist": "mnist", "fashion-mnist": "fashion-mnist", "cifar-10": "cifar-10/cifar-10-batches-bin"}


@pytest.mark.parametrize("name", FOLDERS)
def test_the_registry_says_what_is_loaded_from_files(name: str) -> None:
    if not Path(os.environ.get("FEDCORE_DATA_DIR") or "nowhere", FOLDERS[name]).exists():
        pytest.skip(f"FEDCORE_DATA_DIR has no {FOLDERS[name]}")
    dataset = load(name)
    source = REGISTRY[name]
    assert (dataset.name, dataset.train_x.shape[1:], dataset.classes) == (name, source.shape, source.classes)


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


def test_every_example_is_counted_where_it_is_held():
    labels = np.array([2, 0, 2, 1, 2])
    counts = holdings(labels, [np.array([0, 2, 3]), np.empty(0, np.int64), np.array([1])], classes=4)
    assert counts.dtype == np.int64
    assert counts.tolist() == [[0, 1, 2, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
