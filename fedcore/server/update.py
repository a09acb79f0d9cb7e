"""A client's update, and the arrays in it as the round reads them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import wraps
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.arrays import (
    CPU,
    F32,
    NARROW,
    Bfloat16Array,
    FileMemory,
    copied,
    copy_into,
    core,
    device_of,
    dtype_name,
    empty,
    freeze,
    is_device_array,
    is_own_class,
    own_class,
    read_leaf,
    spans,
    to_host,
)
from fedcore.errors import ArrayError, DtypeError, FedcoreError, RangeError, ShapeError
from fedcore.kernels import dequantise, quantise
from fedcore.model import Layout
from fedcore.model.safetensors import Safetensors
from fedcore.profiling import timed
from fedcore.store.registry import ClientId
from fedcore.store.slots import checksums
from fedcore.validation import describe_value, rejection_reason

# Slices of vectors, one per shard of a server: arrays, or references to arrays in other processes.


@dataclass(frozen=True)
class Slices:
    """A client's vector in slices, for an ``Update`` to a sharded server.

    Attributes:
        parts: for each of ``Server.ranges``, float32[stop - start], or up to ``end`` for vectors without buffers; or
            references to such arrays (``ray.ObjectRef``).
        digests: the ``digest_of`` of each part, from the process that computed the whole vector. Default: unknown.
    """

    parts: Sequence[Any]
    digests: Sequence[str] | None = None

    def require(self, name: str, shards: int) -> None:
        """Raise RangeError unless each shard has a part, and a digest if any."""
        for what, entries in (("slice", self.parts), ("digest", self.digests)):
            if entries is not None and len(entries) != shards:
                raise RangeError(f"{name}: expected a {what} for each of {shards} shards, got {len(entries)}")


@dataclass(frozen=True)
class SentSlices:
    """References to the vectors of a broadcast, one per shard, for workers that read them.

    Attributes:
        ranges: (start, stop, end) of each shard, which has the elements [start, stop) of x and [start, end) of an
            offset.
        x, x_prev: the slices of the models; x_prev may be None.
        offset: a function that returns the slices of a client's offset.
    """

    ranges: Sequence[tuple[int, int, int]]
    x: Sequence[Any]
    x_prev: Sequence[Any] | None
    offset: Callable[[ClientId], Sequence[Any]]


def digest_of(vector: Any) -> str:
    """Return the digest of a slice, by which a shard checks that all slices come from one vector.

    Cost: reads the slice once, near the speed of a plain sum.
    """
    array = np.ascontiguousarray(vector)
    return blake2b(checksums(array).tobytes(), digest_size=16).hexdigest()


PART = 1 << 18
"""The number of elements that are rounded at a time."""


def as_sent(layout: Layout, x: F32, out: F32 | None = None) -> F32:
    """Return x, float32[n], as clients get it: rounded to the model's dtypes, ties to even; x itself in float32.

    The rounded model is a new vector, or ``out``.
    """
    if not layout.narrow:
        return x
    sent = empty(len(x), device=device_of(x)) if out is None else out
    copy_into(sent, x)
    for codec, part in narrow_parts(layout, sent):
        dequantise(quantise(part, codec), out=part)
    freeze(sent)
    return sent


def narrow_parts(layout: Layout, x: F32) -> Iterator[tuple[Any, F32]]:
    """Yield the parts of x that clients get in 16 bits, at most ``PART`` elements at a time, each after its codec."""
    for piece in layout.narrow:
        for start in range(piece.start, piece.stop, PART):
            yield NARROW[piece.dtype], x[start : min(start + PART, piece.stop)]


# The update that a client sends, and its vectors as the kernels read them.


Kind = Literal["model", "delta", "gradient"]
KINDS = get_args(Kind)
DTYPES = ("float32", "float64", "float16", "bfloat16")

P = ParamSpec("P")
R = TypeVar("R")


class Update(NamedTuple):
    """One client's result: the arguments of ``Round.add``, for ``Round.add_batch`` and ``Server.round``.

    Attributes:
        client: a registered id.
        value: y, the client's model after its local steps: float32[n] in CPU memory or on the server's device, or a
            model with the server's layout. ``kind`` may declare a different vector.
        steps: K_i, the number of local steps, at least 1.
        examples: n_i, the number of examples, or a different positive measure of the client's data. If no client of a
            round reports a number, all have equal weights. If some do, methods that weight by examples reject updates
            without a number. Default: none.
        lr: eta_i, the rate of the client's steps, or their mean if the rate changes between steps. A rate other than
            the broadcast one needs ``Limits(max_client_lr=...)``. Default: the broadcast rate.
        control: float32[n_parameters], the second vector, if the method needs one: the mean of the client's gradients
            before any correction, or the change of the row if the client keeps it.
        count: how many times the client was drawn (sampling with replacement).
        round: the round of the x from which the client started. A late update is measured against that x
            (``RoundPolicy(max_staleness=...)``). Default: the open round.
        kind: "model"; "delta", the difference y - x in the forms of a model; or "gradient", float32[n_parameters], the
            mean gradient of the client's steps.
        keep: whether the caller leaves the vectors unchanged until the round is finished. The round may then hold them
            and fold several in one pass. It always holds ``bytes``, arrays over ``bytes``, and arrays of
            ``Round.buffer``. It folds any other vector at once, and the caller may then reuse it.
        weight: a number >= 0 that replaces n_i as the weight, for methods that weight by examples. Limits of examples
            do not apply to it. Default: n_i.
        loss: F_i >= 0, the mean loss of x over the client's examples before its steps, for methods that weight by it
            (``Broadcast.needs_loss``).
    """

    client: ClientId
    value: Any
    steps: int
    examples: float | None = None
    lr: float | None = None
    control: Any = None
    count: int = 1  # type: ignore[assignment]  # hides tuple.count
    round: int | None = None
    kind: Kind = "model"
    keep: bool = False
    weight: float | None = None
    loss: float | None = None

    def __repr__(self) -> str:
        defaults = self._field_defaults
        values = {name: value for name, value in self._asdict().items() if value is not defaults.get(name, self)}
        return f"Update({', '.join(f'{name}={describe_value(value)}' for name, value in values.items())})"


def kept_batches(updates: Iterable[Update], most: int) -> Iterator[list[Update]]:
    """Yield the updates in order, in one reused list of up to ``most`` updates with ``keep``."""
    batch: list[Update] = []
    for update in timed("clients", iter(updates)):
        batch.append(update)
        if len(batch) == most or not update.keep:
            yield batch
            batch.clear()  # the consumer may hold the list, which must not keep the arrays
    if batch:
        yield batch


def raises_fedcore_errors(read: Callable[P, R]) -> Callable[P, R]:
    """Turn any exception into a FedcoreError: a client's object may raise anything when it is read."""

    @wraps(read)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return read(*args, **kwargs)
        except FedcoreError:
            raise
        except Exception as error:
            raise ArrayError(rejection_reason(error)) from None

    return guarded


