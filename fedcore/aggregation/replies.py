"""The replies of a cohort, as one table of columns: read, folded, counted and seen by the method."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.algorithms import Claims
from fedcore.clients import ClientId
from fedcore.typing import F32, F64, Bools

Counters = dict[str, npt.NDArray[np.integer[Any]]]
"""Integer buffers of a model, such as BatchNorm's counts of batches, by name."""

NONE: F64 = np.empty(0)
NO_COUNT, COUNTED, WEIGHTED = 0, 1, 2
"""Where the examples of a reply are from: nowhere (1 stands in), the client, or the server's own weight."""


@dataclass(slots=True, kw_only=True)
class Replies:
    """Updates that passed every check except the last, whether each number is finite: the fold tells that.

    Columns of k entries each: on small models a Python object a reply costs more than the fold.
    """

    clients: list[ClientId]
    vectors: list[Any]
    """floating[n], or [n_parameters] for a gradient; or a list of tensors, as the layout's slices. None once folded."""
    bases: Sequence[F32 | None]
    """float32[n], the x that the client started from; None where the vector is a difference."""
    scales: F64
    """h = (base - y) scale, or -y scale."""
    claims: Claims
    """What the clients say of their work."""
    eta_steps: F64
    """eta_i K_i, how far a gradient of length 1 goes."""
    has_buffers: Bools
    counters: Sequence[Counters]
    controls: list[Any]
    """floating[n_parameters], the second vectors; None where there are none, and once folded."""
    sources: npt.NDArray[np.int8]
    """``NO_COUNT``, ``COUNTED`` or ``WEIGHTED``."""
    starts: npt.NDArray[np.int64]
    """The round whose model each client started from."""
    digests: list[str | None]
    """Of the vectors, where rounds are audited."""
    factors: F64
    """What all of a reply's vectors are multiplied by: 1, or less if it was clipped."""
    weights: F64 = field(default_factory=lambda: NONE)
    """w_i, once the method has weighed the claims."""
    squares: F64 = field(default_factory=lambda: NONE)
    """|h_i|^2, once folded."""

    @classmethod
    def none(cls) -> "Replies":
        """No replies."""
        return cls(
            clients=[],
            vectors=[],
            bases=[],
            scales=NONE,
            claims=Claims(NONE, NONE, NONE),
            eta_steps=NONE,
            has_buffers=np.empty(0, np.bool_),
            counters=[],
            controls=[],
            sources=np.empty(0, np.int8),
            starts=np.empty(0, np.int64),
            digests=[],
            factors=NONE,
        )

    @classmethod
    def joined(cls, parts: Sequence["Replies"]) -> "Replies":
        """The replies of several tables, in their order."""
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return cls.none()
        return cls(**{column.name: _joined([getattr(part, column.name) for part in parts]) for column in fields(cls)})

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def bytes(self) -> int:
        """The bytes that the clients sent, except their counters."""
        tensors = [tensor for y in self.vectors for tensor in (y if isinstance(y, list) else [y])]
        controls = [control for control in self.controls if control is not None]
        return sum(vector.nbytes for vector in [*tensors, *controls])

    def chosen(self, which: Bools) -> "Replies":
        """The replies that ``which``, bool[k], says."""
        at = np.flatnonzero(which).tolist()
        return Replies(**{column.name: _chosen(getattr(self, column.name), which, at) for column in fields(self)})

    def ordered(self, numbers: npt.NDArray[np.int64]) -> "Replies":
        """The replies in the order of these numbers, int64[k]."""
        order = np.argsort(numbers)
        return Replies(**{one.name: _chosen(getattr(self, one.name), order, order.tolist()) for one in fields(self)})

    def clip(self, factors: F64) -> None:
        """Scale the replies by some factors, float64[k]."""
        self.factors, self.scales = factors, self.scales * factors

    def count(self, squares: F64) -> None:
        """Count the replies, which are folded: their vectors are let go.

        Args:
            squares: float64[k], |h_i|^2 before clipping.
        """
        nothing = [None] * len(self)
        self.vectors, self.bases, self.controls, self.squares = nothing, nothing, nothing, squares * self.factors**2

    def longest(self) -> str:
        """The client whose update is the longest, as the end of a message; empty if none was heard."""
        if not self.clients:
            return ""
        i = int(np.argmax(self.squares))
        return f"; the longest update is that of client {self.clients[i]!r}, {self.squares[i] ** 0.5:g}"


def _joined(columns: Sequence[Any]) -> Any:
    first = columns[0]
    if any(column is None for column in columns):
        return None  # shares and ages, which are looked up anew
    if isinstance(first, np.ndarray):
        return np.concatenate(columns)
    if isinstance(first, Claims):
        return Claims(*(_joined([getattr(claims, name.name) for claims in columns]) for name in fields(Claims)))
    return [entry for column in columns for entry in column]


def _chosen(column: Any, which: Bools | npt.NDArray[np.int64], at: Iterable[int]) -> Any:
    if column is None or (isinstance(column, np.ndarray) and not len(column)):
        return column  # not there yet
    if isinstance(column, np.ndarray):
        return column[which]
    if isinstance(column, Claims):
        return Claims(*(_chosen(getattr(column, name.name), which, at) for name in fields(Claims)))
    return [column[i] for i in at]
