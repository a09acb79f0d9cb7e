"""Sums: every update is folded in as it comes, and forgotten."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.aggregation.aggregator import Admission, Lengths, Opened, Result
from fedcore.aggregation.replies import Replies
from fedcore.aggregation.row_exchange import exchange, exchange_whole
from fedcore.aggregation.whole import Squares
from fedcore.algorithms import Algorithm
from fedcore.algorithms.algorithm import NOTHING, H
from fedcore.kernels import ExactSum, Terms
from fedcore.kernels.exchange import CHANGE
from fedcore.layout import Layout
from fedcore.memory import copied, empty, set_to_zero, zeros
from fedcore.native import core
from fedcore.store.rounding import rounding_keys
from fedcore.typing import F32, F64, Floats

Precision = Literal["float32", "float64", "exact"]
"""What a round's sums are kept in."""

Accumulator: TypeAlias = npt.NDArray[Any] | ExactSum

MOST_EXACT = 2.0**50
"""What the lengths of all updates of a round, times their weights, may add up to in an exact sum: a quarter of what it
holds, since rows and anchors come and go with them."""
LONGEST = 1e30
"""The length of an update, times its weight, up to which 10^8 of them stay within a float32 sum."""
FARTHEST = 1e34
"""The length of a server's step up to which thousands of them stay within float32's range."""
SQUARED = 1e15
"""The same of what an optimiser takes the square of."""


def longest_term(population: int) -> float:
    """The length of an update, times its weight, up to which an exact sum takes it in.

    By how many clients there may be, and not by how many there are in a round: so no order decides.
    """
    return MOST_EXACT / max(2**11, population)


def longest_update(farthest_gamma: float, *, squared: bool) -> float:
    """The length of an update up to which no round's step can leave float32's range because of it.

    A step is at most a few of them long, times gamma. So no reply that is let in can end the round of all others.

    Args:
        farthest_gamma: the largest that gamma can become.
        squared: whether an optimiser takes squares.
    """
    return min(LONGEST, FARTHEST / farthest_gamma, SQUARED if squared else LONGEST)


