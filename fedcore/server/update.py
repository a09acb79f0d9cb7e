"""The update that a client sends back, and its vectors as the kernels take them."""

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from functools import wraps
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from fedcore import devices, kernels
from fedcore.arguments import reason_of
from fedcore.clients import ClientId
from fedcore.errors import ArrayError, DtypeError, FedcoreError, RangeError, ShapeError
from fedcore.layout import Layout
from fedcore.libraries import dtype_name, is_own_class, own_class, read_leaf
from fedcore.memory import copied, empty, to_host
from fedcore.native import core
from fedcore.representation import shown

Kind = Literal["model", "delta", "gradient"]
DTYPES = ("float32", "float64", "float16", "bfloat16")

P = ParamSpec("P")
R = TypeVar("R")


class Update(NamedTuple):
    """One client's result: the arguments of ``Round.add``, for the batch form ``Server.round``.

    Attributes:
        client: a registered id.
        model: y, the client's model after its local steps: float32[n] in CPU memory or on the server's device, or a
            model that the server's layout fits. Or, in its place, exactly one of ``delta`` and ``gradient``.
        steps: K_i, the local steps that the client really did; 0, which nobody did, is refused.
        examples: n_i, its number of examples, or another positive measure of its data; None if it gives none. In a
            round in which no client gives a number all weigh the same; if some give one, the updates without are
            rejected (methods that weigh by examples).
        lr: eta_i, the rate of its steps, or their mean where the rate changes from step to step; None for the rate that
            was broadcast. Another one needs ``Server(own_rates=True)``.
        control: float32[n_parameters], the second vector of the methods that ask for one: the mean of the client's
            gradients before any correction, or its change where the client keeps its row.
        count: how many times the client was drawn (sampling with replacement).
        round: the round whose x the client started from; None for the open one. An earlier one is a late reply, which
            is measured against the x of then (``Server(late_rounds=)``).
        delta: the difference y - x, in the forms of a model.
        gradient: float32[n_parameters], the mean gradient of the client's steps.
        keep: the caller promises not to change the vectors until the round is finished, so that the round may hold them
            and fold several in one pass. ``bytes``, arrays over ``bytes``, and what ``Round.buffer`` lent are held
            without the promise; any other buffer is folded at once and may then be used again.
        weight: >= 0, the caller's weight of this update in the place of n_i, for methods that weigh by examples; None
            for n_i. No limit of claims applies to it.
    """

    client: ClientId
    model: Any = None
    steps: int = 0
    examples: float | None = None
    lr: float | None = None
    control: Any = None
    count: int = 1  # type: ignore[assignment]  # in the place of tuple.count, which nobody misses
    round: int | None = None
    delta: Any = None
    gradient: Any = None
    keep: bool = False
    weight: float | None = None

    def __repr__(self) -> str:
        usual = self._field_defaults
        told = {name: value for name, value in self._asdict().items() if value is not usual.get(name, self)}
        return f"Update({', '.join(f'{name}={shown(value)}' for name, value in told.items())})"

    @property
    def sent(self) -> tuple[Kind, Any]:
        """The one of the three that came, under its name."""
        if self.delta is not None:
            return "delta", self.delta
        return ("model", self.model) if self.gradient is None else ("gradient", self.gradient)

    def check_one(self) -> None:
        """Refuse what is more than one of the three; none of them is a model that did not come.

        Raises:
            RangeError: it is more.
        """
        if self.delta is not None or self.gradient is not None:
            given = [name for name in get_args(Kind) if getattr(self, name) is not None]
            if len(given) > 1:
                raise RangeError(f"model, delta, gradient: expected one of them, got {' and '.join(given)}")


def held_together(updates: Iterable[Update], most: int) -> Iterator[list[Update]]:
    """The updates in their order, those that may be kept up to ``most`` at a time, in one list that is used again."""
    some: list[Update] = []
    for update in updates:
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
def read_vector(update: Update, layout: Layout, *, apart: bool, device: str = devices.CPU) -> tuple[Any, bool]:
    """Read what an update sent; say whether nobody can change it: made here, or of memory that is read-only for good.

    It is one vector or, if y is a model of named tensors, a list of them in the layout's order; views of the client's
    memory, except where no float32 may lie, as the payload of a message can.

    Args:
        apart: whether tensors may stay apart; otherwise they are copied into one vector.
        device: the server's, where vectors may lie too.

    Raises:
        FedcoreError: it has the wrong type, dtype, shape or names.
    """
    kind, y = update.sent
    n = layout.n_parameters if kind == "gradient" else layout.n
    one_tensor = layout.slices[0].shape if len(layout.slices) == 1 else None
    vector = as_vector(kind, y, n, one_tensor, device=device)
    if vector is None:
        if not apart:
            return layout.flatten(y, None if device == devices.CPU else empty(layout.n, device=device)), True
        pieces = layout.pieces(y, device=device)
        return pieces, core.are_immutable(pieces)
    if isinstance(vector, np.ndarray) and not vector.flags.aligned:
        return copied(vector), True
    return vector, core.are_immutable([vector])


@reads_sent
def as_vector(name: str, y: Any, n: int, shape: tuple[int, ...] | None = None, *, device: str = devices.CPU) -> Any:
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
        if device != devices.CPU and devices.of(y) == device:
            return y  # of this process's own code: a copy there would cost a wait for each reply
        return _in_float32_there(y, n, devices.CPU)  # read once: the next time it may export another
    return y


def in_float32(y: Any) -> npt.NDArray[np.float32]:
    """A vector that ``as_vector`` accepted, in float32 and in host memory: itself or a copy."""
    if (device := devices.of(y)) != devices.CPU:
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
    kind, y = update.sent
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
        if (where := devices.of(y)) == device != devices.CPU:
            return y
        if where != devices.CPU:
            raise BufferError(f"got one on {getattr(y, 'device', where)}")
        return y if dtype == "bfloat16" else np.from_dlpack(y)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        there = "" if device == devices.CPU else f" or on {device}"
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
    if devices.is_device_array(y):
        return copied(y)
    return y if core.are_immutable([y]) else deepcopy(y)
