"""Data sets of one's own: from arrays, or from torch's map-style data sets."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fedcore.data.dataset import Dataset
from fedcore.errors import ArrayError, DtypeError, RangeError, ShapeError

Indices = npt.NDArray[np.int64]


class MapStyle(Protocol):
    """The face of a torch data set: a length, and ``dataset[i]``, a pair of an input and a label."""

    def __len__(self) -> int:
        """The number of examples."""
        ...

    def __getitem__(self, index: int, /) -> tuple[Any, Any]:
        """One example and its label."""
        ...


def from_arrays(
    train_x: Any,
    train_y: Any,
    test_x: Any,
    test_y: Any,
    *,
    classes: int | None = None,
    parts: Sequence[Indices] | None = None,
    clients: Any = None,
    name: str = "arrays",
) -> Dataset:
    """A data set of arrays in memory.

    Nothing is scaled: whoever has bytes of pixels divides them first.

    Args:
        train_x, test_x: floating[m, ...], NumPy arrays, CPU tensors or whatever NumPy makes an array of; converted to
            float32 (and not copied where they are that already).
        train_y, test_y: int[m], likewise; converted to int64.
        classes: their number; None for the highest label plus one.
        parts: the indices of each client's training examples, for the partition "natural".
        clients: int[m] or str[m], the client of each training example, in the place of ``parts``; the clients are
            numbered in ascending order.
        name: what messages call it.

    Raises:
        DtypeError: inputs are not floating, or labels are not integers.
        RangeError: an input is not finite or past float32's range, or a label is not below ``classes``.
        ArrayError, ShapeError: something is no array, or its shape does not fit; or parts and clients are both given.

    >>> x, y = np.random.default_rng(0).random((6, 3)), np.array([0, 1, 2, 0, 1, 2])
    >>> from_arrays(x[:4], y[:4], x[4:], y[4:]).classes
    3
    >>> from_arrays(x[:4], y[:4], x[4:], y[4:], clients=["b", "a", "b", "c"]).parts
    (array([1]), array([0, 2]), array([3]))
    """
    if parts is not None and clients is not None:
        raise ArrayError("clients: expected either parts or clients, got both: leave one out")
    inputs = _inputs("train_x", train_x), _inputs("test_x", test_x)
    labels = _labels("train_y", train_y), _labels("test_y", test_y)
    if classes is None:
        classes = 1 + max((int(y.max()) for y in labels if y.size), default=-1)
    if clients is not None:
        parts = _parts_of(clients, len(labels[0]))
    held = None if parts is None else tuple(parts)
    return Dataset(name, inputs[0], labels[0], inputs[1], labels[1], classes, parts=held)


def from_torch(train: MapStyle, test: MapStyle, *, classes: int | None = None, name: str = "torch") -> Dataset:
    """A data set of two of torch's map-style data sets, read into memory once.

    torch itself is not needed: every object with a length and pairs ``(input, label)`` will do.

    Args:
        train, test: their inputs are floating arrays of one shape (torchvision's ``ToTensor`` makes such), their
            labels whole numbers.
        classes, name: as in ``from_arrays``.

    Raises:
        ArrayError: an entry is no pair, or a data set is empty.
        ShapeError: the inputs differ in shape.
        DtypeError, RangeError: as in ``from_arrays``.

    Determinism: random transforms are drawn once, here, by whatever the data sets draw them from.

    >>> from_torch([([0.0, 1.0], 1)], [([1.0, 0.0], 0)]).train_x
    array([[0., 1.]], dtype=float32)
    """
    train_x, train_y = _stack("train", train)
    test_x, test_y = _stack("test", test)
    return from_arrays(train_x, train_y, test_x, test_y, classes=classes, name=name)


def _array(name: str, value: Any) -> npt.NDArray[Any]:
    try:
        return np.asarray(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError) as error:  # torch's, for a tensor on a device or in bfloat16
        raise ArrayError(f"{name}: expected an array in CPU memory: {error}") from None


def _inputs(name: str, value: Any) -> npt.NDArray[np.float32]:
    array = _array(name, value)
    if not np.issubdtype(array.dtype, np.floating):
        raise DtypeError(f"{name}: expected floating[m, ...] (scale integers first), got {array.dtype}")
    with np.errstate(over="ignore"):
        inputs = np.ascontiguousarray(array, dtype=np.float32)
    if not np.isfinite(inputs).all():
        raise RangeError(f"{name}: expected finite numbers in float32's range, got others")
    return inputs


def _labels(name: str, value: Any) -> npt.NDArray[np.int64]:
    array = _array(name, value)
    if not np.issubdtype(array.dtype, np.integer):
        raise DtypeError(f"{name}: expected int[m], got {array.dtype}")
    return array.astype(np.int64)


def _parts_of(clients: Any, examples: int) -> list[Indices]:
    """The indices of each client's examples, the clients in ascending order."""
    array = _array("clients", clients)
    if array.shape != (examples,):
        raise ShapeError(f"clients: expected one for each of {examples} training examples, got shape {array.shape}")
    if not (array.dtype.kind in "iuU" or all(isinstance(client, str) for client in array)):
        odd = next((client for client in array.tolist() if not isinstance(client, str)), None)
        raise DtypeError(f"clients: expected integers or strings, got {odd!r}")
    _, numbers, sizes = np.unique(array, return_inverse=True, return_counts=True)
    return np.split(np.argsort(numbers, kind="stable").astype(np.int64), np.cumsum(sizes)[:-1])


def _stack(name: str, examples: MapStyle) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    inputs, labels = [], []
    for index, (x, y) in enumerate(_pairs(name, examples)):
        inputs.append(_array(f"{name}[{index}]", x))
        labels.append(_array(f"{name}[{index}]", y))
        if inputs[-1].shape != inputs[0].shape:
            raise ShapeError(f"{name}[{index}]: expected an input of {inputs[0].shape}, got {inputs[-1].shape}")
        if labels[-1].size != 1:
            raise ShapeError(f"{name}[{index}]: expected one label, got {labels[-1].shape}")
    if not inputs:
        raise ArrayError(f"{name}: expected at least one example, got none")
    return np.stack(inputs), np.concatenate([label.reshape(1) for label in labels])


def _pairs(name: str, examples: MapStyle) -> Iterator[tuple[Any, Any]]:
    for index in range(len(examples)):
        example = examples[index]
        if not isinstance(example, tuple | list) or len(example) != 2:
            raise ArrayError(f"{name}[{index}]: expected a pair of an input and a label, got {type(example).__name__}")
        yield example[0], example[1]
