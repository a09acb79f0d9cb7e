"""A client's update, and the arrays in it as the round reads them."""

import math
import os
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, wraps
from hashlib import blake2b
from importlib import import_module
from mmap import mmap
from operator import itemgetter
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, get_args
from weakref import ref

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.arrays import (
    CPU,
    F32,
    NARROW,
    Bfloat16Array,
    BufferPool,
    FileMemory,
    as_array,
    copied,
    copy_into,
    core,
    device_of,
    dtype_name,
    empty,
    freeze,
    from_dlpack,
    is_own_class,
    map_file,
    own_class,
    own_classes,
    read_leaf,
    read_tensor_to_device,
    set_to_zero,
    spans,
    to_host,
)
from fedcore.errors import ArrayError, DtypeError, FedcoreError, RangeError, RoundError, ShapeError, UnknownNameError
from fedcore.kernels import Codes, dequantise, quantise
from fedcore.model import Layout
from fedcore.model.layout import named_tensors, shown_names
from fedcore.model.safetensors import Safetensors
from fedcore.profiling import timed
from fedcore.store.registry import ClientId, canonical
from fedcore.store.slots import checksums
from fedcore.validation import check_integer, describe_value, listed, numbers, rejection_reason, short_repr

# Slices of vectors, one per shard of a server: arrays, or references to arrays in other processes.


@dataclass(frozen=True)
class Slices:
    """A client's vector in slices, for an ``Update`` to a sharded server.

    Attributes:
        parts: for each range of ``Broadcast.slices``, float32[stop - start], or up to ``end`` for vectors without
            buffers; or references to such arrays (``ray.ObjectRef``).
        digests: the ``digest_of`` of each part, from the process that computed the whole vector. Default: unknown.

    Raises:
        RangeError: an argument is not a list or another iterable.
    """

    parts: Sequence[Any]
    digests: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name in ("parts",) if self.digests is None else ("parts", "digests"):
            object.__setattr__(self, name, tuple(listed(name, getattr(self, name))))  # an iterator is read once

    def require(self, name: str, shards: int) -> None:
        """Raise RangeError unless each shard has a part, and a digest if any."""
        for what, entries in (("slice", self.parts), ("digest", self.digests)):
            if entries is not None and len(entries) != shards:
                raise RangeError(f"{name}: expected a {what} for each of {shards} shards, got {len(entries)}")


@dataclass(frozen=True, slots=True)
class SlicedVector:
    """A client's vector as an open round of a sharded server holds it.

    Attributes:
        parts: the slice of each shard, in the form that is sent to it.
        nbytes: the bytes that the client sent.
        has_buffers: whether it has the float buffers after the parameters.
        is_immutable: whether it stays unchanged until the end of the round.
        whole: the vector, if the journal needs it; else None.
        groups: the names of the groups of tensors that it has, with partial updates.
    """

    parts: Sequence[Any]
    nbytes: int
    has_buffers: bool
    is_immutable: bool
    whole: Any = None
    groups: Sequence[str] = ()

    def kept(self) -> "SlicedVector":
        """Return the vector with copies of slices that are views of the caller's memory."""
        kept = [immutable_copy(part, CPU) if isinstance(part, np.ndarray) else part for part in self.parts]
        return SlicedVector(kept, self.nbytes, self.has_buffers, is_immutable=True, groups=self.groups)


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
    return blake2b(checksums(np.ascontiguousarray(own_class("vector", vector))).data, digest_size=16).hexdigest()


PART = 1 << 20
"""The number of elements that are rounded or decoded at a time."""


def as_sent(layout: Layout, x: F32, out: F32 | None = None) -> F32:
    """Return x, float32[n], as clients get it: rounded to the model's dtypes, ties to even; x itself in float32.

    The rounded model is a new vector, or ``out``.
    """
    if not layout.narrow:
        return x
    sent = empty(len(x), device=device_of(x)) if out is None else out
    for piece in layout.slices:
        if piece not in layout.narrow and piece.start < len(x):
            copy_into(sent[piece.start : piece.stop], x[piece.start : piece.stop])
    for _ in rounded_parts(layout, x, sent):
        pass
    freeze(sent)
    return sent


