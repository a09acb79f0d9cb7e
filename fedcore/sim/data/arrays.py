"""Labelled data sets in memory, from arrays, torch and Hugging Face."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.arrays import own_class, own_classes
from fedcore.errors import ArrayError, DtypeError, RangeError, ShapeError, UnknownNameError
from fedcore.validation import Represented

Inputs = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, repr=False)
class Dataset(Represented):
    """Training and test examples with their labels.

    Attributes:
        name: the name in messages, and in ``load``.
        train_x: float32[m, ...]; images are [m, channels, height, width], with pixels in [0, 1].
        train_y: int64[m], in 0 .. classes-1.
        test_x: float32[m', ...], with the same example shape.
        test_y: int64[m'].
        classes: the number of classes.
        parts: the training examples of each client, int64[m_i] each, without duplicates; None if the data set has no
            clients.
        test_parts: the test examples of each client, likewise.
        clients: the name of each client; None if the clients have only numbers.
    """

    name: str
    train_x: Inputs
    train_y: Labels
    test_x: Inputs
    test_y: Labels
    classes: int
    parts: tuple[Indices, ...] | None = None
    test_parts: tuple[Indices, ...] | None = None
    clients: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for part, x, y, parts in (
            ("train", self.train_x, self.train_y, self.parts),
            ("test", self.test_x, self.test_y, self.test_parts),
        ):
            if x.dtype != np.float32:
                raise DtypeError(f"{part}_x: expected float32[m, ...], got {x.dtype}")
            if y.dtype != np.int64:
                raise DtypeError(f"{part}_y: expected int64[m], got {y.dtype}")
            if x.ndim < 2 or x.shape[1:] != self.train_x.shape[1:]:
                raise ShapeError(f"{part}_x: expected float32[m, ...] of one example shape, got {x.shape}")
            if y.shape != x.shape[:1]:
                raise ShapeError(f"{part}_y: expected int64[{len(x)}], got shape {y.shape}")
            if y.size and not 0 <= y.min() <= y.max() < self.classes:
                raise RangeError(f"{part}_y: expected 0 .. {self.classes - 1}, got {y.min()} .. {y.max()}")
            if parts is not None:
                check_parts("parts" if part == "train" else "test_parts", parts, len(y))


def check_parts(name: str, parts: Sequence[Indices], examples: int) -> None:
    """Raise an error unless each client has indices int64[m_i] of examples, and no example has two clients."""
    for client, held in enumerate(parts):
        if held.dtype != np.int64 or held.ndim != 1:
            raise DtypeError(f"{name}[{client}]: expected int64[m_i], got {held.dtype}{list(held.shape)}")
    every = np.concatenate([np.empty(0, np.int64), *parts])
    if every.size and not 0 <= every.min() <= every.max() < examples:
        raise RangeError(f"{name}: expected 0 .. {examples - 1}, got {every.min()} .. {every.max()}")
    if len(np.unique(every)) < len(every):
        raise RangeError(f"{name}: an example belongs to two clients")


def holdings(labels: npt.NDArray[np.integer[Any]], parts: Sequence[Indices], classes: int) -> npt.NDArray[np.int64]:
    """Count each client's examples of each of C classes: int64[N, C].

    ``labels`` is int[m], in 0 .. C-1; ``parts`` has N arrays of indices into it.

    >>> holdings(np.array([0, 1, 1]), [np.array([0, 1]), np.array([2])], 2).tolist()
    [[1, 1], [0, 1]]
    """
    return np.array([np.bincount(labels[part], minlength=classes) for part in parts], np.int64)


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
    """Create a data set from arrays in memory.

    The inputs are not scaled; divide uint8 pixels by 255 first.

    Args:
        train_x, test_x: floating[m, ...]: NumPy arrays, CPU tensors or other array-likes. They are converted to
            float32; float32 arrays are not copied.
        train_y, test_y: int[m], likewise; they are converted to int64.
        classes: the number of classes. Default: the highest label plus one.
        parts: the indices of each client's training examples, for the partition "natural".
        clients: int[m] or str[m], the client of each training example, instead of ``parts``. The clients are numbered
            in ascending order.
        name: the name in messages.

    >>> x, y = np.random.default_rng(0).random((6, 3)), np.array([0, 1, 2, 0, 1, 2])
    >>> from_arrays(x[:4], y[:4], x[4:], y[4:]).classes
    3
    >>> from_arrays(x[:4], y[:4], x[4:], y[4:], clients=["b", "a", "b", "c"]).parts
    (array([1]), array([0, 2]), array([3]))
    """
    if parts is not None and clients is not None:
        raise ArrayError("clients: cannot be combined with parts; leave one out")
    inputs = _inputs("train_x", train_x), _inputs("test_x", test_x)
    labels = _labels("train_y", train_y), _labels("test_y", test_y)
    if classes is None:
        classes = 1 + max((int(y.max()) for y in labels if y.size), default=-1)
    if clients is not None:
        clients, parts = _parts_of(clients, len(labels[0]))
    held = None if parts is None else tuple(own_class("parts", part) for part in parts)
    return Dataset(name, inputs[0], labels[0], inputs[1], labels[1], classes, parts=held, clients=clients)


def from_torch(train: Any, test: Any, *, classes: int | None = None, name: str = "torch") -> Dataset:
    """Create a data set from two map-style data sets of torch, which are read into memory once.

    Any object with a length and pairs ``(input, label)`` works, even without torch. Inputs are floating arrays of one
    shape (torchvision's ``ToTensor`` makes such arrays); labels are integers. Random transforms are drawn once, from
    the data sets' own generators. ``classes`` and ``name`` are those of ``from_arrays``.

    >>> from_torch([([0.0, 1.0], 1)], [([1.0, 0.0], 0)]).train_x
    array([[0., 1.]], dtype=float32)
    """
    train_x, train_y = _stack("train", train)
    test_x, test_y = _stack("test", test)
    return from_arrays(train_x, train_y, test_x, test_y, classes=classes, name=name)


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
    """Create a data set from two splits of a Hugging Face data set, which are read into memory once.

    Images become float32[C, H, W] in [0, 1], the layout of torch's networks. These are columns of the feature
    ``datasets.Image``, and other uint8[H, W] or [H, W, C]. Other inputs are not scaled.

    Args:
        train, test: ``datasets.Dataset``; load a streamed one first.
        input, label: the names of the columns. Inputs have one shape; labels are integers or ``ClassLabel``.
        client: the column of ``train`` with the client of each example, for the partition "natural". The clients are
            numbered in ascending order.
        classes: the number of classes. Default: that of ``ClassLabel``, or else the highest label plus one.
        name: the name in messages.

    Example:

        splits = datasets.load_dataset("mnist")
        data = fedcore.sim.data.from_hf(splits["train"], splits["test"], "image", "label")
    """
    inputs = [_images(_column("train", train, input)), _images(_column("test", test, input))]
    labels = [_column("train", train, label), _column("test", test, label)]
    if classes is None:
        classes = getattr(train.features[label], "num_classes", None)
    clients = None if client is None else _column("train", train, client)
    return from_arrays(inputs[0], labels[0], inputs[1], labels[1], classes=classes, clients=clients, name=name)


def _array(name: str, value: Any) -> npt.NDArray[Any]:
    value = own_classes(name, value)
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # For example, a tensor on a GPU or in bfloat16.
        raise ArrayError(f"{name}: must be an array in CPU memory: {error}") from None


def _inputs(name: str, value: Any) -> Inputs:
    array = _array(name, value)
    if not np.issubdtype(array.dtype, np.floating):
        raise DtypeError(f"{name}: must be floating[m, ...], got {array.dtype}; scale integers first")
    with np.errstate(over="ignore"):
        inputs = np.ascontiguousarray(array, dtype=np.float32)
    if not np.isfinite(inputs).all():
        raise RangeError(f"{name}: must be finite in float32")
    return inputs


def _labels(name: str, value: Any) -> Labels:
    array = _array(name, value)
    if not np.issubdtype(array.dtype, np.integer):
        is_text = array.dtype.kind in "OUT"
        way = "; number the classes, for example by pandas.factorize(labels, sort=True)[0]" if is_text else ""
        raise DtypeError(f"{name}: expected int[m], got {array.dtype}{way}")
    return array.astype(np.int64)


def _parts_of(clients: Any, examples: int) -> tuple[tuple[str, ...], list[Indices]]:
    """Return the names of the clients in ascending order, and the indices of each client's examples."""
    array = _array("clients", clients)
    if array.shape != (examples,):
        raise ShapeError(f"clients: must have shape [{examples}], one per training example, got {list(array.shape)}")
    if not (array.dtype.kind in "iuU" or all(isinstance(client, str) for client in array)):
        odd = next((client for client in array.tolist() if not isinstance(client, str)), None)
        raise DtypeError(f"clients: must be integers or strings, got {odd!r}")
    names, numbers, sizes = np.unique(array, return_inverse=True, return_counts=True)
    held = np.split(np.argsort(numbers, kind="stable").astype(np.int64), np.cumsum(sizes)[:-1])
    return tuple(map(str, names.tolist())), held


def _stack(name: str, examples: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    inputs: list[npt.NDArray[Any]] = []
    labels: list[npt.NDArray[Any]] = []
    for index in range(len(examples)):
        example, place = examples[index], f"{name}[{index}]"
        if not isinstance(example, tuple | list) or len(example) != 2:
            raise ArrayError(f"{place}: must be a pair of an input and a label, got {type(example).__name__}")
        x, y = (_array(place, value) for value in example)
        if inputs and x.shape != inputs[0].shape:
            raise ShapeError(f"{place}: expected an input of {inputs[0].shape}, got {x.shape}")
        if y.size != 1:
            raise ShapeError(f"{place}: expected one label, got {y.shape}")
        inputs.append(x)
        labels.append(y.reshape(1))
    if not inputs:
        raise ArrayError(f"{name}: must not be empty")
    return np.stack(inputs), np.concatenate(labels)


def _column(split: str, data: Any, column: str) -> npt.NDArray[Any]:
    """Return a column of a Hugging Face data set."""
    if not hasattr(data, "with_format") or not hasattr(data, "__len__"):
        raise ArrayError(f"{split}: must be a Dataset, got {type(data).__name__}; select a split, load a streamed one")
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


def _images(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return images in torch's layout, scaled to [0, 1]; return other values unchanged."""
    if values.dtype != np.uint8 or values.ndim not in (3, 4):
        return values
    channels_last = values[..., None] if values.ndim == 3 else values
    return np.ascontiguousarray(channels_last.transpose(0, 3, 1, 2), dtype=np.float32) / np.float32(255)
