"""What a client sends back, and whether it can be believed."""

from dataclasses import dataclass
from reprlib import repr as short_repr
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from fedcore.errors import DtypeError, RangeError, ShapeError
from fedcore.layout import Layout
from fedcore.store import ClientId

Kind = Literal["model", "delta", "gradient"]
KINDS: tuple[str, ...] = get_args(Kind)
FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class Update:
    """One client's result: the arguments of ``Round.add``, for the batch form ``Server.round``.

    Attributes:
        client: a registered id.
        y: float32[n] in CPU memory, or a model that the server's layout fits. By ``kind``: the client's model after
            its local steps, its difference y - x, or the mean gradient of its steps (float32[n_parameters]).
        steps: K_i, the local steps that the client really did.
        examples: n_i, its number of examples.
        lr: eta_i, the rate of its steps; None for the rate that was broadcast.
        count: how many times the client was drawn (sampling with replacement).
        round: the round whose x the client started from; None for the open one.
        kind: what ``y`` is.
        keep: the caller promises not to change ``y`` until the round is finished, so that the round may hold it and
            fold several updates in one pass. ``bytes``, and arrays over ``bytes``, are held without the promise; any
            other buffer is folded at once and may then be used again.
    """

    client: ClientId
    y: Any
    steps: int
    examples: int = 1
    lr: float | None = None
    count: int = 1
    round: int | None = None
    kind: Kind = "model"
    keep: bool = False


@dataclass(frozen=True)
class Limits:
    """What a client may claim; an update that claims more is refused."""

    steps: int
    examples: int
    lr: float


def read_vector(update: Update, layout: Layout) -> tuple[npt.NDArray[np.float32], bool]:
    """An update's y as one float32 vector, and whether it was made here, so that nobody else can change it.

    The vector is a view of the client's memory, unless y is a model of named tensors.

    Raises:
        FedcoreError: y has the wrong type, dtype, shape or names.
    """
    y, n = update.y, layout.n_parameters if update.kind == "gradient" else layout.n
    if isinstance(y, bytes | bytearray | memoryview):
        y = _from_buffer(y, n)
    elif not isinstance(y, np.ndarray) and hasattr(y, "__dlpack__"):
        try:
            y = np.from_dlpack(y)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise DtypeError(f"y: expected float32[{n}] in CPU memory: {error}") from None
    if not isinstance(y, np.ndarray):
        return layout.flatten(y), True
    if y.dtype != FLOAT32:
        raise DtypeError(f"y: expected float32[{n}], got {y.dtype}{list(y.shape)}")
    if not y.flags.c_contiguous:
        raise ShapeError(f"y: expected float32[{n}], got {y.dtype}{list(y.shape)} that is not contiguous")
    if y.shape != (n,):
        if len(layout.slices) != 1 or y.shape != layout.slices[0].shape:  # a model of one tensor may come as it is
            raise ShapeError(f"y: expected float32[{n}], got {y.dtype}{list(y.shape)}")
        y = y.reshape(-1)
    return y, False


def read_counters(update: Update, layout: Layout) -> dict[str, npt.NDArray[np.integer[Any]]]:
    """An update's integer counters; none from a flat vector, a difference or a gradient, which say nothing of them."""
    if not layout.counters or update.kind != "model" or isinstance(update.y, bytes | bytearray | memoryview):
        return {}
    return {} if hasattr(update.y, "__dlpack__") else layout.read_counters(update.y)


def read_lr(update: Update, broadcast: float, limits: Limits, round: int) -> float:
    """The rate of a client's steps, once all numbers that it sent can be believed.

    Raises:
        RangeError: one cannot.
    """
    if not is_integer(update.steps, 1, limits.steps):
        raise RangeError(f"steps: expected an integer in 1..{limits.steps}, got {shown(update.steps)}")
    if not is_integer(update.examples, 1, limits.examples):
        raise RangeError(f"examples: expected an integer in 1..{limits.examples}, got {shown(update.examples)}")
    if update.round is not None and not is_integer(update.round, round, round):
        raise RangeError(f"round: expected {round}, the open one, got {shown(update.round)}")
    if update.lr is None:
        return broadcast
    is_number = isinstance(update.lr, float | int | np.floating | np.integer) and not isinstance(update.lr, bool)
    if not is_number or not 0 < update.lr <= limits.lr:
        raise RangeError(f"lr: expected a number in (0, {limits.lr:g}], got {shown(update.lr)}")
    return float(update.lr)


def is_integer(value: object, low: int, high: int) -> bool:
    """Whether value is an integer, and no bool, in low..high."""
    if type(value) is int:
        return low <= value <= high
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(low <= value <= high)


def shown(value: object) -> str:
    """A value that a client sent, in few characters whatever it is."""
    try:
        return short_repr(value)
    except Exception:  # an int of too many digits, or a repr that fails
        return f"an unprintable {type(value).__name__}"


def _from_buffer(y: bytes | bytearray | memoryview, n: int) -> npt.NDArray[np.float32]:
    plain = memoryview(y)
    if plain.format not in ("B", "f") or not plain.c_contiguous or plain.nbytes != 4 * n:
        raise DtypeError(
            f"y: expected {4 * n} bytes of float32[{n}], got {plain.nbytes} bytes of format {plain.format!r}"
        )
    return np.frombuffer(y, np.float32)


def is_immutable(y: npt.NDArray[np.float32]) -> bool:
    """Whether nobody can change the memory: the chain of what y is a view of ends in bytes."""
    base: Any = y
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return isinstance(base, bytes)
