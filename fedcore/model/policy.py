"""What happens to each tensor of a model: which are averaged, counted or constant, and in which form."""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import translate
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.arrays import (
    CPU,
    NARROW,
    Bfloat16Array,
    Library,
    as_array,
    as_tensor,
    device_of,
    dtype_name,
    library_of,
    spans,
    to_host,
)
from fedcore.errors import ArrayError, DtypeError, RangeError, ShapeError
from fedcore.model.safetensors import WINDOW, StoredTensor

# ``aggregate``, ``merge`` and the server use the same kinds:
#
# - Floats are averaged: *parameters*, and *float buffers* (BatchNorm statistics), which a server's step does not move.
# - *Counters* are integers that count steps. They become the largest value; a server limits their growth.
# - *Constants* are equal in all models: other integers (packed weights, codes), bools, and masks, which are floats with
#   infinities and without NaN in the first model. Only a server's flags may change.
#
# Any other NaN or infinity is a fault of its model: an error in ``aggregate``, and a reason to reject the model in
# ``merge`` and in a server.


Kind = Literal["parameter", "buffer", "counter", "constant"]

FLOATS = ("float32", "float64", *NARROW)
INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
DTYPES = {"parameter": FLOATS, "buffer": FLOATS, "counter": INTEGERS, "constant": (*INTEGERS, *FLOATS, "bool")}
"""The dtypes of each kind of tensor."""
NOT_FINITE = "expected finite numbers, got a NaN or an infinity"

BUFFERS = ("*running_mean", "*running_var")
"""Name patterns of float buffers in a plain mapping."""

COUNTERS = ("*num_batches_tracked",)
"""Name patterns of counters that are not scalars of 32 or 64 bits."""


class TensorForm(NamedTuple):
    """The kind of a tensor, and its form in all models and in the result."""

    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    library: Library

    @property
    def is_averaged(self) -> bool:
        """Whether the tensor is a parameter or a float buffer."""
        return self.kind in ("parameter", "buffer")

    @property
    def result(self) -> str:
        """The dtype of the result: NumPy has bfloat16 only if ml_dtypes is imported."""
        has_dtype = self.dtype != "bfloat16" or self.library != "numpy" or "ml_dtypes" in sys.modules
        return self.dtype if has_dtype else "float32"