def rounded_parts(layout: Layout, x: F32, out: F32 | None = None) -> Iterator[F32]:
    """Yield the parts of x that clients get in 16 bits, rounded, at most ``PART`` elements at a time.

    They are parts of ``out``, or of memory that the next part reuses.
    """
    if not layout.narrow:
        return
    most = min(PART, max(piece.stop - piece.start for piece in layout.narrow))
    codes = empty(most, np.uint16, device=device_of(x))
    room = empty(0 if out is not None else most, device=device_of(x))
    for piece in layout.narrow:
        for start in range(piece.start, piece.stop, PART):
            stop = min(start + PART, piece.stop)
            part = Codes(NARROW[piece.dtype], codes[: stop - start])
            quantise(x[start:stop], part.codec, out=part)
            yield dequantise(part, out=room[: stop - start] if out is None else out[start:stop])


def require_finite(x: F32, layout: Layout) -> None:
    """Raise ArrayError with the tensor's name if a model, or a slice of it, has a NaN or an infinity in its dtype."""
    if not kernels.all_finite([x])[0]:
        raise ArrayError(f"model, {first_not_finite(x, layout)}: has a NaN or infinity; register a mask as a buffer")
    if not all(kernels.all_finite([part])[0] for part in rounded_parts(layout, x)):
        raise ArrayError(f"model, {first_not_finite(as_sent(layout, x), layout)}: a number is too large for its dtype")


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
        examples: n_i, the number of examples, or a different measure of the client's data, >= 1e-12. If no client of a
            round reports a number, all have equal weights. If some do, methods that weight by examples reject updates
            without a number. Default: none.
        lr: eta_i, the rate of the client's steps, or their mean if the rate changes between steps. A rate other than
            the broadcast one needs ``Limits(max_client_lr=...)``. Default: the broadcast rate.
        control: float32[n_parameters], the second vector, if the method needs one: the mean of the client's gradients
            before any correction, or the change of the row if the client keeps it.
        count: how many times the client was drawn (sampling with replacement). It must be 1 if the method accepts each
            client once per round, and with ``PrivateMean``.
        round: the round of the x from which the client started. A late update is measured against that x
            (``RoundPolicy(max_staleness=...)``). Default: the open round.
        kind: "model"; "delta", the difference y - x in the forms of a model; or "gradient", float32[n_parameters], the
            mean gradient of the client's steps.
        keep: whether the caller leaves the vectors unchanged until the round is finished. The round may then hold them
            and fold several in one pass. It always holds ``bytes``, arrays over ``bytes``, and arrays of
            ``Round.buffer``. It folds any other vector at once, and the caller may then reuse it. torch refuses to
            resize the storage of a tensor that was read.
        weight: a number >= 0 that replaces n_i as the weight, for methods that weight by examples. Limits of examples
            do not apply to it. The weights of a round must not sum to less than 2^-40 in exact sums, or 2^-100 in
            float32 sums, unless all are 0. Default: n_i.
        loss: F_i >= 0, the mean loss of x over the client's examples before its steps, for methods that weight by it
            (``Broadcast.needs_loss``).
        update_id: the id of this update among those of its client: a str of 1..100 bytes in UTF-8, or an int in
            0..2**64 - 1. It must be the same each time that the update is sent. A copy of an update that counts does
            not count again. An update with an id must name its ``round``. Default: no id.
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
    update_id: ClientId | None = None

    def vector(self, name: Literal["value", "control"], n: int) -> F32:
        """Return a vector of the update as float32[n] in host memory; raise ShapeError if it is a model of tensors."""
        sent = getattr(self, name)
        vector = as_vector(name, sent, n)
        if vector is None:
            raise ShapeError(f"{name}: must be float32[{n}], got {describe_value(sent)}; flatten the tensors")
        return in_float32(vector)

    @property
    def nbytes(self) -> int:
        """The size of ``value`` in bytes, or 0 if unknown, as for a sparse tensor."""
        return bytes_of(self.value)

    def require_kind(self) -> None:
        """Raise UnknownNameError if ``kind`` is unknown."""
        if self.kind not in KINDS:
            raise UnknownNameError.of("kind", self.kind, KINDS)

    def __repr__(self) -> str:
        defaults = self._field_defaults
        values = {name: value for name, value in self._asdict().items() if value is not defaults.get(name, self)}
        return f"Update({', '.join(f'{name}={describe_value(value)}' for name, value in values.items())})"