class Sum:
    """A and B, the sums over the cohort of what its updates add, for the parameters and for the float buffers.

    A fold reads a sum and writes a spare, and the two change places once a judge has let every reply of it in: so a bad
    update cannot spoil them. They are float64 where the method keeps a total, which must see exactly what the rows
    store, or takes rows off. Exact sums are all exact, the weights' too, so that no order of the replies shows in them.

    Args:
        accumulate: the dtype of A elsewhere; or "exact" for all.
        device: where they lie, and what is folded.

    Cost: 8 n or 16 n bytes, 16 n more with second vectors, allocated once and used again every round; 40 n and 40 n
        where sums are exact.
    """

    def __init__(self, algorithm: Algorithm, layout: Layout, accumulate: Precision, *, device: str = "cpu") -> None:
        self._algorithm, self._layout = algorithm, layout
        self._exact, p = accumulate == "exact", layout.n_parameters
        dtype: Any = np.float64 if algorithm.keeps_total or algorithm.keeps_rows or self._exact else accumulate
        self._value, self._spare = _two(layout.n, dtype, exact=self._exact, device=device)
        self._changes: Accumulator | None = None
        self._spare_changes: Accumulator | None = None
        if algorithm.sums_changes:
            self._changes, self._spare_changes = _two(p, np.float64, exact=self._exact, device=device)
        self._read: Floats = empty(layout.n if self._exact else 0, np.float64)
        self._read_changes: F64 = empty(p if self._exact and algorithm.sums_changes else 0, np.float64)
        self._begun = True  # whether the value is a sum; else it is to be zero
        self._has_buffers = layout.n > layout.n_parameters
        self._alone = abs(algorithm.adds.h) if algorithm.row == NOTHING else 1.0
        self._n_tensors = sum(piece.kind == "parameter" for piece in layout.slices)
        self._opened: Opened
        self._weight = self._buffer_weight = 0.0
        self._weights: list[float] = []
        self._buffer_weights: list[float] = []

    def begin(self, opened: Opened) -> None:
        """See ``Aggregator``."""
        self._opened, self._begun = opened, False
        if self._changes is not None:
            _clear(self._changes)
        self._weight = self._buffer_weight = 0.0
        self._weights, self._buffer_weights = [], []

    def fold(self, replies: Replies, judge: Admission) -> F64:
        """See ``Aggregator``. The replies are folded in one pass, and those that count once more if some do not."""
        lengths = self._write(replies)
        accepted = judge(lengths)
        if accepted is not None:
            for i in np.flatnonzero(~accepted).tolist():
                self._opened.store.unstage(replies.clients[i])
            replies = replies.chosen(accepted)
            if len(replies):
                self._write(replies)
        if len(replies):
            self._value, self._spare, self._begun = self._spare, self._value, True
            self._changes, self._spare_changes = self._spare_changes, self._changes
            self._count(replies)
        return lengths.parameters

    def fold_at_once(self, base: F32, ys: list[Any], scales: F64, weights: F64) -> tuple[Floats, float, F64] | None:
        """A and W of a whole cohort that sends h alone, and |h_i|^2; None, and nothing changed, if one is too long."""
        assert not isinstance(self._spare, ExactSum)
        squares = kernels.accumulate(None, [base] * len(ys), ys, scales, weights, out=self._spare)
        return (self._spare, core.column_sum(0.0, weights, None), squares) if self._holds(squares, weights) else None

    def _count(self, replies: Replies) -> None:
        """Count the weights of replies that the sum has."""
        if self._exact:
            self._weights += replies.weights.tolist()
            self._buffer_weights += replies.weights[replies.has_buffers].tolist()
        # One after another: fractions too have the same bits however many come at once.
        self._weight = core.column_sum(self._weight, replies.weights, None)
        if self._has_buffers:
            with_buffers = replies.weights[replies.has_buffers]
            self._buffer_weight = core.column_sum(self._buffer_weight, with_buffers, None)

    def join(self, words: ExactSum, replies: Replies) -> bool:
        """Take in an exact sum over parameters and buffers that was folded elsewhere; whether this one can hold it.

        Args:
            replies: those that are in it.

        Cost: reads 32 n bytes and writes 16 n.
        """
        self._zero()
        if kernels.combine_exact([self._value, words], [1, 1], self._spare) is None:  # type: ignore[arg-type]
            return False
        self._value, self._spare = self._spare, self._value
        self._count(replies)
        return True

    def words(self) -> ExactSum:
        """A copy of an exact sum over parameters and buffers."""
        self._zero()
        assert isinstance(self._value, ExactSum)
        return ExactSum(*map(copied, self._value))

    def result(self) -> Result:
        """See ``Aggregator``."""
        self._zero()
        p = self._layout.n_parameters
        if isinstance(self._value, ExactSum):
            return self._read_out(self._value, p)
        assert not isinstance(self._changes, ExactSum)
        return Result(self._value[:p], self._changes, self._value[p:], self._weight, self._buffer_weight)

    def _read_out(self, value: ExactSum, p: int) -> Result:
        """The result of exact sums: their readings, and themselves."""
        assert self._changes is None or isinstance(self._changes, ExactSum)
        kernels.read_exact(value, self._read)
        changes = None if self._changes is None else kernels.read_exact(self._changes, self._read_changes)
        weights = math.fsum(self._weights), math.fsum(self._buffer_weights)
        exact = value.cut(slice(0, p)), self._changes
        return Result(self._read[:p], changes, self._read[p:], *weights, exact=exact)

    def _write(self, replies: Replies) -> Lengths:
        """The sums with the replies into the spares, and the replies' rows into staged ones."""
        whole, k = self._opened.whole, len(replies)
        found = [self._fold_parameters(replies)]
        if whole.has_buffers:
            found.append(self._fold_buffers(replies))
        controls = None if self._changes is None else self._fold_changes(replies)
        if controls is not None and self._algorithm.second_vector is not None:
            found.append(controls)
        squares = iter(whole.add(*found))
        lengths = self._held(next(squares), replies.weights, self._alone)
        buffers = self._held(next(squares), replies.weights) if whole.has_buffers else None
        return Lengths(lengths, buffers, *(self._held(rest, np.ones(k)) for rest in squares))

    def _fold_parameters(self, replies: Replies) -> Squares:
        """Fold A; where y makes a row, the rows are staged too."""
        if self._algorithm.row == NOTHING:
            return self._accumulate(replies, slice(0, self._layout.n_parameters), replies.scales)
        self._zero()
        return self._exchange(self._value, self._spare, replies, replies.weights, self._algorithm.adds)

    def _fold_changes(self, replies: Replies) -> Squares:
        """Fold B: what rows change by, or what clients that keep their rows say of it."""
        k = len(replies)
        assert self._changes is not None
        assert self._spare_changes is not None
        if self._algorithm.second_vector is None:
            return self._exchange(self._changes, self._spare_changes, replies, np.ones(k), CHANGE)
        none, minus, ones = [None] * k, -replies.factors, np.ones(k)
        if not self._algorithm.keeps_rows:
            return self._add(self._changes, none, replies.controls, minus, ones, self._spare_changes)
        old, new = self._rows(replies)
        arguments = self._changes, none, replies.controls, minus, ones, old, none, new
        return exchange_whole(
            self._opened.store,
            replies.clients,
            *arguments,
            out=self._spare_changes,
            keys=self._keys(replies),
            whole=self._opened.whole,
        )

    def _exchange(self, acc: Accumulator, out: Accumulator, replies: Replies, weights: F64, adds: Terms) -> Squares:
        """Stage the replies' rows, and add what they change, or all that A adds, to a sum over the parameters."""
        p, row = self._layout.n_parameters, self._algorithm.row
        (old, new), anchors = self._rows(replies), self._anchors(replies)
        keys, squares = self._keys(replies), np.zeros(len(replies))
        for span, bases, ys in self._spans(replies, p):
            given, to = (_part(acc, span), bases, ys, replies.scales, weights), _part(out, span)
            if span == slice(0, p):
                rows, clients = (old, anchors, new), replies.clients
                forms: dict[str, Any] = {"row": row, "adds": adds, "keys": keys, "whole": self._opened.whole}
                return exchange_whole(self._opened.store, clients, *given, *rows, out=to, **forms)
            rows = _cut(old, span), _cut(anchors, span), _cut(new, span)
            squares += exchange(*given, *rows, out=to, row=row, adds=adds, keys=keys)
        return Squares(squares)

    def _anchors(self, replies: Replies) -> list[F32 | None]:
        if self._algorithm.keeps_history:
            return list(map(self._opened.direction_of, self._opened.store.rounds_of(replies.clients)))
        return [self._opened.offset if self._algorithm.reads_offset else None] * len(replies)

    def _accumulate(self, replies: Replies, span: slice, scales: F64) -> Squares:
        """Fold h over the parameters, or x - y over the float buffers, in one pass."""
        tensors = (
            slice(None, self._n_tensors) if span.stop == self._layout.n_parameters else slice(self._n_tensors, None)
        )
        if self._layout.n == self._layout.n_parameters:  # nothing to cut, which would take as long as a small fold
            ys, bases = replies.vectors, replies.bases
        else:
            ys = [y[tensors] if isinstance(y, list) else y[span] for y in replies.vectors]
            bases = _cut(replies.bases, span)
        acc, weights = _part(self._value, span) if self._begun else None, replies.weights
        if span.start == 0 and self._algorithm.adds != H:
            weights = weights * self._algorithm.adds.h
        return self._add(acc, bases, ys, scales, weights, _part(self._spare, span))

    def _add(
        self, acc: Accumulator | None, bases: Sequence[Any], ys: Any, scales: F64, weights: F64, out: Accumulator | None
    ) -> Squares:
        """Fold what nobody's row remembers."""
        assert out is not None
        kernel: Any = kernels.accumulate_exact if isinstance(out, ExactSum) else kernels.accumulate
        room = self._opened.whole.room(len(out.high if isinstance(out, ExactSum) else out), len(ys))
        return Squares(kernel(acc, bases, ys, scales, weights, out=out, partials=room), room)

    def _zero(self) -> None:
        """Zeros, if nothing was folded yet: else the first fold makes them itself."""
        if not self._begun:
            _clear(self._value)
            self._begun = True

    def _spans(self, replies: Replies, stop: int) -> Iterator[tuple[slice, Sequence[Any], Sequence[Any]]]:
        """The bases and ys over the parameters: all at once, or tensor by tensor if some lie apart."""
        if not any(isinstance(y, list) for y in replies.vectors):
            span = slice(0, stop)
            if stop == self._layout.n:  # nothing to cut
                yield span, replies.bases, replies.vectors
                return
            yield span, _cut(replies.bases, span), [y[span] for y in replies.vectors]
            return
        for index, piece in enumerate(self._layout.slices):
            if piece.start < piece.stop <= stop:
                span = slice(piece.start, piece.stop)
                yield (
                    span,
                    _cut(replies.bases, span),
                    [y[index] if isinstance(y, list) else y[span] for y in replies.vectors],
                )

    def _rows(self, replies: Replies) -> tuple[list[Any], list[Any]]:
        """The rows as they are, and those that are staged."""
        store, clients = self._opened.store, replies.clients
        return store.rows_of(clients), store.stage_all(clients)

    def _keys(self, replies: Replies) -> npt.NDArray[np.uint64] | None:
        return rounding_keys(self._opened.store, "a reply", self._opened.round, replies.clients)

    def _fold_buffers(self, replies: Replies) -> Squares:
        """Fold x - y of the float buffers; a gradient has none, and of a model's shards one has them all."""
        which, squares = replies.has_buffers, np.zeros(len(replies))
        span = slice(self._layout.n_parameters, self._layout.n)
        room = self._opened.whole.room(span.stop - span.start, len(replies))
        if self._has_buffers:
            chosen = replies.chosen(which)
            folded = self._accumulate(chosen, span, chosen.factors)
            squares[which] = folded.here
            if room is not None:
                room[:] = 0
                room[:, which] = folded.partials
        return Squares(squares, room)

    def _holds(self, squares: F64, weights: F64, times: float = 1.0) -> bool:
        """Tell whether the longest update would be held, were it the heaviest too."""
        most, heaviest = core.column_range(squares)[1], core.column_range(weights)[1]
        held = self._opened.longest_term if self._exact else LONGEST
        return most >= 0 and (norm := math.sqrt(most)) < self._opened.longest and norm * (heaviest * times) < held

    def _held(self, squares: F64, weights: F64, times: float = 1.0) -> F64:
        """The squares; infinite for an update so long that it could carry a sum or the step past float32's range."""
        if self._holds(squares, weights, times):
            return squares
        held = self._opened.longest_term if self._exact else LONGEST
        norms = np.sqrt(squares)
        squares[~((norms * (weights * times) < held) & (norms < self._opened.longest))] = np.inf  # as a NaN is not
        return squares


def _two(n: int, dtype: Any, *, exact: bool, device: str) -> tuple[Accumulator, Accumulator]:
    """A sum of zeros, and a spare."""
    if exact:
        return ExactSum.zeros(n), ExactSum.empty(n)
    return zeros(n, dtype, device=device), empty(n, dtype, device=device)


def _part(sum: Accumulator, span: slice) -> Accumulator:
    return sum.cut(span) if isinstance(sum, ExactSum) else sum[span]


def _clear(sum: Accumulator) -> None:
    for words in sum if isinstance(sum, ExactSum) else [sum]:
        set_to_zero(words)


def _cut(vectors: Sequence[Any], span: slice) -> list[Any]:
    """A span of each vector, as a view; None stays None."""
    return [vector if vector is None else vector[span] for vector in vectors]