class TensorPolicy(NamedTuple):
    """The kinds of a model's tensors.

    Args:
        buffers: name patterns of float buffers.
        counters: name patterns of integer tensors that count steps. Integer scalars of 32 or 64 bits always do.
    """

    buffers: Sequence[str] = BUFFERS
    counters: Sequence[str] = COUNTERS

    def form(self, name: str, leaf: Any) -> TensorForm:
        """Return what happens to a tensor, unless it is a mask; raise DtypeError or ArrayError if nothing does."""
        dtype, shape = dtype_of(name, leaf), tuple(leaf.shape)
        kind: Kind = "constant"
        if dtype in FLOATS:
            kind = "buffer" if matches(name, self.buffers) else "parameter"
        elif dtype in INTEGERS:
            is_wide_scalar = not shape and dtype.endswith(("32", "64"))
            kind = "counter" if is_wide_scalar or matches(name, self.counters) else "constant"
        elif dtype != "bool":
            due = "float32, float64, bfloat16, float16, an integer dtype or bool"
            raise DtypeError(f"{name}: expected {due}, got {leaf.dtype}")
        library = leaf.library if isinstance(leaf, StoredTensor) else library_of([leaf])
        return TensorForm(kind, dtype, shape, library)

    def plan(self, client: Any, model: Mapping[str, Any]) -> dict[str, TensorForm]:
        """Return the form of each tensor of the first model."""
        return {name: self.form(f"{client}, {name}", leaf) for name, leaf in model.items()}


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name fits one of the patterns."""
    return _regex(tuple(patterns)).match(name) is not None


@lru_cache(maxsize=64)
def _regex(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, patterns)) or "(?!)")


def is_mask(name: str, leaf: Any) -> bool:
    """Whether a float tensor has infinities, and no NaN. Tensors in files are read in windows."""
    if library_of([leaf]) == "torch":
        return bool(leaf.isinf().any()) and not bool(leaf.isnan().any())
    has_nan = [np.isnan(numbers).any() for numbers in numbers_of(name, leaf) if not np.isfinite(numbers).all()]
    return bool(has_nan) and not any(has_nan)


def numbers_of(name: str, leaf: Any) -> Iterator[npt.NDArray[Any]]:
    """Yield the elements of a tensor in a file or in host memory, in equal windows; nothing of one on a device."""
    if isinstance(leaf, StoredTensor):
        for span in spans(leaf.size, 16, WINDOW):
            yield as_array(name, leaf.read(span.start, span.stop))
    elif device_of(leaf) == CPU:
        flat = as_array(name, leaf).reshape(-1)
        yield from (flat[span] for span in spans(flat.size, 16, WINDOW))


@np.errstate(all="ignore")
def is_rounded(name: str, leaf: Any) -> bool:
    """Whether a tensor in host memory or in a file has float64 numbers that float32 does not hold."""
    parts = numbers_of(name, leaf) if dtype_name(leaf) == "float64" else ()
    return any(((part.astype(np.float32) != part) & (part == part)).any() for part in parts)


def is_finite(tensor: Any) -> bool:
    """Whether a tensor has neither NaN nor infinities."""
    return bool((tensor.isfinite() if hasattr(tensor, "isfinite") else np.isfinite(tensor)).all())


def why_not_finite(leaf: Any, kind: str, why: str = "the first model's dtype") -> str:
    """Return the reason that a tensor in CPU memory or in a file is not finite in a dtype."""
    if all(np.isfinite(numbers).all() for numbers in numbers_of("tensor", leaf)):
        return f"has numbers beyond the range of {kind}, {why}"
    return NOT_FINITE


def cast(vector: Any, kind: str) -> Any:
    """Return a vector in a dtype that the kernels can read, given by its name."""
    if dtype_name(vector) == kind:
        return vector
    with np.errstate(over="ignore"):
        array = as_array("vector", vector)
        if kind != "bfloat16":
            return array.astype(kind)
        return Bfloat16Array(kernels.quantise(array.astype(np.float32, copy=False), "bf16").codes)


def are_equal(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    """Whether two values of a constant are equal; a NaN equals a NaN."""
    # Equal values without NaN take one pass.
    return np.array_equal(one, other) or (one.dtype.kind == "f" and np.array_equal(one, other, equal_nan=True))


def settled(name: str, form: TensorForm, values: Iterable[tuple[str, Any]], why: str = "") -> npt.NDArray[Any]:
    """Return the largest value of a counter, or the common value of a constant, as a new array.

    Args:
        values: the tensors in memory or in files, each after the name of its model.
        why: the reason that a constant must be equal, if it is not its dtype.
    """
    first: Any = None
    for model, value in values:
        array = as_array(f"{model}, {name}", value)
        if first is None:
            first = largest = array
        elif form.kind == "counter":
            largest = np.maximum(largest, array)
        elif not are_equal(array, first):
            must = f"must be equal in all models, because {form.dtype} tensors are not averaged"
            must += "; convert counts to float64" if form.dtype in INTEGERS else ""
            if form.dtype in FLOATS:
                must = "must be equal in all models, because it is a mask: it has infinities in the base or first model"
                must += "; leave that model out if it diverged"
            raise RangeError(f"{model}, {name}: {why or must}")
    return np.array(largest)


def in_library(form: TensorForm, array: npt.NDArray[Any]) -> Any:
    """Return an array as a tensor of the form's library and dtype."""
    return as_tensor(array.reshape(form.shape), form.dtype, form.library)


# Tied tensors are one tensor under several names, whose first name counts.


def _place(leaf: Any) -> Any:
    """Return the place of a tensor's bytes, which tied tensors have in common; None if it cannot be tied."""
    if isinstance(leaf, StoredTensor):
        return leaf.place if leaf.size else None
    if hasattr(leaf, "data_ptr"):  # of torch
        with suppress(AttributeError, RuntimeError):  # the tensor has no memory
            if address := leaf.data_ptr():
                return address, leaf.stride(), leaf.shape, leaf.dtype
    return None