@raises_fedcore_errors
def read_vector(update: Update, layout: Layout, *, apart: bool, device: str = CPU) -> tuple[Any, bool]:
    """Return the vector of an update, and whether its memory is immutable.

    If ``apart`` and y is a model of named tensors, the vector is a list of tensors in the layout's order. Vectors are
    views of the client's memory unless that is unaligned, as a message's payload can be.
    """
    kind, y = update.kind, update.value
    n = layout.n_parameters if kind == "gradient" else layout.n
    one_tensor = layout.slices[0].shape if len(layout.slices) == 1 else None
    vector = as_vector(kind, y, n, one_tensor, device=device)
    if vector is None:
        if not apart:
            return layout.flatten(y, empty(layout.n, device=device)), True
        pieces = layout.pieces(y, device=device)
        is_in_files = isinstance(y, Safetensors) and isinstance(device, FileMemory)
        return pieces, is_in_files or core.are_immutable(pieces)
    if isinstance(vector, np.ndarray) and not vector.flags.aligned:
        return copied(vector), True
    return vector, core.are_immutable([vector])


@raises_fedcore_errors
def as_vector(name: str, y: Any, n: int, shape: tuple[int, ...] | None = None, *, device: str = CPU) -> Any:
    """Return an array as a flat vector of n floats for the kernels, or None if y is not an array.

    The array may also have the given shape, in C order, and be on the given device. Raise DtypeError or ShapeError if
    it does not have n floats.
    """
    if isinstance(y, bytes | bytearray | memoryview):
        plain = memoryview(y)
        if plain.format not in ("B", "f") or not plain.c_contiguous or plain.nbytes != 4 * n:
            got = f"{plain.nbytes} bytes of format {plain.format!r}"
            raise DtypeError(f"{name}: expected {4 * n} bytes of float32[{n}], got {got}")
        return np.frombuffer(plain, np.float32)
    y = read_leaf(own_class(name, y))
    if not hasattr(y, "__dlpack__"):
        return None
    dtype, expected = dtype_name(y), f"{name}: expected float32[{n}]"
    try:
        got = f"got {dtype}{list(y.shape)}"
    except RuntimeError:  # a nested tensor has no shape
        raise DtypeError(f"{expected}, got a tensor without a shape") from None
    if dtype not in DTYPES:
        raise DtypeError(f"{expected}, {got}")
    if not isinstance(y, np.ndarray):
        y = _in_memory(expected, y, dtype, device)
        if isinstance(y, np.ndarray) and dtype_name(y) not in DTYPES:
            raise DtypeError(f"{expected}, {got}, whose memory holds {y.dtype}; convert it to float32")
    if not _is_contiguous(y):
        raise ShapeError(f"{expected}, {got} that is not contiguous")
    if tuple(y.shape) not in ((n,), shape):
        raise ShapeError(f"{expected}, {got}")
    y = y if tuple(y.shape) == (n,) else y.reshape(-1)
    if is_own_class(y) or (device != CPU and device_of(y) == device):
        return y  # on a device, an array belongs to this process; a copy would cost a wait for each update
    return _float32_copy(y, n, CPU)  # a foreign class may export a different array the next time


