"""The average of clients' models as torch and NumPy hold them, tensor by tensor, without flattening anything."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.arguments import LONGEST, bounded, numbers, real
from fedcore.arrays import (
    LINE,
    Recycled,
    as_array,
    as_tensor,
    dtype_name,
    has_infinities,
    ieee,
    library_of,
    require_dense,
    tensor_over,
)
from fedcore.errors import ArrayError, DtypeError, FedcoreError, RangeError, ShapeError
from fedcore.model import (
    COUNTERS,
    DUE,
    FLOATS,
    INTEGERS,
    Kind,
    kind_of_integers,
    named_tensors,
    names_apart,
    nested,
    tree_of,
)
from fedcore.profiling import span

Named = Mapping[str, Any]

MOST_KEPT = 1 << 28
"""Bytes of an average whose memory is kept for the next one."""


class Due(NamedTuple):
    """The form that a tensor must have in every model, and the first model's tensor."""

    like: Any
    dtype: str
    shape: tuple[int, ...]
    kind: Kind
    """"parameter" for whatever is averaged."""
    has_c_export: bool


@ieee
def aggregate(models: Iterable[Any], weights: Any = None) -> Any:
    """The weighted average of models, sum_i w_i x_i / sum_i w_i, in one pass over their tensors.

    Float tensors (parameters and BatchNorm statistics) are averaged. Of counters (integer scalars of 32 or 64 bits, and
    ``num_batches_tracked``) the largest counts. Other integers, bools and float tensors with infinities (masks) are
    constants: all models have the same. What all models agree on stays as it is, bit for bit.

    Args:
        models: k models of the same tensors and shapes, in any form that ``Layout.of`` takes, in CPU memory: float32,
            float64, float16, bfloat16, integers or bool. Floats may differ in dtype: they are cast to the first
            model's. Read-only. A tensor that is not contiguous is copied first.
        weights: k finite numbers >= 0, numbers of examples say, not all zero; None for equal ones.

    Returns:
        The average in the first model's library, dtypes and nesting: a mapping by name, a list, a tree; of one array an
        array. Its tensors are new.

    Raises:
        ArrayError, ShapeError, DtypeError, RangeError: names or a shape differ, a tensor is sparse, not in CPU memory
            or not finite, or a constant differs; the message names the client, by its place in the list, and the
            tensor.
        RangeError, ShapeError, DtypeError: there is no model, or the weights are not what is said above.

    Determinism: products and sums are float64, one client after another, rounded once: the same bits on every ISA
        level and thread count.
    Cost: reads every model once and writes one, which it reads once more if all floats are float32; no scratch. The
        average's float tensors lie side by side in one piece of memory. When the last of them is gone, the process
        keeps up to 256 MiB for the next average of the same size; larger memory goes back to the system.

    >>> aggregate([{"w": np.float32([1, 2]), "n": np.array(3)}, {"w": np.float32([3, 6]), "n": np.array(5)}], [3, 1])
    {'w': array([1.5, 3. ], dtype=float32), 'n': array(5)}
    """
    try:
        return _aggregated(list(models), weights)
    except FedcoreError as error:  # a name or a dtype may be as long as a client likes
        if len(text := str(error)) <= LONGEST:
            raise
        raise type(error)(bounded(text)) from None


def _aggregated(given: list[Any], weights: Any) -> Any:
    if not given:
        raise RangeError("models: expected at least one, got none")
    shares = _shares(weights, len(given))
    tree = tree_of(given[0])
    models = given if tree is None and isinstance(given[0], Mapping) else [*itertools.starmap(_named, enumerate(given))]
    plan = {name: _due(name, leaf) for name, leaf in _named(0, models[0]).items()}
    outs, rows, finite = _average(models, given, plan, shares)
    if not finite:
        masks = [name for name in outs if has_infinities(_named(0, models[0])[name])]
        plan |= {name: plan[name]._replace(kind="constant") for name in masks}
        if masks:
            outs, rows, finite = _average(models, given, plan, shares)
    if not finite:
        for client, row in enumerate(rows):  # all are, where float64s add up to what is past their range
            _require_finite(client, dict(zip(outs, row, strict=True)))
    outs |= {name: _kept(name, due, models) for name, due in plan.items() if due.kind != "parameter"}
    result = {name: outs[name] for name in plan}
    if tree is not None:
        return nested(tree, result)
    is_array = not isinstance(given[0], Mapping) and not hasattr(given[0], "named_parameters")
    return result["x"] if is_array else result


def _average(
    models: Sequence[Any], given: Sequence[Any], plan: Mapping[str, Due], shares: npt.NDArray[np.float64]
) -> tuple[dict[str, Any], list[list[Any]], bool]:
    """The averages of the float tensors, the models' tensors as they were read, and whether all averages are finite."""
    floats = {name: due for name, due in plan.items() if due.kind == "parameter"}
    outs, memory = _new(floats)
    rows, finite = _as_they_lie(models, plan), None
    if rows is not None:
        with suppress(FedcoreError):  # nothing was written: one is to be refused by name, or copied
            finite = _sum(rows, shares, outs, memory)
    if rows is None or finite is None:
        rows = []
        for client, one in enumerate(given):
            model = _named(client, one)
            _check(client, model, plan)
            rows.append([_row(f"client {client}, {name}", model[name], due) for name, due in floats.items()])
        finite = _sum(rows, shares, outs, memory)
    return {name: _as_first(out, floats[name]) for name, out in outs.items()}, rows, finite


def _as_first(out: Any, due: Due) -> Any:
    library = library_of([due.like])
    return as_tensor(out, due.dtype, library) if library == "jax" else out


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


def _named(client: int, model: Any) -> Named:
    return named_tensors(model, f"client {client}")


