"""Data sets of Hugging Face's ``datasets``: from two splits of one."""

from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.data.arrays import from_arrays
from fedcore.data.dataset import Dataset
from fedcore.errors import ArrayError, ShapeError, UnknownNameError


def from_hf(
    train: Any,
    test: Any,
    input: str,
    label: str,
    *,
    client: str | None = None,
    classes: int | None = None,
    name: str = "hf",
) -> Dataset:
    """A data set of two splits of Hugging Face's, read into memory once.

    Images (columns of the feature ``datasets.Image``, and other uint8[H, W] or [H, W, C]) become float32[C, H, W] in
    [0, 1], as torch's networks take them. Nothing else is scaled.

    Args:
        train, test: ``datasets.Dataset``; what is streamed has to be read first.
        input, label: the names of their columns. Inputs are of one shape; labels are integers or ``ClassLabel``.
        client: the name of a column of ``train`` that says whose an example is, for the partition "natural": clients
            are its values, in ascending order.
        classes: their number; None for ``ClassLabel``'s, or else the highest label plus one.
        name: what messages call it.

    Raises:
        UnknownNameError: there is no such column.
        ArrayError: a split is no ``datasets.Dataset``.
        ShapeError: inputs differ in shape.
        DtypeError, RangeError: as in ``from_arrays``.

    Example:

        splits = datasets.load_dataset("mnist")
        data = fedcore.data.from_hf(splits["train"], splits["test"], "image", "label")
    """
    inputs = [_inputs(_column("train", train, input)), _inputs(_column("test", test, input))]
    labels = [_column("train", train, label), _column("test", test, label)]
    if classes is None:
        classes = getattr(train.features[label], "num_classes", None)
    clients = None if client is None else _column("train", train, client)
    return from_arrays(inputs[0], labels[0], inputs[1], labels[1], classes=classes, clients=clients, name=name)


def _column(split: str, data: Any, column: str) -> npt.NDArray[Any]:
    if not hasattr(data, "with_format") or not hasattr(data, "__len__"):
        raise ArrayError(
            f"{split}: expected a datasets.Dataset, got {type(data).__name__}: choose a split, load what is streamed"
        )
    if column not in data.column_names:
        raise UnknownNameError.of(f"column of {split}", column, data.column_names)
    values = data.select_columns([column]).with_format("numpy")[:][column] if len(data) else np.zeros((0, 1))
    try:
        array = np.asarray(values)
    except ValueError:
        array = np.empty(0, object)
    if array.dtype == object and not (len(values) and all(isinstance(value, str) for value in values)):
        shapes = sorted({np.shape(value) for value in values})[:4]
        raise ShapeError(f"{split}: expected values of {column!r} of one shape, got {shapes}")
    return array


def _inputs(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Images as torch's networks take them, and whatever else as it is."""
    if values.dtype != np.uint8 or values.ndim not in (3, 4):
        return values
    channels_last = values[..., None] if values.ndim == 3 else values
    return np.ascontiguousarray(channels_last.transpose(0, 3, 1, 2), dtype=np.float32) / np.float32(255)