def ties_of(model: Mapping[str, Any]) -> dict[str, str]:
    """Return the names that share their bytes with an earlier tensor of torch or of a file, and its name."""
    places, first = {name: _place(leaf) for name, leaf in model.items()}, dict[Any, str]()
    found = {name: first.setdefault(place, name) for name, place in places.items() if place is not None}
    return {name: of for name, of in found.items() if of != name}


def are_same(name: str, one: Any, other: Any) -> bool:
    """Whether two tensors of one shape are in the same place, or have equal numbers."""
    if one is other or ((place := _place(one)) is not None and place == _place(other)):
        return True
    parts = [numbers_of(name, to_host(leaf)) for leaf in (one, other)]
    return all(are_equal(*pair) for pair in zip(*parts, strict=False))


def require_tied(where: str, ties: Mapping[str, str], named: Mapping[str, Any], other: str = "another") -> None:
    """Raise ArrayError if tensors that are tied in one model differ in another."""
    for alias, name in ties.items():
        if alias in named and not are_same(alias, named[alias], named[name]):
            reason = f"is tied to {name} in {where}, but differs in {other}"
            raise ArrayError(f"{alias}: {reason}; tie them in all models")


def matched(model: Mapping[str, Any], plan: Mapping[str, Any], ties: Mapping[str, str]) -> Mapping[str, Any]:
    """Return a model with the names of the plan, as far as further names of tied tensors are missing or unexpected.

    Args:
        ties: the further names of tied tensors in the plan's model; see ``ties_of``.
    """
    if model.keys() <= plan.keys() and (not ties or len(model) == len(plan)):
        return model
    own, found = ties_of(model), {name: leaf for name, leaf in model.items() if name in plan}
    tied = {own.get(name, name) for name in found}
    unexpected = {name: leaf for name, leaf in model.items() if name not in plan and own.get(name, name) not in tied}
    known = {ties.get(name, name): leaf for name, leaf in found.items()}
    found |= {name: known[of] for name in plan if name not in found and (of := ties.get(name, name)) in known}
    return found | unexpected


# The form of tensors in other models.


def dtype_of(name: str, leaf: Any) -> str:
    """Return the dtype of a tensor by its name; raise ArrayError for other objects."""
    try:
        return dtype_name(leaf)
    except AttributeError:
        raise ArrayError(f"{name}: expected an array, got {type(leaf).__name__}") from None


def check_form(name: str, leaf: Any, dtype: str, shape: tuple[int, ...]) -> None:
    """Raise an error if a tensor's dtype or shape differs; any float dtype fits a float dtype."""
    if (actual := dtype_of(name, leaf)) != dtype and not {actual, dtype} <= set(FLOATS):
        raise DtypeError(f"{name}: expected {dtype}, got {actual}")
    if (found := tuple(leaf.shape)) != shape:
        raise ShapeError(f"{name}: expected shape {shape}, got {found}{_padding(shape, found)}")


def check_tensor(where: str, leaf: Any, form: TensorForm) -> None:
    """Raise an error if a tensor has not the given form, or is not in CPU memory."""
    check_form(where, leaf, form.dtype, form.shape)
    if not getattr(leaf, "is_cpu", False) and (device := device_of(leaf)) != CPU:
        raise ArrayError(f"{where}: must be in CPU memory, is on {getattr(leaf, 'device', device)}")


def _padding(shape: tuple[int, ...], actual: tuple[int, ...]) -> str:
    """Return a hint for a tensor that is too short in one dimension, as of a LoRA adapter of a lower rank."""
    missing = [length - own for length, own in zip(shape, actual, strict=False)]
    if len(shape) != len(actual) or max(missing) <= 0 or missing.count(0) != len(missing) - 1:
        return ""
    return f"; pad it with zeros, such as np.pad(tensor, {[(0, length) for length in missing]})"
