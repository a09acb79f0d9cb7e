"""The replies of a cohort that a fold takes at once."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.store import ClientId

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Counters = dict[str, npt.NDArray[np.integer[Any]]]


@dataclass(slots=True)
class Reply:
    """One update that passed every check but the last, whether each element is finite: the fold itself tells that."""

    client: ClientId
    y: Any  # floating[n], or [n_parameters] for a gradient; or a list of tensors, as the layout's slices
    base: F32 | None  # float32[n], the x that the client started from; None if y is a difference
    scale: float  # h = (base - y) scale, or -y scale
    distance: float  # eta_i K_i, how far a gradient of length 1 goes
    steps: int
    examples: int
    count: int
    has_buffers: bool
    counters: Counters
    control: Any  # floating[n_parameters], or None

    @property
    def bytes(self) -> int:
        """What the client sent, but for its counters."""
        tensors = self.y if isinstance(self.y, list) else [self.y]
        return int(sum(tensor.nbytes for tensor in tensors) + getattr(self.control, "nbytes", 0))


@dataclass(slots=True)
class Batch:
    """Replies as columns, of k entries each: on small models a Python object a reply costs more than the fold."""

    clients: list[ClientId]
    ys: list[Any]
    bases: Sequence[F32 | None]
    scales: F64
    distances: F64
    steps: F64
    examples: F64
    counts: F64
    weights: F64
    has_buffers: npt.NDArray[np.bool_]
    counters: Sequence[Counters]
    controls: list[Any]

    @classmethod
    def of(cls, replies: Sequence[Reply]) -> "Batch":
        """The columns of some replies; the weights are still to come."""

        def column(name: str) -> F64:
            return np.array([getattr(reply, name) for reply in replies], np.float64)

        return cls(
            [reply.client for reply in replies],
            [reply.y for reply in replies],
            [reply.base for reply in replies],
            column("scale"),
            column("distance"),
            column("steps"),
            column("examples"),
            column("count"),
            np.ones(len(replies)),
            np.array([reply.has_buffers for reply in replies], np.bool_),
            [reply.counters for reply in replies],
            [reply.control for reply in replies],
        )

    def __len__(self) -> int:
        return len(self.clients)

    def joined(self, later: "Batch") -> "Batch":
        """The replies, and then the later ones."""
        columns: list[Any] = []
        for column in fields(self):
            first, second = getattr(self, column.name), getattr(later, column.name)
            columns.append(np.concatenate([first, second]) if isinstance(first, np.ndarray) else [*first, *second])
        return Batch(*columns)

    def chosen(self, which: npt.NDArray[np.bool_]) -> "Batch":
        """The replies that ``which``, bool[k], says."""
        at = np.flatnonzero(which).tolist()
        return Batch(
            [self.clients[i] for i in at],
            [self.ys[i] for i in at],
            [self.bases[i] for i in at],
            self.scales[which],
            self.distances[which],
            self.steps[which],
            self.examples[which],
            self.counts[which],
            self.weights[which],
            self.has_buffers[which],
            [self.counters[i] for i in at],
            [self.controls[i] for i in at],
        )