class Reply:
    """What a round answers to an update: true if the update counts so far, else false.

    A client that sends its update again until the reply is true can stop at any true reply.

    Attributes:
        status: "accepted", or "held" if the round has not decided yet and ``Report.rejected`` may still name the
            client, or "rejected"; or "already counted" for a copy of an update that counts so far, which is true.
        reason: why the update is rejected, else "".

    >>> bool(Reply("held")), Reply("accepted") == True, Reply("rejected", "steps: missing")
    (True, True, Reply('rejected', 'steps: missing'))
    """

    __slots__ = "reason", "status"

    def __init__(self, status: Literal["accepted", "held", "rejected", "already counted"], reason: str = "") -> None:
        self.status, self.reason = status, reason

    def __bool__(self) -> bool:
        return self.status != "rejected"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, bool):
            return bool(self) is other
        return isinstance(other, Reply) and (self.status, self.reason) == (other.status, other.reason)

    def __hash__(self) -> int:
        return hash(bool(self))

    def __repr__(self) -> str:
        return f"Reply({self.status!r}{f', {self.reason!r}' if self.reason else ''})"


ACCEPTED, HELD, ALREADY = Reply("accepted"), Reply("held"), Reply("already counted")


# The ids of updates, by which a round recognises copies.

IDS = "ids"
"""The name of the vector of ``CountedIds`` among those that a server remembers of accepted updates."""
LONGEST_ID = 100
"""The most bytes of a str as ``Update.update_id``."""
NO_ROUND = "round=None: an update with an update_id must name the round of its broadcast, as its copies may come later"


def digest_of_id(client: ClientId, update_id: Any) -> bytes:
    """Return the digest of a client and the id of its update; raise RangeError if the id is invalid."""
    try:
        known = canonical(update_id)
    except FedcoreError:
        known = None
    if known is None or (isinstance(known, str) and not 0 < len(known.encode()) <= LONGEST_ID):
        raise RangeError(
            f"update_id={short_repr(update_id)}: must be a str of 1..{LONGEST_ID} bytes or an int in 0..2**64 - 1"
        )
    return blake2b(repr((client, known)).encode(), digest_size=16).digest()


