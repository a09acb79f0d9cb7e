"""The sums of the open round, which a bad update cannot spoil."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.algorithms import Algorithm
from fedcore.aligned import aligned
from fedcore.kernels.exchange import Form
from fedcore.layout import Layout
from fedcore.server.batch import Batch
from fedcore.server.exchanging import exchange
from fedcore.server.judge import Lengths, Verdict
from fedcore.server.rounding import rounding_keys
from fedcore.store import ClientStore, History

Precision = Literal["float32", "float64"]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Sum = npt.NDArray[np.floating[Any]]

LONGEST = 1e30
"""The length of an update, times its weight, up to which 10^8 of them stay within a float32 sum."""
FARTHEST = 1e34
"""The length of a server's step up to which thousands of them stay within float32's range."""
SQUARED = 1e15
"""The same of what an optimiser takes the square of."""


def longest_update(farthest_gamma: float, *, squared: bool) -> float:
    """The length of an update up to which no round's step can leave float32's range because of it.

    A step is at most a few of them long, times gamma. So no reply that is let in can end the round of all others.

    Args:
        farthest_gamma: the largest that gamma can become.
        squared: whether an optimiser takes squares.
    """
    return min(LONGEST, FARTHEST / farthest_gamma, SQUARED if squared else LONGEST)


class Sums:
    """A and B, the sums over the cohort of what its updates add, for the parameters and for the float buffers.

    A fold reads a sum and writes a spare, and the two change places once a judge has let every reply of it in.

    The sums are float64 where the method keeps a total, which must see exactly what the rows store, or takes rows off.

    Args:
        accumulate: the dtype of A elsewhere.

    Cost: 8 n or 16 n bytes, 16 n more with second vectors, allocated once and used again every round.
    """

    def __init__(self, algorithm: Algorithm, layout: Layout, accumulate: Precision) -> None:
        self._algorithm, self._layout = algorithm, layout
        dtype = np.float64 if algorithm.keeps_total or algorithm.adds != "h" else np.dtype(accumulate)
        self._value: Sum = aligned(np.zeros, layout.n, dtype)
        self._spare: Sum = aligned(np.empty, layout.n, dtype)
        self._controls = aligned(np.zeros, layout.n_parameters, np.float64) if algorithm.second else None
        self._spare_controls = aligned(np.empty, layout.n_parameters, np.float64) if algorithm.second else None
        self._begun = True  # whether the value is a sum; else it is to be zero
        self._n_tensors = sum(piece.kind == "parameter" for piece in layout.slices)
        self._store: ClientStore
        self._history: History
        self._known: F32 | None
        self._round: int
        self._longest = LONGEST
        self.weight = 0.0
        self.buffer_weight = 0.0

    @property
    def parameters(self) -> Sum:
        """A over the parameters."""
        self._begin()
        return self._value[: self._layout.n_parameters]

    @property
    def buffers(self) -> Sum:
        """The weighted sum of x - y over the float buffers."""
        self._begin()
        return self._value[self._layout.n_parameters :]

    @property
    def controls(self) -> F64 | None:
        """B, where clients send a second vector."""
        return self._controls

    def clear(
        self, store: ClientStore, history: History, known: F32 | None, round: int, longest: float = LONGEST
    ) -> None:
        """Back to zero, for a new round.

        Args:
            store, history: the rows, and the directions that they refer to.
            known: float32[n_parameters] or None, what ``raw_i = h_i / a + r_i + known`` adds for every client.
            round: its number, on which the rounding of rows depends.
            longest: see ``longest_update``.
        """
        self._begun = False
        if self._controls is not None:
            self._controls[:] = 0
        self._store, self._history, self._known, self._round = store, history, known, round
        self._longest = longest
        self.weight = self.buffer_weight = 0.0

    def fold(self, batch: Batch, judge: Callable[[Lengths], Verdict | None]) -> tuple[F64, Verdict | None]:
        """Add the replies in one pass, in their order, and stage their rows.

        Args:
            judge: which replies count, by the lengths of what they add: the others are left out as if they had never
                come, for which those that do are folded once more.

        Returns:
            float64[k], |h_i|^2, and what the judge said.
        """
        lengths = self._write(batch)
        verdict = judge(lengths)
        if verdict is not None:
            for i in np.flatnonzero(~verdict.accepted).tolist():
                self._store.unstage(batch.clients[i])
            batch = batch.chosen(verdict.accepted)
            if len(batch):
                self._write(batch)
        if len(batch):
            self._value, self._spare, self._begun = self._spare, self._value, True
            self._controls, self._spare_controls = self._spare_controls, self._controls
            self.weight = _added(self.weight, batch.weights)
            self.buffer_weight = _added(self.buffer_weight, batch.weights[batch.has_buffers])
        return lengths.parameters, verdict

    def _write(self, batch: Batch) -> Lengths:
        """The sums with the replies into the spares, and the replies' rows into staged ones."""
        has_buffers = self._layout.n > self._layout.n_parameters
        return Lengths(
            self._held(self._fold_parameters(batch), batch.weights),
            self._fold_buffers(batch) if has_buffers else None,
            self._held(self._fold_controls(batch), np.ones(len(batch))) if self._algorithm.second else None,
        )

    def _fold_parameters(self, batch: Batch) -> F64:
        algorithm, k, p = self._algorithm, len(batch), self._layout.n_parameters
        if algorithm.adds == "h":
            return self._accumulate(batch, slice(0, p), batch.scales)
        form: Form = "control" if algorithm.adds == "raw - r" else "gradient"
        a = algorithm.direction.a if form == "control" else 1.0
        anchors: list[F32 | None] = [self._known if form == "control" else None] * k
        old, new = self._old_rows(batch), self._staged_rows(batch)
        keys = self._keys(batch)
        if algorithm.keeps_history:
            anchors = [self._history.get(self._store.round_of(client)) for client in batch.clients]
        self._begin()
        squares = np.zeros(k)
        for span, bases, ys in self._spans(batch, p):
            acc, out = self._value[span], self._spare[span]
            whole = span == slice(0, p)
            rows, at, rows_out = (
                (old, anchors, new) if whole else (_cut(old, span), _cut(anchors, span), _cut(new, span))
            )
            squares += exchange(
                acc, bases, ys, batch.scales / a, batch.weights, rows, at, rows_out, out=out, form=form, keys=keys
            )
        return squares * a**2

    def _accumulate(self, batch: Batch, span: slice, scales: F64) -> F64:
        """Fold h over the parameters, or x - y over the float buffers, in one pass."""
        tensors = (
            slice(None, self._n_tensors) if span.stop == self._layout.n_parameters else slice(self._n_tensors, None)
        )
        if self._layout.n == self._layout.n_parameters:  # nothing to cut, which would take as long as a small fold
            ys, bases = batch.ys, batch.bases
        else:
            ys = [y[tensors] if isinstance(y, list) else y[span] for y in batch.ys]
            bases = _cut(batch.bases, span)
        acc = self._value[span] if self._begun else None
        return kernels.accumulate(acc, bases, ys, scales, batch.weights, out=self._spare[span])

    def _begin(self) -> None:
        """Zeros, if nothing was folded yet: else the first fold makes them itself."""
        if not self._begun:
            self._value[:] = 0
            self._begun = True

    def _spans(self, batch: Batch, stop: int) -> Iterator[tuple[slice, list[Any], list[Any]]]:
        """The bases and ys over the parameters: all at once, or tensor by tensor if some lie apart."""
        if not any(isinstance(y, list) for y in batch.ys):
            span = slice(0, stop)
            yield span, _cut(batch.bases, span), [y[span] for y in batch.ys]
            return
        for index, piece in enumerate(self._layout.slices):
            if piece.start < piece.stop <= stop:
                span = slice(piece.start, piece.stop)
                yield span, _cut(batch.bases, span), [y[index] if isinstance(y, list) else y[span] for y in batch.ys]

    def _fold_controls(self, batch: Batch) -> F64:
        """Fold control_i - r_i, or control_i as it is where the clients keep their rows."""
        k = len(batch)
        none, minus, ones = [None] * k, -np.ones(k), np.ones(k)
        assert self._controls is not None
        assert self._spare_controls is not None
        if not self._algorithm.keeps_rows:
            return kernels.accumulate(self._controls, none, batch.controls, minus, ones, out=self._spare_controls)
        old, new = self._old_rows(batch), self._staged_rows(batch)
        arguments = self._controls, none, batch.controls, minus, ones, old, none, new
        return exchange(*arguments, out=self._spare_controls, keys=self._keys(batch))

    def _old_rows(self, batch: Batch) -> list[Any]:
        return [self._store.row(client) for client in batch.clients]

    def _staged_rows(self, batch: Batch) -> list[Any]:
        return [self._store.stage(client) for client in batch.clients]

    def _keys(self, batch: Batch) -> npt.NDArray[np.uint64] | None:
        return rounding_keys(self._store, "a reply", self._round, batch.clients)

    def _fold_buffers(self, batch: Batch) -> F64:
        """Fold x - y of the float buffers; a gradient has none."""
        chosen, squares = batch.chosen(batch.has_buffers), np.zeros(len(batch))
        span = slice(self._layout.n_parameters, self._layout.n)
        folded = self._accumulate(chosen, span, np.ones(len(chosen)))
        squares[batch.has_buffers] = self._held(folded, chosen.weights)
        return squares

    def _held(self, squares: F64, weights: F64) -> F64:
        """The squares; infinite for an update so long that it could carry a sum or the step past float32's range."""
        norms = np.sqrt(squares)
        squares[~((norms * weights < LONGEST) & (norms < self._longest))] = np.inf  # as a NaN is not
        return squares


def _added(total: float, weights: F64) -> float:
    """A sum and weights, added one after another: fractions too have the same bits however many come at once."""
    for weight in weights.tolist():  # sum() and numpy.sum add otherwise
        total += weight
    return total


def _cut(vectors: Sequence[Any], span: slice) -> list[Any]:
    """A span of each vector, as a view; None stays None."""
    return [vector if vector is None else vector[span] for vector in vectors]
