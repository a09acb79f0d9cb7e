"""The native module, and vectors on the host and on CUDA devices: allocation, copies, and arrays of other libraries."""

import ctypes
import errno
import mmap
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, wraps
from importlib import import_module
from itertools import cycle
from threading import Lock
from typing import Any, Literal, NamedTuple, ParamSpec, Self, TypeAlias, TypeVar
from weakref import finalize, ref

import numpy as np
import numpy.typing as npt

from fedcore.errors import ArrayError, DeviceError, MissingDependencyError, ShapeError, StoreError, UnknownNameError

# ``fedcore/_core.pyi`` lists the names of the native module, ``fedcore._core``.


def _require_main_interpreter() -> None:
    """Raise ImportError in a sub-interpreter, where loading the native module would block forever."""
    for name in ("_interpreters", "_xxsubinterpreters"):  # Python >= 3.13, and < 3.13; some builds have neither
        with suppress(ModuleNotFoundError):
            interpreters = import_module(name)
            if interpreters.get_current() != interpreters.get_main():
                raise ImportError(
                    "fedcore: the native module cannot run in a sub-interpreter; use the main interpreter "
                    "(under mod_wsgi set WSGIApplicationGroup %{GLOBAL})"
                )
            return


_require_main_interpreter()
try:
    import fedcore._core as core
except ImportError as error:
    raise ImportError(
        f"fedcore: cannot load the native module ({error}); install the package (in a clone: `pip install -e .`)"
    ) from error

__all__ = ["core"]


F32: TypeAlias = npt.NDArray[np.float32]
F64: TypeAlias = npt.NDArray[np.float64]
I64: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Floats: TypeAlias = npt.NDArray[np.floating[Any]]
Vector: TypeAlias = npt.NDArray[Any]
Dtype: TypeAlias = type[np.generic] | np.dtype[Any]


CPU = "cpu"
KNOWN = ("cpu", "cuda", "cuda:1")
"""Examples of device names for messages."""

_NAME = re.compile(r"cpu|cuda(:\d{1,4})?")
_HOST = (1, 3)
"""DLPack device types of memory that the CPU can read: CPU memory and pinned CUDA memory."""
_CUDA = (2, 13)
"""DLPack device types of CUDA device memory and CUDA managed memory."""


def device_named(name: str) -> str:
    """Return the canonical name of a device, such as ``"cpu"``, or ``"cuda:0"`` for ``"cuda"``.

    Raise UnknownNameError for an invalid name, and DeviceError if the device or its driver is missing.

    >>> device_named("cpu")
    'cpu'
    """
    if name == CPU:
        return CPU
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise UnknownNameError.of("device", name, KNOWN)
    number = device_ordinal(name)
    if (missing := core.cuda_reason()) is not None:
        raise DeviceError(f"device={name!r}: no GPU is available: {missing}")
    if number >= (count := len(core.cuda_devices())):
        raise DeviceError(f"device={name!r}: does not exist; the last GPU is 'cuda:{count - 1}'")
    return f"cuda:{number}"


def on_host(device: str) -> str:
    """Return where the host's vectors of a server on ``device`` are: a ``FileMemory`` stays, a GPU gives "cpu"."""
    return device if device == CPU else CPU


def device_ordinal(name: str) -> int:
    """Return the number of a CUDA device."""
    return int(name[5:] or 0)


def is_device_array(array: object) -> bool:
    """Whether an array is a ``DeviceArray`` of this package."""
    return isinstance(array, core.DeviceArray)


def device_of(array: Any) -> str:
    """Return the device name of an array of any library; for other device types, a text with DLPack's numbers.

    The name of an array in files is its ``FileMemory``.

    >>> device_of(np.zeros(3))
    'cpu'
    """
    if isinstance(array, np.ndarray):
        return _memory_of(array) if _limits else CPU
    if not hasattr(array, "__dlpack_device__") or (is_own_class(array) and getattr(array, "is_cpu", False)):
        return CPU  # torch needs 3 us for DLPack's answer
    kind, number = array.__dlpack_device__()
    if kind in _HOST:
        return CPU
    return f"cuda:{number}" if kind in _CUDA else f"device {kind}:{number} of DLPack"


P = ParamSpec("P")
R = TypeVar("R")


