"""Reference implementations of the native readers of updates and tensors."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.arrays import F32, F64
from fedcore.server.update import KINDS


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


def read_plain_tensors(tensors: Any, shapes: Any, dtypes: Any) -> list[npt.NDArray[Any]] | None:
    """Return flat views of plain arrays that have these shapes and dtypes, aligned and in C order; otherwise None."""
    for tensor, shape, dtype in zip(tensors, shapes, dtypes, strict=True):
        if tensor.__class__ is not np.ndarray or tensor.shape != shape or not tensor.dtype.isnative:
            return None
        if not (isinstance(dtype, np.dtype) and tensor.dtype == dtype):
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


class PlainUpdates:
    """The updates of an open round that have the usual form, with the arguments of the core's class.

    An update has the usual form if:

    * It is an instance of ``type`` itself.
    * Its value is a model: a float32 vector of n elements of NumPy or torch, its bytes, or a dict of tensors with the
      names and shapes of ``parts``, or a list if the names are its indices, which are float32. If 4 n is at most
      ``copied``, tensors may be of 16-bit floats. Or it is such a difference to the newest model, if no ranges are
      ``nonnegative``, or a gradient as a vector, if the model is ``flat``.
    * The elements of the ``nonnegative`` ranges are not negative.
    * Its round is within oldest..newest, or None for ``absent``, unless that is -2.
    * Its client is registered, was drawn once and, unless ``repeats``, sent one update.
    * It has no control and id, its loss is None or a number >= 0, and so is its weight if updates may have weights.
    """

    def __init__(self, type, index, n, limits, nonnegative, parts, copied, may_hold, owns):
        lr, max_steps, max_examples, own_rates, max_lr, oldest, newest, absent, *flags = limits
        self._repeats, self._weighs, self._flat = flags
        self._type, self._index, self._n, self._most = type, index, n, (max_steps, max_examples)
        self._rates, self._rounds = (lr, own_rates, max_lr), (oldest, newest, absent)
        self._nonnegative, self._parts, self._copied = nonnegative, parts, copied
        self._may_hold, self._owns = may_hold, owns
        self._entries: list[tuple[Any, ...]] = []

    def __len__(self):
        return len(self._entries)

    def add(self, updates, known, others, examples, first):
        """Add all updates; return their entries of ``known``, whether all vectors may wait and all have examples, and
        the bytes. Or return None, without a change, if one is unusual."""
        read = [self._claims(one) if one.__class__ is self._type and _is_plain(one) else None for one in updates]
        models = [self._model(one) if claims else None for one, claims in zip(updates, read, strict=True)]
        if not updates or None in read or any(model is None for model in models):
            return None
        clients, counted = [claims[0] for claims in read], [claims[-2] > 0 for claims in read]
        if not self._repeats and (len({*clients}) < len(clients) or not (known | others).isdisjoint(clients)):
            return None
        if {1: not all(counted), 0: any(counted), 2: any(counted) and not all(counted)}.get(examples, False):
            return None
        orders = range(first, first + len(clients))
        keys = list(zip(orders, clients, strict=True)) if self._repeats else clients
        known.update(keys)
        read = [(*claims, order) for claims, order in zip(read, orders, strict=True)]
        self._entries += [(*claims, vector) for claims, (vector, *_) in zip(read, models, strict=True)]
        _, waits, sent = zip(*models, strict=True)
        return keys, all(waits), all(counted), sum(sent)

    def take(self):
        """Return the columns, and forget the updates."""
        entries, self._entries = self._entries, []
        clients, steps, examples, distances, starts, kinds, forms, orders, vectors = zip(*entries, strict=True)
        numbers = np.array([steps, examples, distances, 1 / np.array(distances)])
        return list(clients), list(vectors), numbers, np.array([kinds, starts, orders, forms], np.int64)

    def _claims(self, update):
        oldest, newest, absent = self._rounds
        start = absent if update.round is None else update.round
        start, form = _number(start), KINDS.index(update.kind)
        if start == -2 or (update.round is not None and not (start.__class__ is int and oldest <= start <= newest)):
            return None
        if form and (start != newest or (self._nonnegative if form == 1 else not self._flat)):
            return None
        steps, rate = _whole(update.steps, self._most[0]), _rate(_number(update.lr), *self._rates)
        examples = 1.0 if update.examples is None else _amount(update.examples)
        weight = examples if update.weight is None else _amount(update.weight)
        kind = 2 if update.weight is not None else int(update.examples is not None)
        with np.errstate(all="ignore"):
            is_usual = bool(steps and rate and np.isfinite(1 / np.float64(rate * steps)))
        is_weighed = 0 < examples <= self._most[1] and weight >= 0 and (kind < 2 or self._weighs)
        if not (is_usual and is_weighed and self._index.numbers([_number(update.client)])[0] >= 0):
            return None
        return _number(update.client), steps, weight, rate * steps, start, kind, form

    def _model(self, update):
        """Return the vector, whether it may wait, and its bytes."""
        vector = _plain_model(update.value, self._n)
        owned = isinstance(update.value, np.ndarray) and self._owns(update.value)
        safe = vector is not None and (self._may_hold or update.keep is True or owned or are_immutable([vector]))
        sent = 4 * self._n
        if vector is None and 4 * self._n > self._copied:
            return self._named(update)
        if not safe and 4 * self._n <= self._copied:
            flat = _flat(update.value, self._parts, self._n) if vector is None else (vector.copy(), sent)
            if flat is None:
                return None
            vector, sent = flat
            with np.errstate(all="ignore"):
                safe = float((vector.astype(np.float64) ** 2).sum()) < 1e30
        if vector is None or any((vector[slice(*ends)] < 0).any() for ends in self._nonnegative):
            return None
        return vector, safe, sent

    def _named(self, update):
        model = _by_name(update.value)
        flat = _flat(model, self._parts, self._n) if model.__class__ in (dict, OrderedDict) else None
        if flat is None or any((flat[0][slice(*ends)] < 0).any() for ends in self._nonnegative):
            return None
        if any("float32" not in str(model[name].dtype) for name, _ in self._parts):
            return None
        vectors = [_numpy(model[name]).reshape(-1) for name, _ in self._parts]
        return vectors, self._may_hold or update.keep is True or are_immutable(vectors), 4 * self._n


def _by_name(model: Any) -> Any:
    return {str(i): one for i, one in enumerate(model)} if model.__class__ in (list, tuple) else model


def _flat(model: Any, parts: Any, n: int) -> tuple[F32, int] | None:
    """Return a model's floats of 16 or 32 bits as one vector, and their bytes."""
    model = _by_name(model)
    is_dict = model.__class__ in (dict, OrderedDict)
    if is_dict and model.keys() != {name for name, _ in parts}:
        return None
    tensors = [(model[name], shape) for name, shape in parts] if is_dict else [(model, (n,))]
    arrays, sent = [], 0
    for tensor, shape in tensors:
        array = _numpy(tensor)
        if array is None or array.shape != tuple(shape) or not (array.flags.c_contiguous and array.flags.aligned):
            return None
        sent += array.nbytes // (2 if "bfloat16" in str(tensor.dtype) else 1)
        arrays.append(array.reshape(-1).astype(np.float32))
    return np.concatenate(arrays), sent


