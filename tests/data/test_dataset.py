import numpy as np
import pytest

from fedcore.data import Dataset, load
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
