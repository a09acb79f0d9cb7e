"""The average of clients' models as torch and NumPy hold them, tensor by tensor, without flattening anything."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.arguments import numbers, real
from fedcore.errors import ArrayError, DtypeError, FedcoreError, RangeError, ShapeError
from fedcore.float_mode import ieee
from fedcore.libraries import tensor_over
from fedcore.memory import LINE, empty
from fedcore.native import ON_REFERENCE

FLOATS = ("float32", "float64", "float16", "bfloat16")
Named = Mapping[str, Any]


class Due(NamedTuple):
    """The form that a tensor must have in every model, and the first model's tensor."""

    like: Any
    dtype: str
    shape: tuple[int, ...]
    is_float: bool
    has_c_export: bool


@ieee
def aggregate(state_dicts: Iterable[Named], weights: Any = None) -> dict[str, Any]:
    """The weighted average of models, sum_i w_i x_i / sum_i w_i, in one pass over their tensors.

    Float tensors (parameters and BatchNorm statistics) are averaged and keep their dtype; tensors of integers and of
    truth values keep theirs too, and their largest value counts. What all models agree on stays as it is, bit for bit.

    Args:
        state_dicts: k mappings of the same names to torch tensors or NumPy arrays in CPU memory, each tensor of one
            shape and dtype in all of them: float32, float64, float16, bfloat16, an integer or bool. Read-only. A
            tensor that is not contiguous is copied first.
        weights: k finite numbers >= 0, numbers of examples say, not all zero; None for equal ones.

    Returns:
        The average by name, in the order of the first mapping: new torch tensors where it has such, else new arrays.

    Raises:
        ArrayError, ShapeError, DtypeError: names, a shape or a dtype differ, or a tensor is not in CPU memory or not
            finite; the message names the client, by its place in the list, and the tensor.
        RangeError, ShapeError, DtypeError: there is no model, or the weights are not what is said above.

    Determinism: products and sums are float64, one client after another, rounded once: the same bits on every ISA
        level and thread count.
    Cost: reads every model once, writes one and reads that once more; no scratch. The average's float tensors lie side
        by side in one piece of memory, which is given back when the last of them is gone.

    >>> aggregate([{"w": np.float32([1, 2]), "n": np.array(3)}, {"w": np.float32([3, 6]), "n": np.array(5)}], [3, 1])
    {'w': array([1.5, 3. ], dtype=float32), 'n': array(5)}
    """
    models = list(state_dicts)
    if not models:
        raise RangeError("state_dicts: expected at least one, got none")
    shares = _shares(weights, len(models))
    plan = {name: _due(name, leaf) for name, leaf in _mapping(0, models[0]).items()}
    floats = {name: due for name, due in plan.items() if due.is_float}
    outs, memory = _new(floats)
    rows = _as_they_lie(models, plan)
    if rows is None or not _sum_plain(rows, shares, outs):  # one is to be refused by name, or copied
        for client, model in enumerate(models):
            _check(client, _mapping(client, model), plan)
        rows = [[_row(model[name], due) for name, due in floats.items()] for model in models]
        _sum(rows, shares, outs)
    # What is not finite makes a sum that is not, whatever its weight: 0 times it is a NaN.
    if not _are_finite(outs, floats, memory):
        for client, row in enumerate(rows):  # all are, where float64s add up to what is past their range
            _require_finite(client, dict(zip(floats, row, strict=True)))
    return {name: outs[name] if due.is_float else _largest(name, models) for name, due in plan.items()}


def _shares(weights: Any, k: int) -> npt.NDArray[np.float64]:
    """float64[k] that add up to 1."""
    given = np.ones(k) if weights is None else numbers("weights", weights, np.float64)
    if given.shape != (k,):
        raise ShapeError(f"weights: expected {k} numbers, one for each model, got shape {given.shape}")
    for client, weight in enumerate(given.tolist()):
        real(f"weights[{client}]", weight, "[0, inf)")
    if not given.any():
        raise RangeError("weights: expected one > 0, got zeros")
    given = given / given.max()  # so that no sum of them overflows
    return np.asarray(given / given.sum())


def _mapping(client: int, model: object) -> Named:
    if not isinstance(model, Mapping):
        raise ArrayError(f"client {client}: expected a mapping of tensors by name, got {type(model).__name__}")
    return model


def _due(name: str, leaf: Any) -> Due:
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        raise ArrayError(f"client 0, {name}: expected a tensor, got {type(leaf).__name__}")
    dtype = str(leaf.dtype).removeprefix("torch.")
    if dtype not in FLOATS and not dtype.startswith(("int", "uint", "bool")):
        raise DtypeError(f"client 0, {name}: expected {', '.join(FLOATS)}, an integer dtype or bool, got {leaf.dtype}")
    return Due(leaf, dtype, tuple(leaf.shape), dtype in FLOATS, hasattr(type(leaf), "__dlpack_c_exchange_api__"))


