"""Reference implementations of the native readers of updates and tensors."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.arrays import F32, F64


def column_range(column: F64) -> tuple[float, float]:
    """Return a column's minimum and maximum: NaN if it contains NaN, inf and -inf if it is empty."""
    return float(column.min(initial=np.inf)), float(column.max(initial=-np.inf))


def column_sum(total: float, column: F64, times: F64 | None) -> float:
    """Return total + sum_i column[i] times[i], added in order; a missing ``times`` counts as 1."""
    for value in (column if times is None else column * times).tolist():  # sum() and numpy.sum use a different order
        total += value
    return total


def read_npy(datas: Sequence[Any], heads: Sequence[Any], shapes: Sequence[Any]) -> list[npt.NDArray[Any]] | None:
    """Return read-only float32 views of the bytes after each header; None if a header, length or type differs.

    None also for an empty array, since NumPy cannot make a view at the end of bytes.
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
    """Return the number of elements of a shape; -1 if it is not a tuple of ints or too large for memory."""
    if not isinstance(shape, tuple) or any(extent.__class__ is not int or extent < 0 for extent in shape):
        return -1
    elements = math.prod(shape)
    return elements if elements < 2**61 else -1


def read_plain_tensors(tensors: Sequence[Any], shapes: Sequence[Any]) -> list[npt.NDArray[Any]] | None:
    """Return flat views of plain float32 arrays that have these shapes, aligned and in C order; otherwise None."""
    for tensor, shape in zip(tensors, shapes, strict=True):
        if tensor.__class__ is not np.ndarray or tensor.dtype != np.float32 or tensor.shape != shape:
            return None
        if not (tensor.flags.c_contiguous and tensor.flags.aligned):
            return None
    return [tensor.reshape(-1) for tensor in tensors]


def are_immutable(arrays: Sequence[Any]) -> bool:
    """Whether each array's memory is immutable because its chain of bases ends in bytes."""
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
    oldest: int = 0,
    newest: int = -1,
    absent: int = 0,
    repeats: bool = False,
) -> tuple[list[Any], list[Any], F64, F64, F64, npt.NDArray[np.int64]] | None:
    """Return clients, ys, steps, examples, lr * steps and rounds if all updates have the usual form; otherwise None.

    An update has the usual form if:

    * It is an instance of ``type`` itself.
    * Its value is a model, a float32 vector of n elements of NumPy or torch.
    * Its round is within oldest..newest, or None for ``absent``, unless that is -2.
    * Its client is registered, was drawn once and, unless ``repeats``, sent one update.
    * It has no control, weight and id, and its loss is None or a float >= 0.

    Missing examples are NaN.
    """
    if not all(update.__class__ is type and _is_plain(update) for update in updates):
        return None
    clients, ys = [update.client for update in updates], [_plain_model(update.value, n) for update in updates]
    if any(y is None for y in ys):
        return None
    numbers = index.numbers(clients).tolist()
    if -1 in numbers or (not repeats and len({*numbers}) != len(numbers)):
        return None
    rounds = [absent if update.round is None else update.round for update in updates]
    named = [update.round for update in updates if update.round is not None]
    if -2 in rounds or any(round.__class__ is not int or not oldest <= round <= newest for round in named):
        return None
    steps = [_whole(update.steps, max_steps) for update in updates]
    examples = [math.nan if u.examples is None else _whole(u.examples, max_examples) for u in updates]
    rates = [_rate(update.lr, lr, own_rates, max_lr) for update in updates]
    with np.errstate(all="ignore"):
        distances = np.array(rates, np.float64) * np.array(steps, np.float64)
        plain = np.isfinite(1 / distances)
    if not (all(steps) and all(examples) and all(rates) and plain.all()):
        return None
    columns = np.array(steps, np.float64), np.array(examples, np.float64), distances, np.array(rounds, np.int64)
    return clients, ys, *columns


def _is_plain(update: Any) -> bool:
    return (
        _whole(update.count, 1) == 1
        and update.control is None
        and type(update.kind) is str
        and update.kind == "model"
        and update.weight is None
        and update.update_id is None
        and (update.loss is None or (update.loss.__class__ is float and 0 <= update.loss < math.inf))
    )


def _plain_model(y: Any, n: int) -> F32 | None:
    """Return a model as a plain NumPy vector of n float32 numbers, without a copy; None if that is impossible."""
    if y.__class__.__module__ == "torch":
        try:
            y = y.detach().numpy()
        except Exception:  # for example, the tensor is on a GPU
            return None
    if y.__class__ is not np.ndarray or y.dtype != np.float32 or y.shape != (n,):
        return None
    return y if y.flags.c_contiguous and y.flags.aligned else None


def _whole(value: object, most: float) -> float:
    """Return ``value`` if it is an int within 1..most; otherwise 0."""
    return float(value) if isinstance(value, int) and value.__class__ is int and 1 <= value <= most else 0.0


def _rate(value: object, sent: float, own: bool, most: float) -> float:
    """Return the client's rate: ``sent`` for None or an equal number, a float in (0, most] if ``own``; otherwise 0."""
    if value is None:
        return sent
    if not isinstance(value, float) or value.__class__ is not float:
        return 0.0
    if own:
        return value if 0 < value <= most else 0.0
    return sent if value == sent else 0.0
