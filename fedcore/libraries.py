"""Tensors of the library that a model came in: NumPy's arrays, or torch's tensors; torch is not imported here."""

import sys
from collections.abc import Iterable
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedcore import devices
from fedcore.errors import ArrayError, MissingDependencyError, ShapeError
from fedcore.native import core

Library = Literal["numpy", "torch", "jax"]
NARROW = {"bfloat16": "bf16", "float16": "f16"}
"""Float dtypes that do not hold every float32, and the codec of each."""


def library_of(leaves: Iterable[Any]) -> Library:
    """Torch or JAX if one of the tensors is theirs, else NumPy."""
    modules = {type(leaf).__module__.partition(".")[0] for leaf in leaves}
    return "torch" if "torch" in modules else "jax" if modules & {"jax", "jaxlib"} else "numpy"


def read_leaf(leaf: Any) -> Any:
    """A tensor; of an object that has DLPack's methods alone, the array that it exports."""
    if hasattr(leaf, "dtype") or not hasattr(leaf, "__dlpack__"):
        return leaf
    torch = sys.modules.get("torch")
    return np.from_dlpack(leaf) if torch is None else torch.from_dlpack(leaf)


def require_dense(name: str, leaf: Any) -> None:
    """Reject a sparse tensor.

    Raises:
        ArrayError: it is one.
    """
    if hasattr(leaf, "is_sparse") and (leaf.is_sparse or "strided" not in str(leaf.layout)):
        layout = str(leaf.layout).removeprefix("torch.")
        raise ArrayError(f"{name}: expected a dense tensor, got {layout}: call to_dense()")


def has_infinities(leaf: Any) -> bool:
    """Tell whether a float tensor has infinities, and no NaN."""
    if library_of([leaf]) == "torch":
        return leaf.layout == _torch().strided and bool(leaf.isinf().any()) and not bool(leaf.isnan().any())
    array = np.asarray(leaf) if devices.of(leaf) == devices.CPU else None
    return array is not None and bool(np.isinf(array).any()) and not bool(np.isnan(array).any())


def own_class(name: str, leaf: Any) -> Any:
    """A NumPy array or torch tensor as one of the library's own class, over the same memory; anything else as it is.

    Of torch's views whose memory holds the negative it is a copy.

    A class derived from these may show any shape or dtype, and another the next time.

    Raises:
        ArrayError: it is a masked array, of which some elements do not count.
    """
    if isinstance(leaf, np.ndarray):
        if isinstance(leaf, np.ma.MaskedArray):
            raise ArrayError(f"{name}: expected an array without a mask, got a masked array")
        return np.ndarray.view(leaf, np.ndarray)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(leaf, torch.Tensor):
        return leaf
    if type(leaf) is not torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            leaf = torch.Tensor.as_subclass(leaf, torch.Tensor)
    leaf = torch.Tensor.detach(leaf)
    return torch.Tensor.resolve_neg(leaf) if torch.Tensor.is_neg(leaf) else leaf  # its memory holds the negative


def is_own_class(leaf: Any) -> bool:
    """Tell whether ``own_class`` made it, or this package did."""
    kind, torch = type(leaf), sys.modules.get("torch")
    return kind is np.ndarray or kind is core.DeviceArray or (torch is not None and kind is torch.Tensor)


def dtype_name(leaf: Any) -> str:
    """A tensor's dtype by the name that the libraries share: ``"float32"``."""
    # What another class shows as a dtype may equal any: it must not be kept.
    return _name(leaf.dtype) if is_own_class(leaf) else _name.__wrapped__(leaf.dtype)


@lru_cache(maxsize=64)
def _name(dtype: Any) -> str:
    """A dtype's name, which NumPy puts together anew each time: 3 us."""
    return str(dtype).removeprefix("torch.")


def as_array(name: str, leaf: Any) -> npt.NDArray[Any]:
    """A tensor as NumPy's array: a view, or in float32 a copy of one in 16 bits.

    Raises:
        ArrayError: it is not in CPU memory.
    """
    narrow = dtype_name(leaf) in NARROW
    if not isinstance(leaf, np.ndarray):
        try:
            leaf = leaf.detach() if hasattr(leaf, "detach") else leaf
            if narrow:
                leaf = leaf.float() if hasattr(leaf, "float") else leaf.astype("float32")
            leaf = np.from_dlpack(leaf) if hasattr(leaf, "__dlpack__") else np.asarray(leaf)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise ArrayError(f"{name}: expected an array in CPU memory: {error}") from None
    array: npt.NDArray[Any] = leaf
    return array.astype(np.float32) if narrow else array