def _check(client: int, model: Named, plan: Mapping[str, Due]) -> None:
    if model.keys() != plan.keys():
        missing = [name for name in plan if name not in model]
        extra = [name for name in model if name not in plan]
        raise ArrayError(f"client {client}: expected the tensors of client 0; missing {missing}, unexpected {extra}")
    for name, due in plan.items():
        leaf, like = model[name], due.like
        if type(leaf) is not type(like) or leaf.dtype != like.dtype:
            dtype = str(getattr(leaf, "dtype", type(leaf).__name__)).removeprefix("torch.")
            if dtype != due.dtype:
                raise DtypeError(f"client {client}, {name}: expected {due.dtype}, as client 0 has, got {dtype}")
        if leaf.shape != due.shape:
            raise ShapeError(f"client {client}, {name}: expected shape {due.shape}, got {tuple(leaf.shape)}")
        if not getattr(leaf, "is_cpu", True):
            raise ArrayError(f"client {client}, {name}: expected a tensor in CPU memory, got one on {leaf.device}")


def _as_they_lie(models: Sequence[Any], plan: Mapping[str, Due]) -> list[list[Any]] | None:
    """The models' float tensors, if names and shapes are those that are due; else None.

    The native kernel sees for itself whether dtypes, places and strides are, for a tenth of what Python would take.
    """
    floats = {name: due for name, due in plan.items() if due.is_float}
    others = {name: due for name, due in plan.items() if not due.is_float}
    if ON_REFERENCE or not all(due.has_c_export or isinstance(due.like, np.ndarray) for due in floats.values()):
        return None
    shapes, rows = [due.shape for due in floats.values()], []
    for client, model in enumerate(models):
        if not isinstance(model, Mapping) or model.keys() != plan.keys():
            return None
        rows.append([model[name] for name in floats])
        if any(due.has_c_export and _is_negated(tensor) for due, tensor in zip(floats.values(), rows[-1], strict=True)):
            return None
        if [getattr(tensor, "shape", None) for tensor in rows[-1]] != shapes:
            return None
        if others:
            _check(client, {name: model[name] for name in others}, others)
    return rows


def _sum_plain(rows: list[list[Any]], shares: npt.NDArray[np.float64], outs: Named) -> bool:
    """``_sum``; whether the tensors were what the kernels take as it is. Else nothing was written."""
    try:
        _sum(rows, shares, outs)
    except FedcoreError:
        return False
    return True


def _sum(rows: list[list[Any]], shares: npt.NDArray[np.float64], outs: Named) -> None:
    if outs:
        with np.errstate(over="ignore", invalid="ignore"):  # of the twin
            kernels.weighted_sum_segments(rows, shares, list(outs.values()), accumulate="float64")


def _row(leaf: Any, due: Due) -> Any:
    """The tensor as the kernels read it."""
    if isinstance(leaf, np.ndarray):
        return leaf if leaf.flags.c_contiguous else np.ascontiguousarray(leaf)
    if not hasattr(leaf, "requires_grad"):
        return leaf
    leaf = leaf.detach() if leaf.requires_grad else leaf
    leaf = leaf.resolve_neg() if _is_negated(leaf) else leaf
    leaf = leaf if leaf.is_contiguous() else leaf.contiguous()
    # Of older torch quicker by 8 us a tensor than DLPack, which is the way for its bfloat16.
    return leaf if due.has_c_export or due.dtype == "bfloat16" or not hasattr(leaf, "numpy") else leaf.numpy()


def _is_negated(tensor: Any) -> bool:
    """Tell whether torch has the numbers in memory with the other sign, of which its exports say nothing."""
    return hasattr(tensor, "is_neg") and bool(tensor.is_neg())


def _new(plan: Mapping[str, Due]) -> tuple[dict[str, Any], npt.NDArray[np.uint8]]:
    """New tensors, in one piece of memory on huge pages, and that piece, zero between them.

    A page costs microseconds when it is first written to, whatever its size.
    """
    sizes = [math.prod(due.shape) * due.like.dtype.itemsize for due in plan.values()]
    starts = [0, *itertools.accumulate(-(-size // LINE) * LINE for size in sizes)]
    memory = empty(starts[-1], np.uint8)
    pieces = [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    for start, size, stop in zip(starts, sizes, starts[1:], strict=False):
        memory[start + size : stop] = 0
    outs = {name: tensor_over(piece, due.like) for (name, due), piece in zip(plan.items(), pieces, strict=True)}
    return outs, memory


def _require_finite(client: int, rows: Named) -> None:
    for name, row in rows.items():
        if not _is_finite(row):
            raise ArrayError(f"client {client}, {name}: expected finite numbers, got a NaN or an infinity")


def _are_finite(outs: Named, floats: Mapping[str, Due], memory: npt.NDArray[np.uint8]) -> bool:
    if all(due.dtype == "float32" for due in floats.values()):  # nearly always: on all threads
        return bool(kernels.all_finite([memory.view(np.float32)])[0])
    return all(_is_finite(out) for out in outs.values())


def _is_finite(tensor: Any) -> bool:
    return bool((tensor.isfinite() if hasattr(tensor, "isfinite") else np.isfinite(tensor)).all())


def _largest(name: str, models: Sequence[Named]) -> Any:
    leaves = [model[name] for model in models]
    arrays = [np.from_dlpack(leaf) if hasattr(leaf, "new_tensor") else np.asarray(leaf) for leaf in leaves]
    largest = np.array(np.maximum.reduce(arrays), arrays[0].dtype)
    return leaves[0].new_tensor(largest) if hasattr(leaves[0], "new_tensor") else largest
