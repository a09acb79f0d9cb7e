"""Definitions of the native readers of updates and tensors."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.arrays import F32, F64


def column_range(column: F64) -> tuple[float, float]:
    """The least and the greatest of a column; NaN if it holds one, and inf and -inf if it holds nothing."""
    return float(column.min(initial=np.inf)), float(column.max(initial=-np.inf))


def column_sum(total: float, column: F64, times: F64 | None) -> float:
    """total + sum_i column[i] times[i], one after another; ``times`` of None is 1."""
    for value in (column if times is None else column * times).tolist():  # sum() and numpy.sum add otherwise
        total += value
    return total


def read_npy(datas: Sequence[Any], heads: Sequence[Any], shapes: Sequence[Any]) -> list[npt.NDArray[Any]] | None:
    """Read-only views of some bytes as float32 of those shapes, if each is its head and so many elements; else None.

    A shape without elements is read by whoever looks at heads, for NumPy has no place at the very end of bytes.
    """
    views = []
    for data, head, shape in zip(datas, heads, shapes, strict=True):
        if data.__class__ is not bytes or head.__class__ is not bytes or (elements := _elements(shape)) <= 0:
            return None
        if len(data) - len(head) != 4 * elements or not data.startswith(head):
            return None
        views.append(np.ndarray(shape, np.float32, data, len(head)))
    return views


def _elements(shape: Any) -> int:
    """The elements of a shape, a tuple of ints; -1 where it is none, or of more than memory holds."""
    if not isinstance(shape, tuple) or any(extent.__class__ is not int or extent < 0 for extent in shape):
        return -1
    elements = math.prod(shape)
    return elements if elements < 2**61 else -1


def read_plain_tensors(tensors: Sequence[Any], shapes: Sequence[Any]) -> list[npt.NDArray[Any]] | None:
    """Float32 vectors over tensors, if each is NumPy's own array of that shape, aligned and in C order; else None."""
    for tensor, shape in zip(tensors, shapes, strict=True):
        if tensor.__class__ is not np.ndarray or tensor.dtype != np.float32 or tensor.shape != shape:
            return None
        if not (tensor.flags.c_contiguous and tensor.flags.aligned):
            return None
    return [tensor.reshape(-1) for tensor in tensors]


def are_immutable(arrays: Sequence[Any]) -> bool:
    """Tell whether the chain of what each array is a view of ends in bytes, so that nobody can change its memory."""
    for array in arrays:
        base: Any = array
        while isinstance(base, np.ndarray | memoryview):
            base = base.base if isinstance(base, np.ndarray) else base.obj
        if not isinstance(base, bytes):
            return False
    return True


def read_plain_updates(
    updates: Sequence[Any],
    type: type,
    index: Any,
    n: int,
    lr: float,
    max_steps: float,
    max_examples: float,
    own_rates: bool,
    max_lr: float,
) -> tuple[list[Any], list[Any], F64, F64, F64] | None:
    """Clients, ys, steps, examples and lr * steps, if each update is of that type and what nearly all are; else None.

    That is: a float32 vector of n elements, of NumPy or torch, as a model of the open round, from one draw of a
    registered client that sent no other, without a control or a weight. Examples that a client does not give are NaN.
    """
    if not all(update.__class__ is type and _is_plain(update) for update in updates):
        return None
    clients, ys = [update.client for update in updates], [_plain_model(update.value, n) for update in updates]
    if any(y is None for y in ys):
        return None
    numbers = index.numbers(clients).tolist()
    if -1 in numbers or len({*numbers}) != len(numbers):
        return None
    steps = [_whole(update.steps, max_steps) for update in updates]
    examples = [math.nan if u.examples is None else _whole(u.examples, max_examples) for u in updates]
    rates = [_rate(update.lr, lr, own_rates, max_lr) for update in updates]
    with np.errstate(all="ignore"):
        distances = np.array(rates, np.float64) * np.array(steps, np.float64)
        plain = np.isfinite(1 / distances)
    if not (all(steps) and all(examples) and all(rates) and plain.all()):
        return None
    return clients, ys, np.array(steps, np.float64), np.array(examples, np.float64), distances


def _is_plain(update: Any) -> bool:
    return (
        _whole(update.count, 1) == 1
        and update.control is None
        and update.round is None
        and type(update.kind) is str
        and update.kind == "model"
        and update.weight is None
    )


def _plain_model(y: Any, n: int) -> F32 | None:
    """A model as a plain NumPy vector of n float32: itself, or the view that torch has of a tensor; else None."""
    if y.__class__.__module__ == "torch":
        try:
            y = y.detach().numpy()
        except Exception:  # it lies elsewhere, say
            return None
    if y.__class__ is not np.ndarray or y.dtype != np.float32 or y.shape != (n,):
        return None
    return y if y.flags.c_contiguous and y.flags.aligned else None


def _whole(value: object, most: float) -> float:
    """An int within 1..most; else 0."""
    return float(value) if isinstance(value, int) and value.__class__ is int and 1 <= value <= most else 0.0


def _rate(value: object, sent: float, own: bool, most: float) -> float:
    """``sent`` for None or the same number; where clients have rates of their own, a float within (0, most]; else 0."""
    if value is None:
        return sent
    if not isinstance(value, float) or value.__class__ is not float:
        return 0.0
    if own:
        return value if 0 < value <= most else 0.0
    return sent if value == sent else 0.0
