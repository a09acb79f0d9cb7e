import os
from pathlib import Path

import numpy as np
import pytest

from fedcore.data import REGISTRY, Dataset, load
from fedcore.errors import DtypeError, FedcoreError, RangeError, ShapeError, UnknownNameError


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
def test_wrong_arrays_are_refused(change: dict[str, np.ndarray], error: type[FedcoreError], message: str) -> None:
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
