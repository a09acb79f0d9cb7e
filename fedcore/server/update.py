"""What a client sends back, and whether it can be believed."""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from fedcore.errors import DtypeError, RangeError, ShapeError
from fedcore.layout import Layout
from fedcore.store import ClientId

Kind = Literal["model", "delta", "gradient"]
KINDS: tuple[str, ...] = get_args(Kind)


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


def read_vector(update: Update, layout: Layout) -> tuple[npt.NDArray[np.float32], bool]:
    """An update's y as one float32 vector, and whether the round may hold it.

    The vector is a view of the client's memory, unless y is a model of named tensors.

    Raises:
        FedcoreError: y has the wrong type, dtype, shape or names.
    """
    y, n = update.y, layout.n_parameters if update.kind == "gradient" else layout.n
    try:
        if isinstance(y, bytes | bytearray | memoryview):
            y = np.frombuffer(y, np.float32)
        elif not isinstance(y, np.ndarray) and hasattr(y, "__dlpack__"):
            y = np.from_dlpack(y)
    except (ValueError, TypeError, RuntimeError, BufferError) as error:
        raise DtypeError(f"y: expected float32[{n}] in CPU memory: {error}") from None
    if not isinstance(y, np.ndarray):
        return layout.flatten(y), True
    if y.dtype != np.float32:
        raise DtypeError(f"y: expected float32[{n}], got {y.dtype}{list(y.shape)}")
    if y.shape != (n,) or not y.flags.c_contiguous:
        got = f"{y.dtype}{list(y.shape)}" + ("" if y.flags.c_contiguous else " that is not contiguous")
        raise ShapeError(f"y: expected float32[{n}], got {got}")
    return y, update.keep or _is_immutable(y)


def check_numbers(update: Update, *, round: int, max_steps: int, max_examples: int) -> None:
    """Whether the numbers that a client sent can be believed.

    Raises:
        FedcoreError: one cannot.
    """
    if not is_integer(update.steps, 1, max_steps):
        raise RangeError(f"steps: expected an integer in 1..{max_steps}, got {update.steps!r}")
    if not is_integer(update.examples, 1, max_examples):
        raise RangeError(f"examples: expected an integer in 1..{max_examples}, got {update.examples!r}")
    if update.lr is not None and not (isinstance(update.lr, float | int | np.number) and 0 < update.lr < math.inf):
        raise RangeError(f"lr: expected a finite number > 0, got {update.lr!r}")
    if update.round is not None and update.round != round:
        raise RangeError(f"round: expected {round}, the open one, got {update.round!r}")


def is_integer(value: object, low: int, high: int) -> bool:
    """Whether value is an integer, and no bool, in low..high."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(low <= value <= high)


def _is_immutable(y: npt.NDArray[np.float32]) -> bool:
    """Whether nobody can change the memory: the chain of what y is a view of ends in bytes."""
    base: Any = y
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return isinstance(base, bytes)
