"""A client's update, and how a round reads it."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import wraps
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.arguments import reason_of
from fedcore.arrays import (
    CPU,
    F32,
    NARROW,
    copied,
    device_of,
    dtype_name,
    empty,
    freeze,
    is_device_array,
    is_own_class,
    own_class,
    read_leaf,
    to_host,
)
from fedcore.errors import ArrayError, DtypeError, FedcoreError, RangeError, ShapeError
from fedcore.kernels import Codes, dequantise, quantise
from fedcore.model import Layout
from fedcore.native import core
from fedcore.profiling import timed
from fedcore.representation import shown
from fedcore.store.registry import ClientId
from fedcore.store.slots import checksums

# A vector in slices, one for each shard of a server: arrays, or references to arrays that are elsewhere.


@dataclass(frozen=True)
class Slices:
    """A client's vector as shards take it: it stands in an ``Update`` in the place of the whole.

    Attributes:
        parts: for each of ``Server.ranges`` float32[stop - start], or up to ``end`` where there are no buffers in it;
            or references to such (``ray.ObjectRef``).
        digests: ``digest_of`` each part, as whoever had the whole has made them; None where nobody did.
    """

    parts: Sequence[Any]
    digests: Sequence[str] | None = None

    def require(self, name: str, shards: int) -> None:
        """Refuse slices of another server.

        Raises:
            RangeError: they, or their digests, are not as many as there are shards.
        """
        for what, given in (("slice", self.parts), ("digest", self.digests)):
            if given is not None and len(given) != shards:
                raise RangeError(f"{name}: expected a {what} for each of {shards} shards, got {len(given)}")


@dataclass(frozen=True)
class SentSlices:
    """The vectors of a broadcast, for workers that read them where they are: references, one for each shard.

    Attributes:
        ranges: (start, stop, end) of each shard: it has the elements [start, stop) of x, [start, end) of an offset.
        x, x_prev: of the models; x_prev is None where there is none.
        offset: of a client's offset, made when it is asked for.
    """

    ranges: Sequence[tuple[int, int, int]]
    x: Sequence[Any]
    x_prev: Sequence[Any] | None
    offset: Callable[[ClientId], Sequence[Any]]


def digest_of(vector: Any) -> str:
    """The digest of a slice, by which its shard knows that it is of the vector that the others have slices of.

    Cost: reads the slice once, near the speed of a plain sum.
    """
    array = np.ascontiguousarray(vector)
    return hashlib.blake2b(checksums(array).tobytes(), digest_size=16).hexdigest()


# The model as clients get it: a difference is measured from what was sent, not from what the server keeps.


def as_sent(layout: Layout, x: F32) -> F32:
    """x, float32[n], rounded to the model's dtypes, ties to even; itself where all are float32.

    Cost: nothing, or reads 4 n bytes and writes 4 n.
    """
    if not layout.narrow:
        return x
    sent = copied(x)
    codes = empty(max(piece.stop - piece.start for piece in layout.narrow), np.uint16, device=device_of(x))
    for piece in layout.narrow:
        part = sent[piece.start : piece.stop]
        coded = Codes(NARROW[piece.dtype], codes[: len(part)])
        dequantise(quantise(part, coded.codec, out=coded), out=part)
    freeze(sent)
    return sent


# The update that a client sends back, and its vectors as the kernels take them.


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
            model that the server's layout fits; or what ``kind`` says.
        steps: K_i, the local steps that the client did; 0 is rejected.
        examples: n_i, its number of examples, or another positive measure of its data. Default: none. In a round in
            which no client gives a number all weigh the same; if some give one, the updates without are rejected
            (methods that weigh by examples).
        lr: eta_i, the rate of its steps, or their mean where the rate changes from step to step. Default: the rate that
            was broadcast. Another one needs ``Limits(max_client_lr=...)``.
        control: float32[n_parameters], the second vector of the methods that ask for one: the mean of the client's
            gradients before any correction, or its change where the client keeps its row.
        count: how many times the client was drawn (sampling with replacement).
        round: the round whose x the client started from. Default: the open one. A late update is measured against the x
            that it started from (``Server(max_staleness=...)``).
        kind: "model"; "delta", the difference y - x in the forms of a model; or "gradient", float32[n_parameters], the
            mean gradient of the client's steps.
        keep: the caller promises not to change the vectors until the round is finished, so that the round may hold them
            and fold several in one pass. ``bytes``, arrays over ``bytes``, and what ``Round.buffer`` lent are held
            without the promise; any other buffer is folded at once and may then be used again.
        weight: >= 0, the caller's weight of this update in place of n_i, for methods that weigh by examples. No limit
            of examples applies to it. Default: n_i.
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

    def __repr__(self) -> str:
        usual = self._field_defaults
        told = {name: value for name, value in self._asdict().items() if value is not usual.get(name, self)}
        return f"Update({', '.join(f'{name}={shown(value)}' for name, value in told.items())})"


def held_together(updates: Iterable[Update], most: int) -> Iterator[list[Update]]:
    """The updates in their order, those that may be kept up to ``most`` at a time, in one list that is used again."""
    some: list[Update] = []
    for update in timed("clients", iter(updates)):
        some.append(update)
        if len(some) == most or not update.keep:
            yield some
            some.clear()  # not a new list: whoever took this one may still have it, with all its arrays
    if some:
        yield some


def reads_sent(read: Callable[P, R]) -> Callable[P, R]:
    """A function that reads what was sent, and so raises FedcoreErrors alone: its class may raise anything."""

    @wraps(read)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return read(*args, **kwargs)
        except FedcoreError:
            raise
        except Exception as error:
            raise ArrayError(reason_of(error)) from None

    return guarded


@reads_sent
def read_vector(update: Update, layout: Layout, *, apart: bool, device: str = CPU) -> tuple[Any, bool]:
    """Read what an update sent; say whether nobody can change it: made here, or of memory that is read-only for good.

    It is one vector or, if y is a model of named tensors, a list of them in the layout's order; views of the client's
    memory, except where no float32 may lie, as the payload of a message can.

    Args:
        apart: whether tensors may stay apart; otherwise they are copied into one vector.
        device: the server's, where vectors may lie too.

    Raises:
        FedcoreError: it has the wrong type, dtype, shape or names.
    """
    kind, y = update.kind, update.value
    n = layout.n_parameters if kind == "gradient" else layout.n
    one_tensor = layout.slices[0].shape if len(layout.slices) == 1 else None
    vector = as_vector(kind, y, n, one_tensor, device=device)
    if vector is None:
        if not apart:
            return layout.flatten(y, None if device == CPU else empty(layout.n, device=device)), True
        pieces = layout.pieces(y, device=device)
        return pieces, core.are_immutable(pieces)
    if isinstance(vector, np.ndarray) and not vector.flags.aligned:
        return copied(vector), True
    return vector, core.are_immutable([vector])


@reads_sent
def as_vector(name: str, y: Any, n: int, shape: tuple[int, ...] | None = None, *, device: str = CPU) -> Any:
    """A flat vector of n floats as the kernels take it, or None if it is no array at all.

    Args:
        shape: another shape that will do; it is read in C order.
        device: where it may lie, if not in host memory.

    Raises:
        DtypeError, ShapeError: it is an array, but not of n floats.
    """
    if isinstance(y, bytes | bytearray | memoryview):
        return _from_buffer(name, y, n)
    y = read_leaf(own_class(name, y))
    if not hasattr(y, "__dlpack__"):
        return None
    dtype = dtype_name(y)
    try:
        got = f"got {dtype}{list(y.shape)}"
    except RuntimeError:  # a nested tensor has no shape
        raise DtypeError(f"{name}: expected float32[{n}], got a tensor without a shape") from None
    if dtype not in DTYPES:
        raise DtypeError(f"{name}: expected float32[{n}], {got}")
    if not isinstance(y, np.ndarray):
        y = _in_memory(name, y, n, dtype, device)
        if isinstance(y, np.ndarray) and dtype_name(y) not in DTYPES:
            raise DtypeError(f"{name}: expected float32[{n}], {got}, whose memory holds {y.dtype}")
    if not _is_contiguous(y):
        raise ShapeError(f"{name}: expected float32[{n}], {got} that is not contiguous")
    if tuple(y.shape) not in ((n,), shape):
        raise ShapeError(f"{name}: expected float32[{n}], {got}")
    y = y if tuple(y.shape) == (n,) else y.reshape(-1)
    if not is_own_class(y):
        if device != CPU and device_of(y) == device:
            return y  # of this process's own code: a copy there would cost a wait for each reply
        return _in_float32_there(y, n, CPU)  # read once: the next time it may export another
    return y


def in_float32(y: Any) -> npt.NDArray[np.float32]:
    """A vector that ``as_vector`` accepted, in float32 and in host memory: itself or a copy."""
    if (device := device_of(y)) != CPU:
        return to_host(_in_float32_there(y, len(y), device))
    if isinstance(y, np.ndarray):
        return np.asarray(y, np.float32)
    return np.asarray(np.from_dlpack(y.float()), np.float32)  # bfloat16


def first_not_finite(y: Any, layout: Layout) -> str | None:
    """The name of the first tensor with a number that is not finite; None where all are, in float32.

    Args:
        y: a vector that ``as_vector`` accepted, or the layout's pieces; of a gradient, the parameters.
    """
    for index, piece in enumerate(layout.slices):
        part = y[index] if isinstance(y, list) else y[piece.start : piece.stop]
        if len(part) and not kernels.all_finite([in_float32(part)])[0]:
            return piece.name
    return None


def _in_float32_there(y: Any, n: int, device: str) -> Any:
    """A copy of a vector, in float32 and on its own device."""
    copy = empty(n, device=device)
    kernels.accumulate(None, [None], [y], np.array([-1.0]), np.ones(1), out=copy)
    return copy


@reads_sent
def read_counters(update: Update, layout: Layout) -> dict[str, npt.NDArray[Any]]:
    """An update's counters and constants as they were sent; none from a flat vector or a gradient, which have none."""
    kind, y = update.kind, update.value
    if not layout.outside or kind == "gradient" or isinstance(y, bytes | bytearray | memoryview):
        return {}
    return {} if hasattr(y, "__dlpack__") else layout.read_counters(y)


