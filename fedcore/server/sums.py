"""The sums of the open round, which a bad update cannot spoil."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.algorithms import Algorithm
from fedcore.layout import Layout
from fedcore.store import ClientId, ClientStore, History

Precision = Literal["float32", "float64"]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Sum = npt.NDArray[np.floating[Any]]

LONGEST = 1e30
"""The length of an update, times its weight, up to which 10^8 of them stay within a float32 sum."""


@dataclass(slots=True)
class Entry:
    """An update that passed every check but the last, whether each element is finite: the fold itself tells that."""

    client: ClientId
    y: F32
    is_model: bool  # else a difference: nothing is subtracted from it
    has_buffers: bool
    scale: float  # h = (x - y) scale, or -y scale
    weight: float
    steps: int
    distance: float  # eta_i K_i, how far a gradient of length 1 goes
    counters: dict[str, npt.NDArray[np.integer[Any]]]


class Sums:
    """A, the sum over the cohort of what its updates add, for the parameters and for the float buffers.

    A fold reads the sum and writes a spare, and the two change places if every row was finite.

    The sums are float64 where the method keeps a total, which must see exactly what the rows store.

    Args:
        accumulate: the dtype of the sums where the method keeps no total.

    Cost: 8 n or 16 n bytes, allocated once and used again every round.
    """

    def __init__(
        self, algorithm: Algorithm, layout: Layout, store: ClientStore, history: History, accumulate: Precision
    ) -> None:
        self._algorithm, self._layout, self._store, self._history = algorithm, layout, store, history
        dtype = np.float64 if algorithm.keeps_total else np.dtype(accumulate)
        self._value: Sum = np.zeros(layout.n, dtype)
        self._spare: Sum = np.empty(layout.n, dtype)
        self.weight = 0.0
        self.buffer_weight = 0.0

    @property
    def parameters(self) -> Sum:
        """A over the parameters."""
        return self._value[: self._layout.n_parameters]

    @property
    def buffers(self) -> Sum:
        """The weighted sum of x - y over the float buffers."""
        return self._value[self._layout.n_parameters :]

    def clear(self) -> None:
        """Back to zero, for a new round."""
        self._value[:] = 0
        self.weight = self.buffer_weight = 0.0

    def fold(self, x: F32, entries: Sequence[Entry]) -> F64:
        """Add the entries in one pass, in their order, and stage their rows.

        Args:
            x: float32[n], what the cohort started from.

        Returns:
            float64[len(entries)], |h_i|^2; NaN for an entry that held a NaN or an infinity, or is too long for the
            sums: it was left out as if it had never come.
        """
        squares = self._fold_parameters(x, entries)
        if self._layout.n > self._layout.n_parameters:
            squares[~self._fold_buffers(x, entries)] = np.nan
        squares[~self._holds(squares, entries)] = np.nan
        finite = np.isfinite(squares)
        if finite.all():
            self._value, self._spare = self._spare, self._value
            self.weight += sum(entry.weight for entry in entries)
            self.buffer_weight += sum(entry.weight for entry in entries if entry.has_buffers)
            return squares
        for entry, good in zip(entries, finite, strict=True):
            if not good:
                self._store.unstage(entry.client)
        if finite.any():
            squares[finite] = self.fold(x, [entry for entry, good in zip(entries, finite, strict=True) if good])
        return squares

    def _fold_parameters(self, x: F32, entries: Sequence[Entry]) -> F64:
        p = self._layout.n_parameters
        start = x[:p]
        bases = [start if entry.is_model else None for entry in entries]
        ys = [entry.y if len(entry.y) == p else entry.y[:p] for entry in entries]
        scales = np.array([entry.scale for entry in entries])
        weights = np.array([entry.weight for entry in entries])
        if not self._algorithm.keeps_rows:
            return kernels.accumulate(self.parameters, bases, ys, scales, weights, out=self._spare[:p])
        clients = [entry.client for entry in entries]
        old_rows = [self._store.row(client) for client in clients]
        anchors: list[F32 | None] = [None] * len(clients)
        if self._algorithm.keeps_history:
            rounds = [self._store.round_of(client) for client in clients]
            anchors = [None if t is None else self._history[t] for t in rounds]
        new_rows = [self._store.stage(client) for client in clients]
        return kernels.exchange(
            self.parameters, bases, ys, scales, weights, old_rows, anchors, new_rows, out=self._spare[:p]
        )

    def _fold_buffers(self, x: F32, entries: Sequence[Entry]) -> npt.NDArray[np.bool_]:
        """Fold x - y of the float buffers, and tell whose the sums can hold (a gradient has none, which is well)."""
        p = self._layout.n_parameters
        having = np.array([entry.has_buffers for entry in entries])
        chosen = [entry for entry in entries if entry.has_buffers]
        squares = kernels.accumulate(
            self.buffers,
            [x[p:] if entry.is_model else None for entry in chosen],
            [entry.y[p:] for entry in chosen],
            np.ones(len(chosen)),
            np.array([entry.weight for entry in chosen]),
            out=self._spare[p:],
        )
        good = np.ones(len(entries), np.bool_)
        good[having] = self._holds(squares, chosen)
        return good

    def _holds(self, squares: F64, entries: Sequence[Entry]) -> npt.NDArray[np.bool_]:
        """Which updates are finite, and not so long that one of them could carry a float32 sum past its range."""
        if self._value.dtype == np.float64:
            return np.isfinite(squares)
        lengths = np.sqrt(squares) * [entry.weight for entry in entries]
        return np.asarray(lengths < LONGEST)  # as a NaN is not
