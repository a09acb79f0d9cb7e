"""Vectors on the host and on CUDA devices: allocation, reuse, copies, and arrays of other libraries."""

import mmap
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, wraps
from importlib import import_module
from itertools import cycle
from threading import Lock
from typing import Any, Literal, NamedTuple, ParamSpec, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from fedcore.errors import ArrayError, DeviceError, MissingDependencyError, ShapeError, UnknownNameError
from fedcore.native import core

# Names of the array types that many files use.


F32: TypeAlias = npt.NDArray[np.float32]
F64: TypeAlias = npt.NDArray[np.float64]
I64: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Floats: TypeAlias = npt.NDArray[np.floating[Any]]


# Devices by name: which one somebody means, whether it is there, and on which an array lies.


CPU = "cpu"
KNOWN = ("cpu", "cuda", "cuda:1")
"""Names as messages show them; any number may stand behind ``cuda:``."""

_NAME = re.compile(r"cpu|cuda(:\d{1,4})?")
_HOST = (1, 3)
"""DLPack's numbers of memory that the host reads: its own, and what it has pinned for CUDA."""
_CUDA = (2, 13)
"""Those of a CUDA device's own memory, and of memory that the driver moves there."""


def device_named(name: str) -> str:
    """The one name of a device: ``"cpu"``, or ``"cuda:0"``, for which ``"cuda"`` may stand too.

    Raises:
        UnknownNameError: there is no such kind of device.
        DeviceError: there is no such device here, or no driver; the message says what is missing.

    >>> device_named("cpu")
    'cpu'
    """
    if name == CPU:
        return CPU
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise UnknownNameError.of("device", name, KNOWN)
    number = device_ordinal(name)
    if (reason := core.cuda_reason()) is not None:
        raise DeviceError(f"device: expected a GPU for {name!r}, got none: {reason}")
    if number >= (count := len(core.cuda_devices())):
        raise DeviceError(f"device: expected one of the {count} that the driver knows, 'cuda:0' on, got {name!r}")
    return f"cuda:{number}"


def device_ordinal(name: str) -> int:
    """The number of a CUDA device by its name."""
    return int(name[5:] or 0)


def is_device_array(array: object) -> bool:
    """Tell whether an array is one of this package's own in a device's memory."""
    return isinstance(array, core.DeviceArray)


def device_of(array: Any) -> str:
    """The name of the device on which an array of anybody's lies; of one that is neither, its numbers in DLPack.

    >>> device_of(np.zeros(3))
    'cpu'
    """
    if isinstance(array, np.ndarray) or not hasattr(array, "__dlpack_device__"):
        return CPU
    kind, number = array.__dlpack_device__()
    if kind in _HOST:
        return CPU
    return f"cuda:{number}" if kind in _CUDA else f"device {kind}:{number} of DLPack"


# IEEE arithmetic for this package's functions, whatever mode of the processor their callers have chosen.


P = ParamSpec("P")
R = TypeVar("R")