def _from_buffer(name: str, y: bytes | bytearray | memoryview, n: int) -> npt.NDArray[np.float32]:
    plain = memoryview(y)
    if plain.format not in ("B", "f") or not plain.c_contiguous or plain.nbytes != 4 * n:
        raise DtypeError(
            f"{name}: expected {4 * n} bytes of float32[{n}], got {plain.nbytes} bytes of format {plain.format!r}"
        )
    return np.frombuffer(plain, np.float32)


def _in_memory(name: str, y: Any, n: int, dtype: str, device: str) -> Any:
    """A foreign array as NumPy's; one on the device, or of bfloat16, of which NumPy has none, as it is."""
    try:
        if (where := device_of(y)) == device != CPU:
            return y
        if where != CPU:
            raise BufferError(f"got one on {getattr(y, 'device', where)}")
        return y if dtype == "bfloat16" else np.from_dlpack(y)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        there = "" if device == CPU else f" or on {device}"
        raise DtypeError(f"{name}: expected float32[{n}] in CPU memory{there}: {error}") from None


def _is_contiguous(y: Any) -> bool:
    if hasattr(y, "is_contiguous"):
        return bool(y.is_contiguous())
    return bool(y.flags.c_contiguous) if hasattr(y, "flags") else True  # one of this package's own


def bytes_of(y: Any) -> int:
    """The bytes of what a client sent, 0 where they cannot be told: a sparse tensor has no one array of them."""
    try:
        said = int(getattr(y, "nbytes", 0))
    except Exception:  # whatever the class of what came says
        return 0
    return said if 0 <= said < 2**53 else 0


def lasting(y: Any) -> Any:
    """A vector that ``read_vector`` gave, or tensors, or None: itself where nobody can change it, else a copy."""
    if y is None:
        return None
    if isinstance(y, list):
        return [lasting(piece) for piece in y]
    if is_device_array(y):
        return copied(y)
    return y if core.are_immutable([y]) else deepcopy(y)


def digest_of_numbers(vector: Any) -> str:
    """The BLAKE2b-256 digest of a vector, or of ``Layout.pieces``, as little-endian float32 in the layout's order."""
    digest = blake2b(digest_size=32)
    for part in vector if isinstance(vector, list) else [vector]:
        digest.update(np.ascontiguousarray(to_host(in_float32(part)), "<f4").reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def digest_of_text(text: str) -> str:
    """The BLAKE2b-256 digest of a document."""
    return blake2b(text.encode(), digest_size=32).hexdigest()