def ieee(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to run in IEEE floating-point mode; the thread's previous mode is restored afterwards.

    After ``torch.set_flush_denormal(True)`` a thread treats subnormal numbers as zeros, even in NumPy and in
    comparisons. A decorated function returns the same bits in every thread. The functions that it calls also run in
    IEEE mode, so do not decorate a function that calls user code that may train a model.

    Cost: 0.5 microseconds per call.

    >>> ieee(abs)(-5e-324)
    5e-324
    """

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        result: R = core.in_ieee_mode(function, *args, **kwargs)
        return result

    return called


def native(declaration: Callable[P, R]) -> Callable[P, R]:
    """Decorate the declaration of a function of the native module, which has the same name and parameters.

    It runs in IEEE mode (``ieee``). The declaration's docstring is its contract.
    """
    function: Callable[P, R] = getattr(core, declaration.__name__)
    return wraps(declaration)(ieee(function))


class CudaDevice(NamedTuple):
    """The driver's description of a CUDA device."""

    name: str
    capability: int
    """The compute capability times 10: 90 for 9.0."""
    memory: int
    """The device's memory in bytes."""


def reason() -> str | None:
    """Return why CUDA is unavailable, or None if available. The first successful call loads the kernels."""
    return core.cuda_reason()


def devices() -> list[CudaDevice]:
    """Return the CUDA devices by ordinal; raise DeviceError if CUDA is unavailable."""
    return [CudaDevice(*described) for described in core.cuda_devices()]


@contextmanager
def stream(handle: Any) -> Iterator[None]:
    """Run this thread's kernel calls in the block on a given CUDA stream.

    Outside such a block, a call runs on the current stream of the library of its first array, if the library exports
    that stream. torch does, so ``torch.cuda.stream`` is enough for its tensors. Otherwise a call runs on the legacy
    default stream. In both cases the call waits on the device for the queued work of its arrays' libraries. The host
    waits only when it reads a number of the result.

    A library that exports arrays only through Python, such as CuPy, receives the call's stream, but no signal when the
    call has finished. If such a library uses non-blocking streams, keep its arrays until the call has finished.

    Args:
        handle: a cudaStream_t on the arrays' device as an int, or an object that has it as ``cuda_stream`` (torch) or
            ``ptr`` (CuPy).

    >>> with stream(1):  # the legacy default stream
    ...     pass
    """
    number = getattr(handle, "cuda_stream", getattr(handle, "ptr", handle))
    before = core.choose_stream(int(number))
    try:
        yield
    finally:
        core.choose_stream(before)


# Tensors of NumPy, torch and JAX. This module imports torch and JAX only to create their tensors.


Library = Literal["numpy", "torch", "jax"]
NARROW = {"bfloat16": "bf16", "float16": "f16"}
"""The float dtypes that cannot represent every float32, and their codecs."""


def library_of(leaves: Iterable[Any]) -> Library:
    """Return "torch" or "jax" if one of the tensors is of that library, else "numpy"."""
    modules = {type(leaf).__module__.partition(".")[0] for leaf in leaves}
    return "torch" if "torch" in modules else "jax" if modules & {"jax", "jaxlib"} else "numpy"


def read_leaf(name: str, leaf: Any, *, to_write: bool = False) -> Any:
    """Return a tensor as ``own_class`` does; convert an object that has only DLPack's methods to an array."""
    leaf = own_class(name, leaf, to_write=to_write)
    if hasattr(leaf, "dtype") or not hasattr(leaf, "__dlpack__"):
        return leaf
    torch = sys.modules.get("torch")
    try:
        try:
            return from_dlpack(leaf)  # for negative strides torch's function would abort the process
        except (BufferError, RuntimeError):  # NumPy reads neither bfloat16 nor devices
            if torch is None:
                raise
            return own_class(name, torch.from_dlpack(leaf), to_write=to_write)
    except ArrayError:
        raise
    except Exception as error:  # a foreign class may raise anything
        raise ArrayError(f"{name}: cannot be read by DLPack: {type(error).__name__}: {error}") from None


def own_class(name: str, leaf: Any, *, to_write: bool = False) -> Any:
    """Return a NumPy array or torch tensor as an instance of the library's base class; return other objects unchanged.

    Every foreign tensor passes through here before its memory is used. The result shares the tensor's memory, except
    for a torch view whose memory holds the negated numbers: it is a copy, unless ``to_write``. A derived class may
    report a wrong shape or dtype, which may even change between two reads.

    A tensor whose numbers are not in its own memory raises ArrayError: a masked array, and torch's sparse, quantised,
    nested, meta, functional and wrapper tensors. A replicated DTensor, or one of a single process, gives its local
    tensor.
    """
    if isinstance(leaf, np.ndarray):
        if type(leaf) is np.ndarray:
            return leaf
        if isinstance(leaf, np.ma.MaskedArray):
            raise ArrayError(f"{name}: expected an array without a mask, got a masked array; call filled()")
        return np.ndarray.view(leaf, np.ndarray)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(leaf, torch.Tensor):
        return leaf
    plain, way_out = leaf, PLAIN
    try:
        if type(leaf) is not torch.Tensor:
            plain = _without_class(name, leaf, torch)
        elif leaf.requires_grad or leaf.__dict__:
            plain = torch.Tensor.detach(leaf)
        is_dense = plain is not None and plain.layout is torch.strided and not plain.is_nested
        if is_dense and not plain.is_quantized and not plain.is_meta and core.has_memory(plain):
            return plain.resolve_neg() if not to_write and plain.is_neg() else plain
        way_out = _way_out(leaf, torch)
    except ArrayError:  # of the local tensor
        raise
    except Exception:  # some tensors have no shape, and a class may raise anything
        pass
    got = f"a tensor of the class {type(leaf).__name__}"
    raise ArrayError(f"{name}: expected a dense tensor with its numbers in its own memory, got {got}; {way_out}")


def own_classes(name: str, values: Any) -> Any:
    """Return values for NumPy, each array and tensor as ``own_class`` returns it, also those in lists.

    >>> own_classes("q", [0.5, 0.5])
    [0.5, 0.5]
    """
    if not isinstance(values, list | tuple):
        return own_class(name, values)
    is_plain = {*map(type, values)} <= {float, int, str, np.float64}
    return values if is_plain else [own_classes(name, one) for one in values]


def _without_class(name: str, leaf: Any, torch: Any) -> Any:
    """Return a tensor of a derived class as a ``torch.Tensor``, or None if its memory may not hold its numbers."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(leaf, distributed.DTensor):
        if leaf.device_mesh.size() > 1 and not all(placement.is_replicate() for placement in leaf.placements):
            return None
        local = own_class(name, distributed.DTensor.to_local(leaf), to_write=True)
        return local if local.shape == leaf.shape else None
    if type(leaf).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or torch.nn.parameter.is_lazy(leaf):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.detach(torch.Tensor.as_subclass(leaf, torch.Tensor))


PLAIN = "pass a plain tensor, made outside of torch's modes and transforms"
_METHODS = {
    "full_tensor": "call full_tensor() on all ranks",  # DTensor
    "wait": "call wait()",  # the result of a collective
    "to_tensor": "call to_tensor(value)",  # MaskedTensor
    "to_padded_tensor": "call to_padded_tensor(value)",  # a nested tensor
    "dequantize": "call dequantize()",
    "from_functional": PLAIN,  # FunctionalTensor
    "to_dense": "call to_dense()",
}
"""The methods that return a tensor with its own memory."""


def _way_out(leaf: Any, torch: Any) -> str:
    if torch.nn.parameter.is_lazy(leaf):
        return "call the module once, which creates its parameters"
    if leaf.is_meta:
        return "it is on the device meta, without numbers; load them first"
    if leaf.layout not in (torch.strided, torch.jagged):
        return f"its layout is {str(leaf.layout).removeprefix('torch.')}; call to_dense()"
    needs = {"to_padded_tensor": leaf.is_nested, "dequantize": leaf.is_quantized}
    for method, advice in _METHODS.items():
        if needs.get(method) or getattr(type(leaf), method, None) is not getattr(torch.Tensor, method, None):
            return advice
    return PLAIN


def is_own_class(leaf: Any) -> bool:
    """Whether a tensor's class is exactly NumPy's, torch's or this package's, not a derived class."""
    kind, torch = type(leaf), sys.modules.get("torch")
    return kind is np.ndarray or kind is core.DeviceArray or (torch is not None and kind is torch.Tensor)


def dtype_name(leaf: Any) -> str:
    """Return the library-independent name of a tensor's dtype, such as ``"float32"``."""
    # The dtype of a foreign class may compare equal to any dtype, so it must not enter the cache.
    return _dtype_name(leaf.dtype) if is_own_class(leaf) else _dtype_name.__wrapped__(leaf.dtype)


@lru_cache(maxsize=64)  # NumPy needs 3 us for the name
def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def as_array(name: str, leaf: Any) -> npt.NDArray[Any]:
    """Return a CPU tensor as a NumPy array: a float32 copy for 16-bit floats, else a view."""
    leaf = own_class(name, leaf)
    narrow = dtype_name(leaf) in NARROW
    if not isinstance(leaf, np.ndarray):
        try:
            if narrow:
                leaf = leaf.float() if hasattr(leaf, "float") else leaf.astype("float32")
            leaf = from_dlpack(leaf) if hasattr(leaf, "__dlpack__") else np.asarray(leaf)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise ArrayError(f"{name}: expected an array in CPU memory: {error}") from None
    array: npt.NDArray[Any] = leaf
    return array.astype(np.float32, copy=False) if narrow else array


def from_dlpack(leaf: Any) -> Any:
    """Return a view of an array in CPU memory: NumPy's, or torch's for a torch tensor of 16-bit floats.

    The view keeps the memory. A DLPack export of torch would not: its caller could free it by ``resize_``. After a view
    of NumPy's, torch refuses to resize the storage. Raise BufferError for a null address, for which NumPy returns
    uninitialised memory.
    """
    if of_torch := is_own_class(leaf) and hasattr(leaf, "detach"):
        leaf = leaf.detach()  # ``leaf.data`` may be replaced
    narrow = of_torch and dtype_name(leaf) in NARROW  # NumPy lacks bfloat16
    array = (leaf.view(sys.modules["torch"].int16) if narrow else leaf).numpy() if of_torch else np.from_dlpack(leaf)
    if array.size and array.flags.owndata:
        raise BufferError(f"the array of the class {type(leaf).__name__} has a null address")
    return (leaf if array.flags.aligned else leaf.clone()) if narrow else array


def as_narrow(leaf: Any) -> Any:
    """Return a flat view of a tensor of 16-bit floats, if the kernels can read it where it lies, else None."""
    if not is_own_class(leaf) or dtype_name(leaf) not in NARROW or device_of(leaf) != CPU:
        return None
    leaf = leaf if isinstance(leaf, np.ndarray) else from_dlpack(leaf)
    if isinstance(leaf, np.ndarray):
        return leaf.reshape(-1) if leaf.flags.c_contiguous and leaf.flags.aligned else None
    return leaf.reshape(-1) if leaf.is_contiguous() else None


def as_tensor(array: npt.NDArray[Any], dtype: str, library: Library) -> Any:
    """Return an array as a tensor of the given library and dtype; the array itself if it already fits.

    NumPy has bfloat16 only if ml_dtypes is imported; otherwise the result stays float32.
    """
    if library == "numpy":
        has_dtype = dtype != "bfloat16" or "ml_dtypes" in sys.modules
        return array.astype(dtype, copy=False) if has_dtype else array
    if library == "jax":
        return _library("jax.numpy").asarray(array, dtype)
    torch = _library("torch")
    return torch.from_numpy(np.array(array)).to(getattr(torch, dtype))


def tensor_over(memory: npt.NDArray[np.uint8], dtype: str, shape: tuple[int, ...], library: Library) -> Any:
    """Return a view of ``memory`` as a tensor of torch, or as an array for the other libraries."""
    if library != "torch":
        return memory.view(dtype).reshape(shape)
    torch = _library("torch")
    return torch.from_numpy(memory).view(getattr(torch, dtype)).reshape(shape)


class Bfloat16Array:
    """A vector of bfloat16 numbers over uint16[n] in host memory, for the kernels, without torch and ml_dtypes.

    >>> codes = np.uint16([0x3F80, 0x4000])
    >>> out, options = np.empty(2, np.float32), dict(base=None, float64=True, norms=False)
    >>> core.weighted_sum([Bfloat16Array(codes)], np.ones(1), out, **options)
    >>> out
    array([1., 2.], dtype=float32)
    """

    dtype = "bfloat16"

    def __init__(self, codes: npt.NDArray[np.uint16]) -> None:
        self.codes, self.shape, self.nbytes = codes, codes.shape, codes.nbytes
        self._sizes = (ctypes.c_int64 * 1)(codes.size)
        sizes = ctypes.addressof(self._sizes)
        self._tensor = _DLManagedTensor(codes.ctypes.data, *_HOST_DEVICE, 1, *_BFLOAT16, sizes)

    def __len__(self) -> int:
        return self.codes.size

    def __getitem__(self, part: slice) -> "Bfloat16Array":
        return Bfloat16Array(self.codes[part])

    def __dlpack__(self, **_: Any) -> Any:
        """Return an export that is valid while this object exists."""
        return _new_capsule(ctypes.addressof(self._tensor), b"dltensor", None)

    def isfinite(self) -> Bools:
        """Return whether each number is finite."""
        finite: Bools = (self.codes & 0x7F80) != 0x7F80
        return finite

    def astype(self, dtype: Dtype) -> npt.NDArray[Any]:
        """Return the numbers in a different dtype, by way of float32."""
        numbers = np.empty(self.codes.size, np.float32)
        core.dequantise(self.codes, None, "bf16", numbers)
        return numbers.astype(dtype, copy=False)


class _DLManagedTensor(ctypes.Structure):
    """DLPack's structure of a tensor without strides and deleter."""

    _fields_ = (
        *(("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device", ctypes.c_int32)),
        *(("axes", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)),
        *(("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64)),
        *(("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)),
    )


_HOST_DEVICE, _BFLOAT16 = (1, 0), (4, 16, 1)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def flatten_on_device(name: str, leaf: Any) -> Any:
    """Return a flat view of a contiguous tensor on a device."""
    leaf = leaf.detach() if hasattr(leaf, "detach") else leaf
    flags = getattr(leaf, "flags", None)
    if not (leaf.is_contiguous() if hasattr(leaf, "is_contiguous") else flags is None or flags.c_contiguous):
        raise ShapeError(f"{name}: must be contiguous on a device; call contiguous()")
    return leaf.reshape(-1) if hasattr(leaf, "reshape") else leaf


def read_tensor_to_device(name: str, leaf: Any, part: Any, device: str) -> None:
    """Copy a tensor from the host or the same device into a float32 vector on a device."""
    if device_of(leaf) != device:
        part.copy_from(as_array(name, leaf).reshape(-1))
        return
    narrow, leaf = NARROW.get(dtype_name(leaf)), flatten_on_device(name, leaf)
    if narrow is None:
        core.combine([leaf], np.ones(1), part)
    else:
        core.dequantise(leaf, None, narrow, part)


def write_tensor(name: str, leaf: Any, vector: Any) -> None:
    """Copy an array or device vector into a tensor, in place and in the tensor's dtype."""
    try:
        if library_of([leaf]) == "torch":
            torch = _library("torch")
            source = torch.from_dlpack(vector) if is_device_array(vector) else torch.from_numpy(np.array(vector))
            leaf.detach().copy_(source.reshape(leaf.shape))
        elif is_device_array(vector):
            core.combine([vector], np.ones(1), flatten_on_device(name, leaf))
        else:
            np.copyto(leaf, vector, casting="unsafe")
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ArrayError(f"{name}: cannot be written: {error}") from None


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError:
        package = name.partition(".")[0]
        raise MissingDependencyError(f'tensors: {package} is missing; install it or pass library="numpy"') from None


# Allocation of aligned vectors on CPU and CUDA, and reuse of freed memory.
#
# On a CPU a vector starts at a cache line, so that no processor vector spans two lines. With an aligned sum and aligned
# rows, ``exchange`` needs 5 to 10 % less time (8 clients of 11 M, AVX-512); the alignment of updates has no effect. A
# vector of 2 MiB or more starts within the first lines of a huge page, and requests huge pages from the system.
#
# On a device a vector is a ``DeviceArray``, which the host cannot read directly. The functions below handle both kinds
# of vectors; the kernels run on the device of their vectors.


LINE = 64
"""Bytes of a cache line, and of the widest processor vector."""

HUGE = 2 << 20
"""Bytes of a huge page, the minimum for vectors on huge pages."""

SETS = 4096
"""Lines at this distance in bytes share a set of a first-level cache; a set holds 8 or 12 lines."""

_STARTS = cycle(range(0, SETS, 9 * LINE))  # eight evenly spaced offsets
_BASE = vars(np.ndarray)["base"].__get__


FILES_FROM = HUGE
"""The bytes from which the vectors of a ``FileMemory`` are in files."""
UNIT = 1 << 16
"""``spans`` has multiples of this number of elements."""

_limits: dict[int, int] = {}  # of each FileMemory
_mapped: dict[int, "ref[mmap.mmap]"] = {}


class FileMemory(str):
    """The device "cpu" with long vectors in files, for models that exceed memory.

    A vector is a shared mapping of an unlinked file with reserved disk space. While a ``FileMemory`` exists, the
    kernels of this process let all pages of mapped files go before they have touched ``resident`` bytes. The pages stay
    in the system's cache and in the files, so the bits do not change.

    Args:
        folder: the folder of the files.
        resident: bytes.

    >>> from tempfile import gettempdir
    >>> memory = FileMemory(gettempdir(), 1 << 20)
    >>> memory == "cpu", device_of(zeros(1 << 20, device=memory)) is memory
    (True, True)
    """

    folder: str

    def __new__(cls, folder: str | os.PathLike[str], resident: int) -> Self:
        """Return a device, and limit the resident memory of mapped files."""
        memory = super().__new__(cls, CPU)
        memory.folder = str(folder)
        _limits[id(memory)] = resident
        finalize(memory, _remove_limit, id(memory)).atexit = False
        _limit_residency()
        return memory

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return the same device."""
        return self

    def map(self, size: int) -> "_FileMap":
        """Return a mapping of a new file of zeros; raise StoreError if the disk is full."""
        memory = map_file(self.folder, size, _FileMap)
        memory.files = self
        track(memory)
        return memory


class _FileMap(mmap.mmap):
    files: FileMemory


M = TypeVar("M", bound=mmap.mmap)


def map_file(folder: str, size: int, kind: type[M]) -> M:
    """Return a shared mapping of a new unlinked file with reserved disk space; raise StoreError if the disk is full."""
    try:
        from tempfile import TemporaryFile  # slow to import

        with TemporaryFile(dir=folder, buffering=0) as file:
            reserve = getattr(os, "posix_fallocate", lambda fd, _, size: os.truncate(fd, size))
            reserve(file.fileno(), 0, size)
            return kind(file.fileno(), size)
    except OSError as error:
        remedy = "raise the limit of open files" if error.errno == errno.EMFILE else "free space"
        raise StoreError(
            f"{folder}: cannot reserve {size:,} bytes of disk space for a vector: {error.strerror}; {remedy}"
        ) from error


def track(memory: mmap.mmap) -> None:
    """Let the pages of a shared mapping of a file go whenever kernels reach the limit of a ``FileMemory``."""
    key = id(memory)
    _mapped[key] = ref(memory, lambda _, pop=_mapped.pop: pop(key, None))  # type: ignore[misc]


def _let_go() -> None:
    for found in list(_mapped.values()):
        if (memory := found()) is not None:
            with suppress(ValueError, OSError):  # it is closed
                memory.madvise(mmap.MADV_DONTNEED)


def _limit_residency() -> None:
    core.limit_residency(min(_limits.values(), default=0), _let_go)


def _remove_limit(key: int) -> None:
    del _limits[key]
    _limit_residency()


def _memory_of(array: Any) -> str:
    """Return the ``FileMemory`` of an array, or "cpu"."""
    while not isinstance(array, mmap.mmap):
        if isinstance(array, np.ndarray):
            array = _BASE(array)
        elif isinstance(array, memoryview):
            array = array.obj
        elif isinstance(array, _Owner):
            array = array.memory.vector
        else:
            return CPU
    return array.files if isinstance(array, _FileMap) else CPU


def spans(n: int, width: int, most: int | None = None) -> Iterator[slice]:
    """Yield slices that cover n elements: one, or short ones if resident memory is limited.

    The caller touches ``width`` bytes for each element of a slice before it takes the next slice. ``most`` limits the
    bytes of a slice in any case.

    >>> list(spans(3, width=8))
    [slice(0, 3, None)]
    """
    limits = [limit for limit in (core.resident_limit() // 4, most) if limit]
    step = max(min(limits) // (width * UNIT), 1) * UNIT if limits else max(n, 1)
    for start in range(0, n, step):
        stop = min(start + step, n)
        core.count_bytes((stop - start) * width)
        yield slice(start, stop)


def empty(n: int, dtype: Dtype = np.float32, *, device: str = CPU) -> Vector:
    """Return a vector of n uninitialised numbers on a device ("cpu", "cuda" or, for example, "cuda:1").

    Raise MemoryError if the host is out of memory, and DeviceMemoryError if the device is.

    >>> empty(3).dtype
    dtype('float32')
    """
    return _allocate(n, dtype, device, zero=False)


def empty_beside(array: Any, n: int, dtype: Dtype = np.float32) -> Vector:
    """Return a vector of n uninitialised numbers on the device of an array of any library.

    >>> empty_beside(np.zeros(3), 2).shape
    (2,)
    """
    try:
        device = device_of(array)
    except Exception:  # a foreign class may raise anything; the kernel that reads the array reports the error
        device = CPU
    return empty(n, dtype, device=device)


def zeros(n: int, dtype: Dtype = np.float32, *, device: str = CPU) -> Vector:
    """Return a vector of n zeros. The system allocates the memory of a large vector only when it is written.

    >>> zeros(3)
    array([0., 0., 0.], dtype=float32)
    """
    return _allocate(n, dtype, device, zero=True)


def full(n: int, value: float, dtype: Dtype = np.float32, *, device: str = CPU) -> Vector:
    """Return a vector of n equal numbers.

    >>> full(2, 0.5)
    array([0.5, 0.5], dtype=float32)
    """
    vector = empty(n, dtype, device=on_host(device))
    for span in spans(n, vector.itemsize):
        vector[span] = value
    return vector if device == CPU else copied(vector, device=device)


def copied(vector: Vector, *, device: str | None = None) -> Vector:
    """Return a copy of a vector with the same dtype and shape. Default of ``device``: the vector's device.

    >>> copied(np.float64([1, 2]))
    array([1., 2.])
    """
    copy = empty(vector.size, vector.dtype, device=device_of(vector) if device is None else device)
    if not is_device_array(copy):
        copy = copy.reshape(vector.shape)
    copy_into(copy, vector)
    return copy


def copy_into(vector: Any, source: Any) -> None:
    """Copy ``source`` into ``vector``, which has the same length and dtype; each may be on any device.

    A copy to the host blocks. A copy to a device is queued in order with the kernel calls.

    >>> vector = zeros(2)
    >>> copy_into(vector, np.float32([1, 2]))
    >>> vector
    array([1., 2.], dtype=float32)
    """
    if is_device_array(vector):
        vector.copy_from(source)
    elif is_device_array(source):
        source.copy_to(vector)
    elif vector.ndim == 1 == source.ndim:
        for span in spans(len(vector), vector.itemsize + source.itemsize):
            vector[span] = core.present(source)[span]
    else:
        vector[...] = source


def into(vector: Any, out: Any) -> Any:
    """Return ``out`` with a copy of a vector; the vector if ``out`` is None."""
    if out is None:
        return vector
    copy_into(out, vector)
    return out


def set_to_zero(vector: Any) -> None:
    """Set every number of a vector to zero."""
    if is_device_array(vector):
        vector.fill_with_zeros()
    else:
        for span in spans(len(vector), vector.itemsize):
            vector[span] = 0


def freeze(vector: Any) -> None:
    """Make a vector and its future views read-only."""
    if is_device_array(vector):
        vector.writeable = False
    else:
        vector.setflags(write=False)


def read_only(vector: Any) -> Any:
    """Return a read-only view of a whole vector."""
    view = view_of(vector)
    freeze(view)
    return view


def view_of(vector: R) -> R:
    """Return a view of a whole vector, writable if the vector is."""
    return vector.view() if isinstance(vector, np.ndarray) else vector[:]  # type: ignore[index]


def to_host(array: Any) -> Vector:
    """Return an array of any library if it is in host memory, else a blocking copy of it in host memory.

    >>> to_host(np.float32([1, 2]))
    array([1., 2.], dtype=float32)
    """
    if device_of(array) != CPU:
        for method in ("to_host", "cpu", "get"):  # this package's, torch's, CuPy's
            if hasattr(array, method):
                array = getattr(array, method)()
                break
    host: Vector = array
    return host


class BufferPool:
    """A pool of float32 vectors of one length, which reuses the memory of garbage-collected vectors.

    New memory costs more time than writing to it, because the system first fills every page with zeros. The pool reuses
    memory only after the vector and all views of it in any library are deleted. It keeps at most ``most`` free buffers
    of 4 n bytes.

    >>> pool = BufferPool(3)
    >>> vector = pool.get()
    >>> address = vector.ctypes.data
    >>> view = vector[1:]
    >>> del vector  # the view still needs the memory
    >>> pool.get().ctypes.data == address
    False
    >>> del view
    >>> pool.get().ctypes.data == address
    True
    """

    def __init__(self, n: int, *, most: int = 1, device: str = CPU) -> None:
        self._arguments = n, most, device
        self.length, self.is_in_files = n, isinstance(device, FileMemory)
        self._on_device = None if device == CPU else _DevicePool(n, most, device_named(device))
        self._free = _FreeList(most)

    def __deepcopy__(self, memo: dict[int, Any]) -> "BufferPool":
        """Return a new empty pool with the same arguments."""
        n, most, device = self._arguments
        copy = memo[id(self)] = BufferPool(n, most=most, device=device)
        return copy

    def get(self) -> F32:
        """Return a vector, float32[n]; its contents are uninitialised."""
        if self._on_device is not None:
            on_device: F32 = self._on_device.get()
            return on_device
        try:
            memory = self._free.pop()
        except IndexError:
            vector = empty(self._arguments[0], device=self._arguments[2])
            memory = Memory(vector, vector.__array_interface__)
        return np.asarray(_Owner(memory, self._free))

    def owns(self, vector: Any) -> bool:
        """Whether a vector is from this pool, or is a view of such a vector.

        >>> pool = BufferPool(3)
        >>> pool.owns(pool.get()[1:]), pool.owns(empty(3))
        (True, False)
        """
        if self._on_device is not None:
            return self._on_device.owns(vector)
        while isinstance(vector, np.ndarray):
            vector = _BASE(vector)  # NumPy's ``base``: a derived class may override it, and the loop might never end
        return isinstance(vector, _Owner) and vector.free is self._free


class Memory(NamedTuple):
    """A vector that the pool owns, and its cached ``__array_interface__``, which is slow to compute."""

    vector: Vector
    interface: dict[str, Any]


class _FreeList(list[Memory]):
    """The free buffers of a pool: the last ``most`` that were freed."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most


class _Owner:
    """The base object of a vector and of all its views; its deletion returns the buffer to the pool."""

    __slots__ = ("__array_interface__", "__weakref__", "free", "memory")

    def __init__(self, memory: Memory, free: _FreeList) -> None:
        self.memory, self.free = memory, free
        self.__array_interface__ = memory.interface

    def __del__(self) -> None:
        # Each buffer is in one place at any time, so threads need no lock. When the interpreter exits, this module's
        # names may already be deleted, so this method uses only built-in names.
        self.free.append(self.memory)
        if len(self.free) > self.free.most:
            try:  # noqa: SIM105
                self.free.pop(0)
            except IndexError:
                pass


class _DevicePool:
    """``BufferPool`` on a device. A ``DeviceArray`` counts the objects of any library that hold its memory."""

    def __init__(self, n: int, most: int, device: str) -> None:
        self._n, self._most, self._device = n, most, device
        self._all: list[Any] = []  # callers get views of these buffers
        self._lock = Lock()

    def get(self) -> Any:
        with self._lock:
            unused = [memory for memory in self._all if memory.holders == 1]
            surplus = {id(memory) for memory in unused[max(self._most, 1) :]}
            self._all = [memory for memory in self._all if id(memory) not in surplus]
            if not unused:
                unused.append(empty(self._n, device=self._device))
                self._all.append(unused[0])
            return unused[0][:]

    def owns(self, vector: Any) -> bool:
        if not is_device_array(vector):
            return False
        with self._lock:
            return any(
                memory.device == vector.device and 0 <= vector.address - memory.address < memory.nbytes
                for memory in self._all
            )


def _allocate(n: int, dtype: Dtype, device: str, *, zero: bool) -> Vector:
    if device != CPU:
        vector: Any = core.DeviceArray(n, np.dtype(dtype).name, device_ordinal(device_named(device)))
        if zero:
            vector.fill_with_zeros()
        allocated: Vector = vector
        return allocated
    size = np.dtype(dtype).itemsize
    if isinstance(device, FileMemory) and n * size >= FILES_FROM:
        start = next(_STARTS)
        return np.frombuffer(device.map(start + n * size), np.uint8)[start:].view(dtype)
    if n * size >= HUGE:
        return _map_pages(n * size).view(dtype)
    memory = (np.zeros if zero else np.empty)(n + LINE // size, dtype)
    start = -memory.__array_interface__["data"][0] % LINE // size
    return memory[start : start + n]


def _map_pages(count: int) -> npt.NDArray[np.uint8]:
    """Return zeros, uint8[count], on huge pages; a remainder below 3/4 of a huge page is on small pages.

    Consecutive vectors start at eight different offsets from a huge page. If the lines of vectors shared a set of the
    cache, a fold would take 1.3 times as long (8 rows of 11 M, Emerald Rapids).
    """
    pages = (count + HUGE // 4) // HUGE
    try:  # a private mapping, so that a forked process has its own vectors
        memory = mmap.mmap(-1, max(count, pages * HUGE) + HUGE + SETS, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):
        raise MemoryError(f"out of memory: cannot allocate a vector of {count:,} bytes") from None
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.__array_interface__["data"][0] % HUGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE, start, pages * HUGE)
    start += next(_STARTS)
    return whole[start : start + count]