def _due(name: str, leaf: Any) -> Due:
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        raise ArrayError(f"client 0, {name}: expected an array, got {type(leaf).__name__}")
    dtype = dtype_name(leaf)
    require_dense(f"client 0, {name}", leaf)
    if dtype in INTEGERS:
        kind = kind_of_integers(name, dtype, leaf.shape, COUNTERS)
    elif dtype == "bool":
        kind = "constant"
    elif dtype not in FLOATS:
        raise DtypeError(f"client 0, {name}: expected {DUE}, got {leaf.dtype}")
    else:
        kind = "parameter"
    return Due(leaf, dtype, tuple(leaf.shape), kind, hasattr(type(leaf), "__dlpack_c_exchange_api__"))


def _check(client: int, model: Named, plan: Mapping[str, Due]) -> None:
    if model.keys() != plan.keys():
        due_names, got = names_apart(list(plan), list(model))
        raise ArrayError(f"client {client}: expected {due_names}, got {got}")
    for name, due in plan.items():
        _check_tensor(client, name, model[name], due)


def _check_tensor(client: int, name: str, leaf: Any, due: Due) -> None:
    if type(leaf) is not type(due.like) or leaf.dtype != due.like.dtype:
        if not hasattr(leaf, "dtype"):
            raise ArrayError(f"client {client}, {name}: expected an array, got {type(leaf).__name__}")
        dtype = dtype_name(leaf)
        if dtype != due.dtype and not {dtype, due.dtype} <= set(FLOATS):
            raise DtypeError(f"client {client}, {name}: expected {due.dtype}, as client 0 has, got {dtype}")
    require_dense(f"client {client}, {name}", leaf)
    if tuple(leaf.shape) != due.shape:
        raise ShapeError(f"client {client}, {name}: expected shape {due.shape}, got {tuple(leaf.shape)}")
    if not getattr(leaf, "is_cpu", True):
        raise ArrayError(f"client {client}, {name}: expected a tensor in CPU memory, got one on {leaf.device}")


def _as_they_lie(models: Sequence[Any], plan: Mapping[str, Due]) -> list[list[Any]] | None:
    """The models' float tensors, if names and shapes are those that are due; else None.

    The native kernel sees for itself whether dtypes, places and strides are, for a tenth of what Python would take.
    """
    floats = {name: due for name, due in plan.items() if due.kind == "parameter"}
    others = {name: due for name, due in plan.items() if due.kind != "parameter"}
    if not all(due.has_c_export or isinstance(due.like, np.ndarray) for due in floats.values()):
        return None
    shapes, rows = [due.shape for due in floats.values()], []
    for client, model in enumerate(models):
        if not isinstance(model, Mapping) or model.keys() != plan.keys():
            return None
        rows.append([model[name] for name in floats])
        if [getattr(tensor, "shape", None) for tensor in rows[-1]] != shapes:
            return None
        for name, due in others.items():
            _check_tensor(client, name, model[name], due)
    return rows


def _sum(rows: list[list[Any]], shares: npt.NDArray[np.float64], outs: Named, memory: npt.NDArray[np.uint8]) -> bool:
    """Write the averages, and return whether all are finite.

    A number that is not finite makes the sum so, whatever its weight: 0 times it is a NaN.
    """
    tensors = list(outs.values())
    with span("aggregate", None, (rows, tensors)):
        if any(dtype_name(tensor) != "float32" for tensor in tensors):
            summed = kernels.weighted_sum_segments(rows, shares, tensors, accumulate="float64", norms=True)
            return bool(np.isfinite(summed.squared_norm_of_sum)) or all(map(_is_finite, tensors))
        kernels.weighted_sum_segments(rows, shares, tensors, accumulate="float64")
        return bool(kernels.all_finite([memory.view(np.float32)])[0])  # less work than the norms of all rows


def _row(name: str, leaf: Any, due: Due) -> Any:
    """The tensor as the kernels read it, in the dtype of the first model's."""
    if dtype_name(leaf) != due.dtype or library_of([leaf]) != library_of([due.like]):
        leaf = as_tensor(as_array(name, leaf), due.dtype, "numpy" if library_of([due.like]) == "numpy" else "torch")
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
    memory = _memories(starts[-1] // 4).take().view(np.uint8)
    pieces = [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    for start, size, stop in zip(starts, sizes, starts[1:], strict=False):
        memory[start + size : stop] = 0
    outs = {name: tensor_over(piece, due.like) for (name, due), piece in zip(plan.items(), pieces, strict=True)}
    return outs, memory


@lru_cache(maxsize=1)
def _memories(n: int) -> Recycled:
    """Memories of averages of one size."""
    return Recycled(n, most=int(4 * n <= MOST_KEPT))


def _require_finite(client: int, rows: Named) -> None:
    for name, row in rows.items():
        if not _is_finite(row):
            raise ArrayError(f"client {client}, {name}: expected finite numbers, got a NaN or an infinity")


def _is_finite(tensor: Any) -> bool:
    return bool((tensor.isfinite() if hasattr(tensor, "isfinite") else np.isfinite(tensor)).all())


def _kept(name: str, due: Due, models: Sequence[Named]) -> Any:
    """The largest of a counter; the first of a constant, which all have."""
    arrays = [as_array(f"client {client}, {name}", model[name]) for client, model in enumerate(models)]
    first = arrays[0]
    for client, array in enumerate(arrays if due.kind == "constant" else ()):
        if not np.array_equal(array, first, equal_nan=first.dtype.kind == "f"):
            due_values = f"the values of client 0, since {due.dtype} is not averaged here"
            raise RangeError(f"client {client}, {name}: expected {due_values}, got others")
    largest = np.array(np.maximum.reduce(arrays) if due.kind == "counter" else first)
    return as_tensor(largest, due.dtype, library_of([due.like]))