def _numpy(tensor: Any) -> Any:
    if tensor.__class__.__module__ == "torch":
        tensor = tensor.detach()
        tensor = tensor.float().numpy() if str(tensor.dtype) == "torch.bfloat16" else tensor.numpy()
    return tensor if tensor.__class__ is np.ndarray and tensor.dtype in (np.float32, np.float16) else None


def _is_plain(update: Any) -> bool:
    return (
        _whole(update.count, 1) == 1
        and update.control is None
        and type(update.kind) is str
        and update.kind in KINDS
        and not (update.kind == "gradient" and isinstance(update.value, dict | list | tuple))
        and update.update_id is None
        and (update.loss is None or _amount(update.loss) >= 0)
    )


def _plain_model(y: Any, n: int) -> F32 | None:
    """Return a model as a plain NumPy vector of n float32 numbers, without a copy; None if that is impossible."""
    if y.__class__ is bytes and len(y) == 4 * n:
        return np.frombuffer(y, np.float32)
    if y.__class__.__module__ == "torch":
        try:
            y = y.detach().numpy()
        except Exception:  # for example, the tensor is on a GPU
            return None
    if y.__class__ is not np.ndarray or y.dtype != np.float32 or y.shape != (n,):
        return None
    return y if y.flags.c_contiguous and y.flags.aligned else None


def _number(value: Any) -> Any:
    """Return a number of NumPy as Python's."""
    return value.item() if isinstance(value, np.integer | np.floating) else value


def _amount(value: Any) -> float:
    """Return ``value`` if it is a finite float or an int below 2^53, and at least 0; otherwise -1."""
    value = _number(value)
    is_number = value.__class__ in (int, float)
    return float(value) if is_number and 0 <= value < (2**53 if value.__class__ is int else math.inf) else -1.0


def _whole(value: object, most: float) -> float:
    """Return ``value`` if it is an int within 1..most; otherwise 0."""
    value = _number(value)
    return float(value) if isinstance(value, int) and value.__class__ is int and 1 <= value <= most else 0.0


def _rate(value: object, sent: float, own: bool, most: float) -> float:
    """Return the client's rate: ``sent`` for None or an equal number, a float in (0, most] if ``own``; otherwise 0."""
    value = sent if value is None else _amount(value)
    is_usual = 0 < value <= most if own else abs(value - sent) <= 1e-6 * sent
    return (value if own else sent) if is_usual else 0.0