class CountedIds:
    """The ids of the updates that an open round and the rounds before it count, as digests.

    Args:
        stored: the ids of earlier rounds: int64[3, m], the round of each and the two words of its digest. The first
            column and unused ones have zeros in place of a digest, and the first round of which all ids are there.
            Default: none was ever counted.
    """

    def __init__(self, stored: npt.NDArray[np.int64] | None = None) -> None:
        self._stored, self.first = stored, 0 if stored is None else int(stored[0, 0])
        self._keys: dict[bytes, Any] = {}  # by id, the entry of the open round's ``_known``
        self._ids: dict[Any, bytes] = {}

    @staticmethod
    def of(first: int, entries: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the vector for these columns. It has unused ones, as a store has a file for each size."""
        k = entries.shape[1]
        stored = np.zeros((3, 1 << max(6, k.bit_length())), np.int64)
        stored[0], stored[:, 1 : k + 1] = first, entries
        return stored

    @cached_property
    def _earlier(self) -> frozenset[bytes]:
        stored = self._stored
        return frozenset(() if stored is None else np.ascontiguousarray(stored[1:].T).view("V16")[:, 0].tolist())

    def note(self, id: bytes, key: Any) -> None:
        """Note the id of an update that the round accepts with this entry of ``_known``."""
        self.drop(key)
        self._keys[id], self._ids[key] = key, id

    def drop(self, key: Any) -> None:
        """Forget the id of an update that the round rejects after all."""
        self._keys.pop(self._ids.pop(key, b""), None)

    def has(self, id: bytes, known: Collection[Any]) -> bool:
        """Whether an update with this id counts so far; ``known`` has the entries of the open round."""
        return id in self._earlier or self._keys.get(id) in known

    def after(self, round: int, most: int, known: Collection[Any]) -> dict[str, Any]:
        """Return the vector after a round by its name: the ids of it and of ``most - 1`` rounds before; {} without."""
        own = [id for id, key in self._keys.items() if key in known] if self._keys else []
        if not own and self._stored is None:
            return {}
        first = max(self.first, round + 1 - most)
        before = np.zeros((3, 0), np.int64) if self._stored is None else self._stored
        words = np.frombuffer(b"".join(own), np.int64).reshape(-1, 2).T
        new = np.concatenate([np.full((1, len(own)), round), words])
        before = before[:, (before[0] >= first) & before[1:].any(axis=0)]
        return {IDS: self.of(first, np.concatenate([before, new], axis=1))}


def kept_batches(updates: Iterable[Update], most: int) -> Iterator[list[Update]]:
    """Yield the updates in order, in one reused list of up to ``most`` updates with ``keep``."""
    batch: list[Update] = []
    for update in timed("clients", iter(updates)):
        batch.append(update)
        if len(batch) == most or getattr(update, "keep", False) is not True:
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
def read_vector(
    update: Update, layout: Layout, *, apart: bool, device: str = CPU, room: Callable[[], F32] | None = None
) -> tuple[Any, bool]:
    """Return the vector of an update, and whether its memory is immutable.

    If ``apart`` and y is a model of named tensors, the vector is a list of tensors in the layout's order; else it is
    one vector in new memory, or in that of ``room()``. Vectors are views of the client's memory unless that is
    unaligned, as a message's payload can be.
    """
    kind, y = update.kind, update.value
    n = layout.n_parameters if kind == "gradient" else layout.n
    one_tensor = layout.slices[0].shape if len(layout.slices) == 1 else None
    vector = as_vector(kind, y, n, one_tensor, device=device)
    if vector is None:
        if not apart:
            return layout.flatten(y, empty(layout.n, device=device) if room is None else room()), True
        pieces = layout.pieces(y, device=device)
        is_in_files = isinstance(y, Safetensors) and isinstance(device, FileMemory)
        return pieces, is_in_files or core.are_immutable(pieces)
    if isinstance(vector, np.ndarray) and vector.dtype == np.float64 and kind != "gradient":
        layout.log_rounded(layout.unflatten(vector))
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
    y = read_leaf(name, y)
    if not hasattr(y, "__dlpack__"):
        return None
    dtype, expected = dtype_name(y), f"{name}: expected float32[{n}]"
    got = f"got {dtype}{list(y.shape)}"
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
    if isinstance(y, np.ndarray) or tuple(y.shape) != (n,):
        y = y.reshape(-1)  # a view, since the caller may change the form of an array
    if is_own_class(y) or (device != CPU and device_of(y) == device):
        return y  # on a device, an array belongs to this process; a copy would cost a wait for each update
    copy = empty(n)  # a foreign class may export a different array the next time
    kernels.accumulate(None, [None], [y], np.array([-1.0]), np.ones(1), out=copy)
    return copy


def _in_memory(expected: str, y: Any, dtype: str, device: str) -> Any:
    """Return a view as of ``from_dlpack``; an array on the device, or JAX's in bfloat16, unchanged."""
    try:
        if (found := device_of(y)) == device != CPU:
            return y
        if found != CPU:
            raise BufferError(f"the array is on {getattr(y, 'device', found)}")
        return from_dlpack(y) if dtype != "bfloat16" or is_own_class(y) else y
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        or_device = "" if device == CPU else f" or on {device}"
        raise DtypeError(f"{expected} in CPU memory{or_device}: {error}") from None


def _is_contiguous(y: Any) -> bool:
    if hasattr(y, "is_contiguous"):
        return bool(y.is_contiguous())
    return bool(y.flags.c_contiguous) if hasattr(y, "flags") else True  # a DeviceArray


def in_float32(y: Any, device: str = CPU) -> npt.NDArray[np.float32]:
    """Return a vector of ``as_vector`` in float32 in host memory, or on the device where it is; copied if needed."""
    if (found := device_of(y)) != CPU:
        copy = joined_float32([y], found)
        return copy if found == device else to_host(copy)
    if isinstance(y, np.ndarray):
        return np.asarray(core.present(y), np.float32)
    if isinstance(y, Bfloat16Array):
        return y.astype(np.float32)
    return as_array("update", y)  # bfloat16


def joined_float32(parts: Sequence[Any], device: str) -> Any:
    """Return vectors of ``as_vector`` on the device as one new vector, in float32."""
    whole, start = empty(sum(map(len, parts)), device=device), 0
    for part in parts:
        read_tensor_to_device("update", part, whole[start : start + len(part)], device)
        start += len(part)
    return whole


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
    """Return an update's counters and constants as sent; flat vectors, slices and gradients have none."""
    kind, y = update.kind, update.value
    if not layout.outside or kind == "gradient" or isinstance(y, bytes | bytearray | memoryview | Slices):
        return {}
    return {} if hasattr(y, "__dlpack__") else layout.read_counters(y)


def bytes_of(y: Any, names: Collection[str] = ()) -> int:
    """Return the size of a sent object in bytes, or 0 if unknown, as for a sparse tensor.

    The size of a model is that of its tensors with these names.
    """
    try:
        if isinstance(y, BYTES):
            return memoryview(y).nbytes
        if names and not hasattr(y, "nbytes"):
            tensors = y if isinstance(y, Mapping) and all(name in y for name in names) else named_tensors(y)
            size = int(sum([tensors[name].nbytes for name in names if name in tensors]))
        else:
            size = int(getattr(y, "nbytes", 0))
    except Exception:  # the object's class may raise anything
        return 0
    return size if 0 <= size < 2**53 else 0


def bytes_sent(update: Update, names: Collection[str]) -> int:
    """Return the bytes of an update's vectors as sent, or 0 if unknown. ``names`` are those of the layout."""
    sent = [bytes_of(one, names) for one in (update.value, update.control) if one is not None]
    return sum(sent) if all(sent) else 0


def immutable_copy(y: Any, device: str) -> Any:
    """Return a vector of ``read_vector``, tensors, or None; the caller's mutable memory is copied to the device.

    On a ``FileMemory``, immutable memory is copied to a file too.
    """
    if y is None or isinstance(y, Bfloat16Array):
        return y
    if isinstance(y, list):
        return [immutable_copy(piece, device) for piece in y]
    if isinstance(y, SlicedVector):
        return y.kept()
    if isinstance(device, FileMemory) and isinstance(y, np.ndarray):
        return y if device_of(y) is device else copied(y, device=device)
    if device != CPU and device_of(y) == device:
        return joined_float32([y], device)  # a deep copy of torch's view would copy all that the view is of
    if core.are_immutable([y]):
        return y
    return copied(y) if isinstance(y, np.ndarray) else _copy_of(y)


def _copy_of(y: Any) -> Any:
    """Return a copy of an array; a deep copy of torch's view would copy all that the view is of."""
    return y.clone() if hasattr(y, "clone") else deepcopy(y)


def digest_of_numbers(vector: Any) -> str:
    """Return the BLAKE2b-256 digest of a vector, or of ``Layout.pieces``, as little-endian float32 in layout order."""
    digest = blake2b(digest_size=32)
    for part in vector if isinstance(vector, list) else [vector]:
        for span in () if part is None else spans(len(part), 8):
            digest.update(np.ascontiguousarray(to_host(in_float32(part[span])), "<f4").view(np.uint8).data)
    return digest.hexdigest()


def digest_of_text(text: str) -> str:
    """Return the BLAKE2b-256 digest of a document."""
    return blake2b(text.encode(), digest_size=32).hexdigest()


# Updates that arrive in pieces.


CONTROL = "control"
BYTES = bytes, bytearray, memoryview


MOST_REPLACED = 100
"""How many open updates a client may replace in a round by beginning another one."""


class Staging:
    """Memory for updates that arrive in pieces: ``most`` vectors in memory, and further ones in unlinked files.

    Args:
        pool: the vectors in memory. Those of a ``FileMemory`` are in files already, so all come from the pool.
        folder: the folder of the files. Default: the system's folder for temporary files.

    Attributes:
        begun: the last update that each client began.
    """

    def __init__(self, pool: BufferPool, most: int, folder: str | os.PathLike[str] | None) -> None:
        self._pool, self._most, self._folder = pool, most, folder
        self._used: list[ref[Any]] = []
        self.begun: dict[ClientId, ref[Incoming]] = {}
        self._replaced: dict[ClientId, int] = {}  # how often each client replaced an open update

    def make_room(self, client: ClientId, most: int) -> None:
        """Abandon the client's open update, if any; raise RoundError if it may not begin a further one."""
        if (begun := self.begun.get(client)) and (before := begun()) and before.is_open:
            if self._replaced.get(client, 0) >= MOST_REPLACED:
                raise RoundError(f"client {client!r}: it has replaced {MOST_REPLACED} open updates in this round")
            self._replaced[client] = self._replaced.get(client, 0) + 1
            before.abandon()
        if len(self.begun) >= most:
            self.begun = {one: begun for one, begun in self.begun.items() if (i := begun()) and i.is_open}
            if len(self.begun) >= most:
                raise RoundError(f"client {client!r}: {most} updates are open; begin it later, or raise max_open")

    def get(self) -> F32:
        """Return an uninitialised vector of the pool's length; raise StoreError if the disk is full."""
        self._used = [one for one in self._used if one() is not None]
        if len(self._used) < self._most or self._pool.is_in_files:
            vector = self._pool.get()
            self._used.append(ref(vector.base))
            return vector
        from tempfile import gettempdir  # slow to import

        folder = gettempdir() if self._folder is None else str(self._folder)
        return np.frombuffer(map_file(folder, max(4 * self._pool.length, 1), mmap), np.float32)


class Incoming:
    """One client's update that arrives in pieces, from ``Round.begin``. It counts as a whole or not at all.

    A tensor keeps the dtype in which it arrives until ``done``.

    >>> import numpy as np
    >>> from fedcore import Server
    >>> server = Server({"w": np.zeros(4, np.float32)}, "FedAvg", clients=2, lr=0.1)
    >>> with server.open_round() as round:
    ...     incoming = round.begin(0, steps=5, examples=30)
    ...     incoming.write("w", np.float32([3, 4]), start=2)
    ...     incoming.write("w", np.float32([1, 2]))
    ...     incoming.done()
    Reply('held')
    >>> server.x
    array([1., 2., 3., 4.], dtype=float32)
    """

    def __init__(self, layout: Layout, claims: Update, vector: F32, control: F32 | None, round: Any) -> None:
        self._layout, self._claims, self._round = layout, claims, round  # a ``Round``, whose module imports this one
        self._vector: F32 | None = vector
        self._control = control
        places = {piece.name: slice(piece.start, piece.stop) for piece in layout.slices if piece.stop <= len(vector)}
        if control is not None and CONTROL in places:
            raise RangeError("begin: the model has a tensor named 'control', like the second vector; use Round.add")
        self._tensors = {name: _StagedTensor(name, vector[place]) for name, place in places.items()}
        self._second = None if control is None else _StagedTensor(CONTROL, control)
        self._outside: dict[str, npt.NDArray[Any]] = {}

    def write(
        self, name: str, chunk: Any, start: int = 0, *, scales: Any = None, block: int | None = None, at: Any = None
    ) -> None:
        """Copy a part of a tensor; parts may arrive in any order.

        Args:
            name: the tensor's name, or "control" for the second vector of methods that need one.
            chunk: floats of NumPy, torch or DLPack, in C order, on any device; int8 codes with ``scales``; or a whole
                tensor that is not averaged.
            start: the index of the chunk's first element in the flat tensor.
            scales: a float32 for each ``block`` codes. An element is its code times its scale, rounded to float32.
            block: the number of codes that share a scale; the last scale may have fewer. Default: the whole chunk.
            at: the indices of the chunk's elements in the flat tensor, each once, in place of ``start``. All other
                elements are zero, so the ``kind`` must be "delta" or "gradient", and the tensor has no other parts.

        Raises:
            RoundError: the update is done or abandoned, or the round is closed.
            UnknownNameError: the model has no such tensor.
            RangeError, ShapeError, DtypeError: the chunk is not an array of floats or codes, does not fit its scales or
                indices, lies outside the tensor, or overlaps a part that was written before; nothing was written.
        """
        self._require_open()
        start = check_integer("start", start, 0, 2**53)
        if name in {piece.name for piece in self._layout.outside}:
            if start or name in self._outside:
                raise RangeError(f"{name}: the tensor is not averaged; send it once, as a whole")
            self._outside[name] = _copy_of(own_class(name, chunk))
            return
        tensor = self._tensors.get(name, self._second if name == CONTROL else None)
        if tensor is None:
            raise UnknownNameError.of("tensor", name, self._tensors)
        codes = _read_codes(name, chunk, scales, block, self._layout)
        if at is None:
            tensor.write(codes, start)
        elif start:
            raise RangeError(f"start={start}: indices of at=... count from the tensor's first element; leave start out")
        elif self._claims.kind == "model":
            raise RangeError(f"{name}: at=... means zeros elsewhere; begin the update with kind='delta'")
        else:
            tensor.scatter(codes, at)

    def done(self) -> Reply:
        """Add the update to the round as ``Round.add`` does, or reject it if a part is missing.

        Returns:
            Whether the update is accepted so far or a copy, and if not, why.

        Cost: a tensor that did not arrive in float32 is converted in place.
        """
        vector, control, tensors, second = self._require_open(), self._control, self._tensors, self._second
        whole, claims = len(tensors), self._claims
        self.abandon()
        if self._layout.groups and claims.kind != "gradient":
            tensors = {name: tensor for name, tensor in tensors.items() if tensor.is_written}
        due = [*tensors.values(), *([] if second is None else [second])]
        if missing := [tensor.name for tensor in due if tensor.size < len(tensor.memory)]:
            reason = f"update: parts are missing of {shown_names(missing)}"
            self._round.reject(claims.client, reason)
            return Reply("rejected", reason)
        for tensor in due:
            tensor.decode()
        value: Any = vector
        if self._outside or len(tensors) < whole:
            named = self._layout.unflatten(vector)
            value = {name: named[name] for name in tensors} | self._outside
        replies: list[Reply] = self._round.add_batch([claims._replace(value=value, control=control, keep=True)])
        return replies[0]

    def abandon(self) -> None:
        """Drop the update, which leaves no trace."""
        self._vector = self._control = self._second = None
        self._tensors = {}

    @property
    def is_open(self) -> bool:
        """Whether the update is neither done nor abandoned."""
        return self._vector is not None

    def _require_open(self) -> F32:
        if self._vector is None:
            raise RoundError("incoming: the update is done or abandoned, or its client began another; begin a new one")
        if not self._round.is_open:
            raise RoundError("incoming: its round is finished or aborted; begin the update in a new round")
        return self._vector


class _Codes(NamedTuple):
    """Numbers as they arrive: float32, the bits of 16-bit floats, or int8 with a scale for each block."""

    kind: str
    numbers: npt.NDArray[Any]
    scales: F32 | None = None
    block: int = 1

    def decode(self, out: F32, first: int = 0) -> None:
        """Write the numbers as float32; ``first`` is the position of the first one among all that have these scales."""
        if self.scales is not None:
            for at in range(0, len(out), PART):
                part, numbers = out[at : at + PART], self.numbers[at : at + PART]
                scales = self.scales[np.arange(first + at, first + at + len(part)) // self.block]
                with np.errstate(all="ignore"):  # the round rejects an update that is not finite
                    np.multiply(numbers, scales, out=part)
        elif self.kind in NARROW:
            core.dequantise(self.numbers, None, NARROW[self.kind], out)
        else:
            copy_into(out, self.numbers)


@raises_fedcore_errors
def _read_codes(name: str, chunk: Any, scales: Any, block: int | None, layout: Layout) -> _Codes:
    """Return a part of a tensor, flat; check it with its scales."""
    chunk, scales = own_class(name, chunk), own_class("scales", scales)
    if scales is None:
        if block is not None:
            raise RangeError(f"{name}: block={short_repr(block)} is for codes; pass their scales, or leave block out")
        is_plain = isinstance(chunk, BYTES)
        shape = () if is_plain else tuple(getattr(chunk, "shape", ()))
        size = memoryview(chunk).nbytes // 4 if is_plain else math.prod(shape)
        part = as_vector(name, chunk, size, shape, device=device_of(chunk))
        if part is None:
            raise DtypeError(f"{name}: expected an array of floats, got {type(chunk).__name__}")
        kind = dtype_name(part)
        layout.log_rounded({name: part})
        if kind not in NARROW or device_of(part) != CPU:
            return _Codes("float32", in_float32(part))
        if isinstance(part, Bfloat16Array):
            return _Codes(kind, part.codes)
        bits = part if isinstance(part, np.ndarray) else part.view(import_module("torch").int16).numpy()
        return _Codes(kind, bits.view(np.uint16))
    if not hasattr(chunk, "dtype"):
        raise DtypeError(f"{name}: expected an array of int8 codes with scales, got {type(chunk).__name__}")
    numbers = as_array(name, chunk).reshape(-1)
    factors = np.array(as_array("scales", scales) if hasattr(scales, "dtype") else own_classes("scales", scales))
    if numbers.dtype != np.int8 or factors.dtype != np.float32:
        raise DtypeError(f"{name}: expected int8 codes with float32 scales, got {numbers.dtype} with {factors.dtype}")
    most = max(len(numbers), 1)
    block = most if block is None else min(check_integer("block", block, 1), most)
    if factors.size != (due := -(-len(numbers) // block)):
        raise ShapeError(
            f"{name}: {len(numbers):,} codes in blocks of {block} need {due:,} scales, got {factors.size:,}"
        )
    return _Codes("int8", numbers, factors.reshape(-1), block)


class _StagedTensor:
    """A tensor of an update that arrives in pieces.

    ``memory`` is float32[size]. Codes are at its start until ``decode``, so that only their pages are touched.
    """

    def __init__(self, name: str, memory: F32) -> None:
        self.name, self.memory, self.size = name, memory, 0
        self._kind: str | None = None
        self._parts: list[tuple[int, _Codes]] = []  # each with its start, in order
        self._scattered: tuple[npt.NDArray[np.int64], _Codes] | None = None
        self.is_written = False

    def write(self, codes: _Codes, start: int) -> None:
        """Copy a part to its place."""
        stop = start + len(codes.numbers)
        if stop > len(self.memory):
            raise ShapeError(f"{self.name}: elements {start} to {stop} lie outside the tensor of {len(self.memory):,}")
        i = bisect_left(self._parts, start, key=itemgetter(0))
        before = self._parts[i - 1][0] + len(self._parts[i - 1][1].numbers) if i else 0
        if self._scattered or before > start or (i < len(self._parts) and self._parts[i][0] < stop):
            raise RangeError(f"{self.name}: elements {start} to {stop} were written before")
        if self._kind not in (None, codes.kind):
            self.decode()  # parts of several dtypes
        if self._kind in (None, codes.kind):
            self._kind, room = codes.kind, self.memory.view(codes.numbers.dtype)[start:stop]
            copy_into(room, codes.numbers)
            codes = codes._replace(numbers=room)
        else:
            room = self.memory[start:stop]
            codes.decode(room)
            codes = _Codes("float32", room)
        if stop > start:
            self._parts.insert(i, (start, codes))
        self.size, self.is_written = self.size + stop - start, True

    def scatter(self, codes: _Codes, at: Any) -> None:
        """Keep the elements at some indices; the others are zero."""
        indices = numbers(f"{self.name}, at", at)
        indices = indices if indices.size else indices.astype(np.int64)
        if indices.dtype.kind not in "iu" or indices.shape != codes.numbers.shape:
            raise ShapeError(f"{self.name}: at must have an integer for each of {len(codes.numbers):,} elements")
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self.memory):
            raise RangeError(f"{self.name}: an index is outside the tensor of {len(self.memory):,} elements")
        if self.size or len(np.unique(indices)) < len(indices):
            raise RangeError(f"{self.name}: an element was written twice; send a tensor's indices in one part")
        self._scattered = indices, codes._replace(numbers=codes.numbers.copy())
        self.size, self.is_written = len(self.memory), True

    def decode(self) -> None:
        """Convert what was written to float32, in place, from the end: an element only moves towards the end."""
        if self._scattered is not None:
            indices, codes = self._scattered
            numbers = empty(len(indices))
            codes.decode(numbers)
            set_to_zero(self.memory)
            self.memory[indices] = numbers
        if self._kind not in (None, "float32"):
            for start, codes in reversed(self._parts):
                for first in reversed(range(0, len(codes.numbers), PART)):
                    part = codes.numbers[first : first + PART].copy()
                    out = self.memory[start + first : start + first + len(part)]
                    core.count_bytes(part.nbytes + out.nbytes)
                    codes._replace(numbers=part).decode(out, first)
        self._kind = "float32"