def _in_memory(expected: str, y: Any, dtype: str, device: str) -> Any:
    """Return a foreign array as NumPy's; unchanged on the device, or in bfloat16, which NumPy lacks."""
    try:
        if (found := device_of(y)) == device != CPU:
            return y
        if found != CPU:
            raise BufferError(f"the array is on {getattr(y, 'device', found)}")
        return y if dtype == "bfloat16" else np.from_dlpack(y)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        or_device = "" if device == CPU else f" or on {device}"
        raise DtypeError(f"{expected} in CPU memory{or_device}: {error}") from None


def _is_contiguous(y: Any) -> bool:
    if hasattr(y, "is_contiguous"):
        return bool(y.is_contiguous())
    return bool(y.flags.c_contiguous) if hasattr(y, "flags") else True  # a DeviceArray


def in_float32(y: Any) -> npt.NDArray[np.float32]:
    """Return a vector of ``as_vector`` in float32 and in host memory, copied if needed."""
    if (device := device_of(y)) != CPU:
        return to_host(_float32_copy(y, len(y), device))
    if isinstance(y, np.ndarray):
        return np.asarray(y, np.float32)
    if isinstance(y, Bfloat16Array):
        return y.astype(np.float32)
    return np.asarray(np.from_dlpack(y.float()), np.float32)  # bfloat16


def _float32_copy(y: Any, n: int, device: str) -> Any:
    copy = empty(n, device=device)
    kernels.accumulate(None, [None], [y], np.array([-1.0]), np.ones(1), out=copy)
    return copy


def first_not_finite(y: Any, layout: Layout) -> str | None:
    """Return the name of the first tensor with a NaN or infinity in a vector or in pieces, or None."""
    for index, piece in enumerate(layout.slices):
        part = y[index] if isinstance(y, list) else y[piece.start : piece.stop]
        if part is None:
            continue
        if not all(kernels.all_finite([in_float32(part[span])])[0] for span in spans(len(part), 8)):
            return piece.name
    return None


@raises_fedcore_errors
def read_counters(update: Update, layout: Layout) -> dict[str, npt.NDArray[Any]]:
    """Return an update's counters and constants as sent; flat vectors and gradients have none."""
    kind, y = update.kind, update.value
    if not layout.outside or kind == "gradient" or isinstance(y, bytes | bytearray | memoryview):
        return {}
    return {} if hasattr(y, "__dlpack__") else layout.read_counters(y)


def bytes_of(y: Any) -> int:
    """Return the size of a sent object in bytes, or 0 if unknown, as for a sparse tensor."""
    try:
        size = int(getattr(y, "nbytes", 0))
    except Exception:  # the object's class may raise anything
        return 0
    return size if 0 <= size < 2**53 else 0


def immutable_copy(y: Any, device: str) -> Any:
    """Return a vector of ``read_vector``, tensors, or None; the caller's mutable memory is copied to the device.

    On a ``FileMemory``, immutable memory is copied to a file too.
    """
    if y is None or isinstance(y, Bfloat16Array):
        return y
    if isinstance(y, list):
        return [immutable_copy(piece, device) for piece in y]
    if isinstance(device, FileMemory) and isinstance(y, np.ndarray):
        return y if device_of(y) is device else copied(y, device=device)
    if is_device_array(y):
        return copied(y)
    if core.are_immutable([y]):
        return y
    return copied(y, device=device) if isinstance(y, np.ndarray) and device == CPU else deepcopy(y)


def digest_of_numbers(vector: Any) -> str:
    """Return the BLAKE2b-256 digest of a vector, or of ``Layout.pieces``, as little-endian float32 in layout order."""
    digest = blake2b(digest_size=32)
    for part in vector if isinstance(vector, list) else [vector]:
        for span in spans(len(part), 8):
            digest.update(np.ascontiguousarray(to_host(in_float32(part[span])), "<f4").view(np.uint8).data)
    return digest.hexdigest()


def digest_of_text(text: str) -> str:
    """Return the BLAKE2b-256 digest of a document."""
    return blake2b(text.encode(), digest_size=32).hexdigest()