def as_tensor(array: npt.NDArray[Any], dtype: str, library: Library) -> Any:
    """An array as a tensor of the library and of that dtype; NumPy's in the same dtype is the array itself.

    NumPy has a bfloat16 where ml_dtypes is imported; else one stays in float32.

    Raises:
        MissingDependencyError: torch or JAX is not installed.
    """
    if library == "numpy":
        has_dtype = dtype != "bfloat16" or "ml_dtypes" in sys.modules
        return array.astype(dtype, copy=False) if has_dtype else array
    if library == "jax":
        return _module("jax.numpy", "jax").asarray(array, dtype)
    torch = _torch()
    return torch.from_numpy(np.array(array)).to(getattr(torch, dtype))


def tensor_over(memory: npt.NDArray[np.uint8], like: Any) -> Any:
    """A tensor like another, of its library, dtype and shape, in some memory: a view, whatever its numbers are."""
    name, shape = dtype_name(like), tuple(like.shape)
    if library_of([like]) != "torch":
        return memory.view(like.dtype).reshape(shape)
    tensor = _torch().from_numpy(memory.view("int16" if name == "bfloat16" else name).reshape(shape))
    return tensor.view(like.dtype) if name == "bfloat16" else tensor


def here(leaf: Any) -> Any:
    """A small tensor in host memory: itself, or a copy of one on a device."""
    if devices.of(leaf) == devices.CPU:
        return leaf
    return leaf.cpu() if hasattr(leaf, "cpu") else leaf.get() if hasattr(leaf, "get") else leaf


def flat_there(name: str, leaf: Any) -> Any:
    """A tensor in a device's memory as a vector, a view.

    Raises:
        ShapeError: it is not contiguous.
    """
    leaf = leaf.detach() if hasattr(leaf, "detach") else leaf
    flags = getattr(leaf, "flags", None)
    if not (leaf.is_contiguous() if hasattr(leaf, "is_contiguous") else flags is None or flags.c_contiguous):
        raise ShapeError(f"{name}: expected a contiguous tensor, got one that is not")
    return leaf.reshape(-1) if hasattr(leaf, "reshape") else leaf


def write_there(name: str, leaf: Any, part: Any, device: str) -> None:
    """Copy a tensor, from the host or the device itself, into a float32 vector on a device; 16 bits become 32.

    Raises:
        ArrayError, ShapeError: it lies elsewhere, or is not contiguous.
    """
    if devices.of(leaf) != device:
        part.copy_from(as_array(name, leaf).reshape(-1))
        return
    narrow, leaf = NARROW.get(dtype_name(leaf)), flat_there(name, leaf)
    if narrow is None:
        part.copy_from(leaf)
    else:
        core.dequantise(leaf, None, narrow, part)


def copy_there(name: str, leaf: Any, part: Any) -> None:
    """Copy a float32 vector on a device into a tensor there, in place, in its own dtype.

    Raises:
        ArrayError: it cannot be written.
    """
    try:
        if library_of([leaf]) == "torch":
            leaf.detach().copy_(_torch().from_dlpack(part).reshape(leaf.shape))
        else:
            core.combine([part], np.ones(1), flat_there(name, leaf))
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ArrayError(f"{name}: expected a tensor that can be written: {error}") from None


def copy_into(name: str, leaf: Any, array: npt.NDArray[Any]) -> None:
    """Copy an array into a tensor in place, wherever it lies, in its own dtype.

    Raises:
        ArrayError: it cannot be written.
    """
    try:
        if library_of([leaf]) == "torch":
            leaf.detach().copy_(_torch().from_numpy(np.array(array)))
        else:
            np.copyto(leaf, array, casting="unsafe")
    except (RuntimeError, TypeError, ValueError) as error:
        raise ArrayError(f"{name}: expected a tensor that can be written: {error}") from None


def _torch() -> Any:
    return _module("torch", "torch")


def _module(name: str, package: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError:
        words = f'need {package}: install it, or take tensors(library="numpy")'
        raise MissingDependencyError(f"tensors: {words}") from None