def ieee(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, with the calling thread in IEEE's mode while it runs, and in its own again behind it.

    ``torch.set_flush_denormal(True)`` makes the thread that calls it take subnormal numbers for zeros, in NumPy and in
    comparisons too. What is decorated gives the same bits in such a thread as in any other. Whatever it calls runs in
    that mode as well; so it belongs on functions that call no code of the user's that may train a model.

    Cost: half a microsecond.

    >>> ieee(abs)(-5e-324)
    5e-324
    """

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        return core.in_ieee_mode(function, *args, **kwargs)

    return called


# CUDA devices: whether there are any, what they are, and on which stream the kernels' calls come.


class CudaDevice(NamedTuple):
    """A CUDA device, as the driver describes it."""

    name: str
    capability: int
    """90 for 9.0."""
    memory: int
    """Bytes."""


def reason() -> str | None:
    """The reason why there is no CUDA (no driver, no device, a build without nvcc), or None if there is.

    Cost: the first call that finds a device loads the kernels onto it.
    """
    return core.cuda_reason()


def devices() -> list[CudaDevice]:
    """The CUDA devices, by ordinal.

    Raises:
        DeviceError: there is no CUDA; the message is that of ``reason``.
    """
    return [CudaDevice(*described) for described in core.cuda_devices()]


@contextmanager
def stream(handle: Any) -> Iterator[None]:
    """Have the calls of this thread, within the block, come on a stream of the caller's.

    Without it a call comes on the stream on which the library of its first array works now, where that tells it, as
    torch does (``torch.cuda.stream`` is enough for its tensors), else on the legacy default stream. Either way it runs
    behind what its arrays' libraries have queued, and nothing waits but who reads a number of the result.

    Libraries that export by Python alone, as CuPy does, are told the call's stream, and theirs is not told of the
    call's end: keep their arrays until it has come, where they work on non-blocking streams of their own.

    Args:
        handle: a cudaStream_t of the arrays' device as an int, or what has one as ``cuda_stream`` (torch) or ``ptr``
            (CuPy).

    >>> with stream(1):  # the legacy default stream
    ...     pass
    """
    number = getattr(handle, "cuda_stream", getattr(handle, "ptr", handle))
    before = core.choose_stream(int(number))
    try:
        yield
    finally:
        core.choose_stream(before)


# Tensors of the library that a model came in: NumPy's arrays, or torch's tensors; torch is not imported here.


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
    array = np.asarray(leaf) if device_of(leaf) == CPU else None
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
    if device_of(leaf) == CPU:
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
    if device_of(leaf) != device:
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


def write_tensor(name: str, leaf: Any, array: npt.NDArray[Any]) -> None:
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


# The place where every vector of a model's length is made: its device, its place in memory, and how memory comes back.
#
# On a processor a vector starts where a cache line does, so that no vector of the processor's lies in two lines: where
# the sum and the rows do, ``exchange`` takes 5 to 10 % less time (8 clients of 11 M, AVX-512); what a client sent need
# not. One of 2 MiB and more starts within the first lines of a huge page, and asks for such pages.
#
# On a device a vector is a ``DeviceArray``, which the host cannot look into. What knows of both kinds lies here:
# allocation, copies, zeros; arithmetic is the kernels', which go by where their vectors lie.


LINE = 64
"""Bytes of a cache line, and of the widest vector."""

HUGE = 2 << 20
"""Bytes of a huge page. A shorter vector would not fill one."""

SETS = 4096
"""Bytes after which lines fall into the same set of a first-level cache; a set holds eight or twelve lines."""

_STARTS = cycle(range(0, SETS, 9 * LINE))  # eight of them, evenly spread
_BASE = vars(np.ndarray)["base"].__get__

Vector: TypeAlias = npt.NDArray[Any]
Dtype: TypeAlias = type[np.generic] | np.dtype[Any]


def empty(n: int, dtype: Dtype = np.float32, *, device: str = "cpu") -> Vector:
    """A vector of n numbers, whatever they are.

    Args:
        n: its length.
        dtype: of its numbers.
        device: where it lies: "cpu", "cuda" or "cuda:1", say.

    Raises:
        UnknownNameError, DeviceError: there is no such device.
        DeviceMemoryError: it has not so much memory. (The host's own is a MemoryError.)

    >>> empty(3).dtype
    dtype('float32')
    """
    return _born(n, dtype, device, zero=False)


def empty_beside(array: Any, n: int, dtype: Dtype = np.float32) -> Vector:
    """A vector of n numbers, whatever they are, on the device on which an array of anybody's lies.

    Errors are those of ``empty``.

    >>> empty_beside(np.zeros(3), 2).shape
    (2,)
    """
    try:
        device = device_of(array)
    except Exception:  # of somebody else's: who reads the array says why that cannot be
        device = CPU
    return empty(n, dtype, device=device)


def zeros(n: int, dtype: Dtype = np.float32, *, device: str = "cpu") -> Vector:
    """A vector of n zeros; arguments and errors are those of ``empty``.

    Cost: a large one takes no memory before it is written to.

    >>> zeros(3)
    array([0., 0., 0.], dtype=float32)
    """
    return _born(n, dtype, device, zero=True)


def full(n: int, value: float, dtype: Dtype = np.float32, *, device: str = "cpu") -> Vector:
    """A vector of n times the same value; the other arguments, and errors, are those of ``empty``.

    >>> full(2, 0.5)
    array([0.5, 0.5], dtype=float32)
    """
    vector = empty(n, dtype)
    vector[:] = value
    return vector if device == CPU else copied(vector, device=device)


def copied(vector: Vector, *, device: str | None = None) -> Vector:
    """A copy of a vector, of its dtype and shape; errors are those of ``empty``.

    Args:
        device: where the copy lies; None for where the vector does.

    >>> copied(np.float64([1, 2]))
    array([1., 2.])
    """
    device = device_of(vector) if device is None else device
    copy = empty(vector.size, vector.dtype, device=device)
    if isinstance(copy, np.ndarray):
        copy = copy.reshape(vector.shape)
    copy_into(copy, vector)
    return copy


def copy_into(vector: Any, source: Any) -> None:
    """Copy the numbers of one vector into another as long and of its dtype, wherever the two lie.

    The host waits where the copy comes to it; to a device it is made in the order of the kernels' calls.

    >>> vector = zeros(2)
    >>> copy_into(vector, np.float32([1, 2]))
    >>> vector
    array([1., 2.], dtype=float32)
    """
    if not isinstance(vector, np.ndarray):
        vector.copy_from(source)
    elif isinstance(source, np.ndarray):
        vector[...] = source
    else:
        source.copy_to(vector)


def set_to_zero(vector: Any) -> None:
    """Make every number of a vector zero."""
    if isinstance(vector, np.ndarray):
        vector[:] = 0
    else:
        vector.fill_with_zeros()


def freeze(vector: Any) -> None:
    """Let nobody write to a vector by this object, or by views of it that are made from now on."""
    if isinstance(vector, np.ndarray):
        vector.setflags(write=False)
    else:
        vector.writeable = False


def view_of(vector: Any) -> Any:
    """Another object for the same memory, as writable as the first."""
    return vector.view() if isinstance(vector, np.ndarray) else vector[:]


def to_host(vector: Any) -> Vector:
    """A vector as NumPy's: itself, or a copy of what lies on a device, for which the host waits.

    >>> to_host(np.float32([1, 2]))
    array([1., 2.], dtype=float32)
    """
    host: Vector = vector if isinstance(vector, np.ndarray) else vector.to_host()
    return host


class Recycled:
    """Makes float32 vectors of one length, and keeps the memory of some of them that have become garbage.

    Fresh memory costs more than what is written into it: every page of it is first filled with zeros.

    A vector's memory comes back when the vector and all views of it, of whatever library, are gone: never before.

    Args:
        n: their length.
        most: memories that are kept at a time.
        device: as for ``empty``.

    Raises:
        UnknownNameError, DeviceError: as for ``empty``.

    Cost: 4 n bytes for each memory that waits for its next use.

    >>> vectors = Recycled(3)
    >>> first = vectors.take()
    >>> address = first.ctypes.data
    >>> view = first[1:]
    >>> del first  # the view still needs it
    >>> vectors.take().ctypes.data == address
    False
    >>> del view
    >>> vectors.take().ctypes.data == address
    True
    """

    def __init__(self, n: int, *, most: int = 1, device: str = "cpu") -> None:
        self._made_by = n, most, device
        self._n = n
        self._there = None if device == CPU else _RecycledThere(n, most, device_named(device))
        self._spares = _Spares(most)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Recycled":
        """Another one, which has no memory yet: that of this one is known by its address."""
        n, most, device = self._made_by
        copied = memo[id(self)] = Recycled(n, most=most, device=device)
        return copied

    def take(self) -> npt.NDArray[np.float32]:
        """A vector, float32[n], of whatever values."""
        if self._there is not None:
            there: npt.NDArray[np.float32] = self._there.take()
            return there
        try:
            memory = self._spares.pop()
        except IndexError:
            vector = empty(self._n)
            memory = Memory(vector, vector.__array_interface__)
        return np.asarray(_Lent(memory, self._spares))

    def lent(self, vector: Any) -> bool:
        """Tell whether a vector was taken here, or is a view of one that was.

        >>> vectors = Recycled(3)
        >>> vectors.lent(vectors.take()[1:]), vectors.lent(empty(3))
        (True, False)
        """
        if self._there is not None:
            return self._there.lent(vector)
        while isinstance(vector, np.ndarray):
            vector = _BASE(vector)  # as NumPy has it: a class of the caller's may show another, and for ever
        return isinstance(vector, _Lent) and vector._spares is self._spares


class Memory(NamedTuple):
    """A vector that is never shown itself, and how NumPy describes it, which takes as long to ask as to make one."""

    vector: Vector
    interface: dict[str, Any]


class _Spares(list[Memory]):
    """Memories that nobody uses; the latest ``most`` of them."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def give(self, memory: Memory) -> None:
        # Whatever another thread does meanwhile, each memory is in one place. When the interpreter ends, the names of
        # this module may be gone already: only Python's own are used here.
        self.append(memory)
        if len(self) > self._most:
            try:  # noqa: SIM105
                self.pop(0)
            except IndexError:
                pass


class _Lent:
    """The base of a vector and of every view of it."""

    __slots__ = ("__array_interface__", "_memory", "_spares")

    def __init__(self, memory: Memory, spares: _Spares) -> None:
        self._memory, self._spares = memory, spares
        self.__array_interface__ = memory.interface

    def __del__(self) -> None:
        self._spares.give(self._memory)


class _RecycledThere:
    """``Recycled`` on a device, whose vectors say how many objects, of whatever library, hold their memory."""

    def __init__(self, n: int, most: int, device: str) -> None:
        self._n, self._most, self._device = n, most, device
        self._all: list[Any] = []  # the memories themselves, which are never shown
        self._turn = Lock()

    def take(self) -> Any:
        with self._turn:
            unused = [memory for memory in self._all if memory.holders == 1]
            gone = {id(memory) for memory in unused[max(self._most, 1) :]}
            self._all = [memory for memory in self._all if id(memory) not in gone]
            if not unused:
                unused.append(empty(self._n, device=self._device))
                self._all.append(unused[0])
            return unused[0][:]

    def lent(self, vector: Any) -> bool:
        if not is_device_array(vector):
            return False
        with self._turn:
            return any(
                memory.device == vector.device and 0 <= vector.address - memory.address < memory.nbytes
                for memory in self._all
            )


def _born(n: int, dtype: Dtype, device: str, *, zero: bool) -> Vector:
    if device != CPU:
        there: Vector = _born_there(n, dtype, device_named(device), zero=zero)
        return there
    size = np.dtype(dtype).itemsize
    if n * size >= HUGE:
        return _mapped(n * size).view(dtype)
    memory = (np.zeros if zero else np.empty)(n + LINE // size, dtype)
    start = -memory.__array_interface__["data"][0] % LINE // size
    return memory[start : start + n]


def _born_there(n: int, dtype: Dtype, device: str, *, zero: bool) -> Any:
    vector = core.DeviceArray(n, np.dtype(dtype).name, device_ordinal(device))
    if zero:
        vector.fill_with_zeros()
    return vector


def _mapped(count: int) -> npt.NDArray[np.uint8]:
    """uint8[count] of zeros, mapped for itself, on huge pages; an end of less than 3/4 of one is on small ones.

    Small pages cost microseconds each when they are first written to, 512 times as many as huge ones. Eight
    vectors in a row start at eight different places of a huge page: a fold of vectors whose lines all fall into the
    same set of the cache takes 1.3 times as long (8 rows of 11 M, Emerald Rapids).
    """
    pages = (count + HUGE // 4) // HUGE
    try:  # private: a process that is forked has vectors of its own
        memory = mmap.mmap(-1, max(count, pages * HUGE) + HUGE + SETS, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):
        raise MemoryError(f"a vector of {count:,} bytes: the system has no memory for it") from None
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.__array_interface__["data"][0] % HUGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them does without
            memory.madvise(mmap.MADV_HUGEPAGE, start, pages * HUGE)
    start += next(_STARTS)
    return whole[start : start + count]
