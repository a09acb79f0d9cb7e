"""The sums of a round: batches of updates, the clients' rows they exchange, and the reducer over shards."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.algorithms import Algorithm, Claims
from fedcore.algorithms.base import NOTHING, H
from fedcore.arrays import F32, F64, Bools, Floats, copied, empty, set_to_zero, zeros
from fedcore.kernels import ExactSum, Terms
from fedcore.kernels.rows import ANCHORED, CHANGE, REPLACED
from fedcore.model import Layout
from fedcore.native import core
from fedcore.options import Accumulator
from fedcore.profiling import span
from fedcore.store import ClientStore
from fedcore.store.client_store import rounding_keys
from fedcore.store.registry import ClientId

# The replies of a cohort, as one table of columns: read, folded, counted and seen by the method.


Counters = dict[str, npt.NDArray[np.integer[Any]]]
"""Integer buffers of a model, such as BatchNorm's counts of batches, by name."""

NONE: F64 = np.empty(0)
NO_COUNT, COUNTED, WEIGHTED = 0, 1, 2
"""Where the examples of a reply are from: nowhere (1 stands in), the client, or the server's own weight."""


@dataclass(slots=True, kw_only=True)
class UpdateBatch:
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
    def none(cls) -> "UpdateBatch":
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
    def joined(cls, parts: Sequence["UpdateBatch"]) -> "UpdateBatch":
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

    def chosen(self, which: Bools) -> "UpdateBatch":
        """The replies that ``which``, bool[k], says."""
        at = np.flatnonzero(which).tolist()
        return UpdateBatch(**{column.name: _chosen(getattr(self, column.name), which, at) for column in fields(self)})

    def ordered(self, numbers: npt.NDArray[np.int64]) -> "UpdateBatch":
        """The replies in the order of these numbers, int64[k]."""
        order = np.argsort(numbers)
        return UpdateBatch(
            **{one.name: _chosen(getattr(self, one.name), order, order.tolist()) for one in fields(self)}
        )

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


# The whole of a server's vectors, for decisions that a slice of them cannot make: a shard asks the others.


class Squares(NamedTuple):
    """The squared lengths of k vectors, or of the slices of them that lie here."""

    here: F64
    """float64[k], as a kernel has added them up over what lies here."""
    partials: F64 | None = None
    """float64[blocks, k], what each block adds to them, of which the whole's lengths are made; None where this is it.
    """


class Reducer(Protocol):
    """The questions of a server, or of a shard of one, about the whole of its vectors.

    Every shard of a cluster makes the same calls in the same order, each with what it knows of its own slice; each of
    them gets the same answer. So all of them decide alike.

    Attributes:
        first: the place of the slice's first parameter in a row.
        has_buffers: whether there are float buffers in the whole: they lie in one of the shards.
        place: what a folder says of the shard; None for a server that has no others.
    """

    first: int
    has_buffers: bool
    place: dict[str, Any] | None

    def room(self, n: int, k: int = 1) -> F64 | None:
        """Memory for a kernel's ``partials=``, over k vectors of n elements; None where nobody needs them."""
        ...

    def add(self, *squares: Squares) -> list[F64]:
        """The squared lengths of the whole vectors, with the bits of one kernel over all of each."""
        ...

    def refusals(self, reasons: list[str | None]) -> list[str | None]:
        """The reasons to refuse some replies, here or elsewhere; None for those that nobody refuses."""
        ...

    def agree(self, yes: bool) -> bool:
        """Tell whether all say yes."""
        ...

    def ready(self) -> None:
        """Wait until all are ready to make a change count. What may fail has been done; only the commit is left.

        Raises:
            ClusterError: one is not; nothing is to change.
        """
        ...


class LocalReducer:
    """The whole of a server that has no shards: what is here is all."""

    def __init__(self, *, has_buffers: bool) -> None:
        self.first, self.has_buffers = 0, has_buffers
        self.place: dict[str, Any] | None = None

    def room(self, n: int, k: int = 1) -> F64 | None:
        """See ``Reducer``."""
        return None

    def add(self, *squares: Squares) -> list[F64]:
        """See ``Reducer``."""
        return [one.here for one in squares]

    def refusals(self, reasons: list[str | None]) -> list[str | None]:
        """See ``Reducer``."""
        return reasons

    def agree(self, yes: bool) -> bool:
        """See ``Reducer``."""
        return yes

    def ready(self) -> None:
        """See ``Reducer``."""


def combined_square(reducer: Reducer, terms: Sequence[Floats], coefficients: Sequence[float]) -> float:
    """``kernels.combined_square`` of whole vectors, of which the terms are the slices that lie here."""
    room = reducer.room(len(terms[0]))
    square = kernels.combined_square(terms, coefficients, partials=room)
    return float(reducer.add(Squares(np.array([square]), room))[0][0])


# The contract of an aggregator: the seam for rules that hold the cohort, wrap another, or live elsewhere.


class Opened(NamedTuple):
    """The facts of a round that opens, as an aggregator is told them."""

    round: int
    store: ClientStore
    """The rows: those of the cohort are read, and new ones staged."""
    direction_of: Callable[[int | None], F32 | None]
    """v[t], float32[n_parameters], which rows of round t refer to; None where there is none."""
    offset: F32 | None
    """The offset that every client was sent, float32[n_parameters]; None for zero."""
    longest: float
    """The length of an update from which on it counts as not finite: see ``longest_update``."""
    longest_term: float
    """The length of w_i h_i up to which an exact sum takes it in: see ``longest_term``."""
    reducer: Reducer
    """Where decisions need whole vectors, of which slices are folded here."""


class Lengths(NamedTuple):
    """The squared lengths of what k replies add to each sum, float64[k]; not finite where the sum cannot hold it."""

    parameters: F64
    """|h_i|^2."""
    buffers: F64 | None = None
    """|x - y_i|^2 over the float buffers, where there are any; 0 for a gradient."""
    controls: F64 | None = None
    """|control_i|^2, where clients send a second vector."""


class Result(NamedTuple):
    """The result of a cohort: the paper's sums. Views of the aggregator's memory, until its next ``begin``."""

    A: Floats
    """Floating[n_parameters], the sum of what the updates add."""
    B: F64 | None
    """float64[n_parameters], that of what rows change by; None where no method asks for it."""
    buffers: Floats
    """Floating[n - n_parameters], the weighted sum of x - y over the float buffers."""
    W: float
    """The sum of the weights."""
    buffer_weight: float
    """That of the replies that have buffers."""
    exact: tuple[ExactSum, ExactSum | None] | None = None
    """A and B as they were summed, where that was exact; the floats are then readings of them."""
    linear: bool = True
    """Whether A is the sum that the method says, so that diagnostics follow from it: not a median, nor with noise."""


class Aggregator(Protocol):
    """Folds updates in as they come. One round at a time; an update that does not count changes nothing.

    An implementation may hold the cohort until ``result``, wrap another one, count in integers, or live on a device.
    """

    def begin(self, opened: Opened) -> None:
        """Start a round with empty sums."""
        ...

    def try_fold(self, batch: UpdateBatch) -> Lengths:
        """Fold a batch beside the sums, in order, stage its rows, and measure it; ``accept`` or ``refold`` follows."""
        ...

    def accept(self, batch: UpdateBatch) -> None:
        """Count the batch that was tried."""
        ...

    def refold(self, batch: UpdateBatch, accepted: Bools) -> UpdateBatch:
        """Count the updates of the tried batch that ``accepted``, bool[k], has; return them. The others never came."""
        ...

    def result(self) -> Result:
        """The sums over all replies that were taken in."""
        ...


# The exchange of many clients' rows, some at a time, and the checksums of those that are made reducer.


PART = 256
"""Rows of one call: each array that a call writes is held against all others of it, so that a call of k rows takes
k^2, with Python's lock held."""


def exchange(
    acc: npt.NDArray[np.floating[Any]] | ExactSum,
    bases: Sequence[Any],
    ys: Sequence[Any],
    scales: F64,
    weights: F64,
    old_rows: Sequence[Any],
    anchors: Sequence[Any],
    new_rows: Sequence[Any],
    *,
    out: npt.NDArray[np.floating[Any]] | ExactSum,
    row: Terms = REPLACED,
    adds: Terms = ANCHORED,
    keys: npt.NDArray[np.uint64] | None = None,
    sums: npt.NDArray[np.uint64] | None = None,
    first: int = 0,
    partials: F64 | None = None,
) -> F64:
    """``kernels.exchange`` or ``exchange_exact``, and its bits, of any number of rows that do not overlap."""
    squares = np.empty(len(ys))
    kernel: Any = kernels.exchange_exact if isinstance(acc, ExactSum) else kernels.exchange
    with span("fold", None, (acc, bases, ys, old_rows, anchors, new_rows, out)):
        for start in range(0, len(ys), PART):
            some = slice(start, start + PART)
            part = partials if partials is None or len(ys) <= PART else np.empty_like(partials[:, some], order="C")
            squares[some] = kernel(
                out if start else acc,
                bases[some],
                ys[some],
                scales[some],
                weights[some],
                old_rows[some],
                anchors[some],
                new_rows[some],
                out=out,
                row=row,
                adds=adds,
                keys=None if keys is None else keys[some],
                sums=None if sums is None else sums[some],
                first=first,
                partials=part,
            )
            if partials is not None and part is not partials:
                partials[:, some] = part
    return squares


def exchange_whole(
    store: ClientStore, clients: Sequence[ClientId], *arguments: Any, reducer: Reducer, **options: Any
) -> Squares:
    """``exchange`` of whole rows, or of a shard's slices of them, into those that are staged for the clients.

    A commit does not read them again.

    Rows that are made a tensor at a time are no such: a tensor's end is none of a checksum's blocks.
    """
    sums, room = store.room_for_checksums(len(clients)), reducer.room(store.n, len(clients))
    squares = exchange(*arguments, **options, sums=sums, first=reducer.first, partials=room)
    if sums is not None:
        store.note_checksums(clients, sums)
    return Squares(squares, room)


# Sums: every update is folded in as it comes, and forgotten.


SumVector: TypeAlias = npt.NDArray[Any] | ExactSum

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
        accumulator: the dtype of A elsewhere; or "exact" for all.
        device: where they lie, and what is folded.

    Cost: 8 n or 16 n bytes, 16 n more with second vectors, allocated once and used again every round; 40 n and 40 n
        where sums are exact.
    """

    def __init__(self, algorithm: Algorithm, layout: Layout, accumulator: Accumulator, *, device: str = "cpu") -> None:
        self._algorithm, self._layout = algorithm, layout
        self._exact, p = accumulator == "exact", layout.n_parameters
        dtype: Any = np.float64 if algorithm.keeps_total or algorithm.keeps_rows or self._exact else accumulator
        self._value, self._spare = _two(layout.n, dtype, exact=self._exact, device=device)
        self._changes: SumVector | None = None
        self._spare_changes: SumVector | None = None
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

    def try_fold(self, batch: UpdateBatch) -> Lengths:
        """See ``Aggregator``."""
        return self._write(batch)

    def accept(self, batch: UpdateBatch) -> None:
        """See ``Aggregator``."""
        self._value, self._spare, self._begun = self._spare, self._value, True
        self._changes, self._spare_changes = self._spare_changes, self._changes
        self._count(batch)

    def refold(self, batch: UpdateBatch, accepted: Bools) -> UpdateBatch:
        """See ``Aggregator``."""
        for i in np.flatnonzero(~accepted).tolist():
            self._opened.store.unstage(batch.clients[i])
        batch = batch.chosen(accepted)
        if len(batch):
            self._write(batch)
            self.accept(batch)
        return batch

    def fold_at_once(self, base: F32, ys: list[Any], scales: F64, weights: F64) -> tuple[Floats, float, F64] | None:
        """A and W of a whole cohort that sends h alone, and |h_i|^2; None, and nothing changed, if one is too long."""
        assert not isinstance(self._spare, ExactSum)
        squares = kernels.accumulate(None, [base] * len(ys), ys, scales, weights, out=self._spare)
        return (self._spare, core.column_sum(0.0, weights, None), squares) if self._holds(squares, weights) else None

    def _count(self, replies: UpdateBatch) -> None:
        """Count the weights of replies that the sum has."""
        if self._exact:
            self._weights += replies.weights.tolist()
            self._buffer_weights += replies.weights[replies.has_buffers].tolist()
        # One after another: fractions too have the same bits however many come at once.
        self._weight = core.column_sum(self._weight, replies.weights, None)
        if self._has_buffers:
            with_buffers = replies.weights[replies.has_buffers]
            self._buffer_weight = core.column_sum(self._buffer_weight, with_buffers, None)

    def join(self, words: ExactSum, replies: UpdateBatch) -> bool:
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

    def _write(self, replies: UpdateBatch) -> Lengths:
        """The sums with the replies into the spares, and the replies' rows into staged ones."""
        reducer, k = self._opened.reducer, len(replies)
        found = [self._fold_parameters(replies)]
        if reducer.has_buffers:
            found.append(self._fold_buffers(replies))
        controls = None if self._changes is None else self._fold_changes(replies)
        if controls is not None and self._algorithm.second_vector is not None:
            found.append(controls)
        squares = iter(reducer.add(*found))
        lengths = self._held(next(squares), replies.weights, self._alone)
        buffers = self._held(next(squares), replies.weights) if reducer.has_buffers else None
        return Lengths(lengths, buffers, *(self._held(rest, np.ones(k)) for rest in squares))

    def _fold_parameters(self, replies: UpdateBatch) -> Squares:
        """Fold A; where y makes a row, the rows are staged too."""
        if self._algorithm.row == NOTHING:
            return self._accumulate(replies, slice(0, self._layout.n_parameters), replies.scales)
        self._zero()
        return self._exchange(self._value, self._spare, replies, replies.weights, self._algorithm.adds)

    def _fold_changes(self, replies: UpdateBatch) -> Squares:
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
            reducer=self._opened.reducer,
        )

    def _exchange(self, acc: SumVector, out: SumVector, replies: UpdateBatch, weights: F64, adds: Terms) -> Squares:
        """Stage the replies' rows, and add what they change, or all that A adds, to a sum over the parameters."""
        p, row = self._layout.n_parameters, self._algorithm.row
        (old, new), anchors = self._rows(replies), self._anchors(replies)
        keys, squares = self._keys(replies), np.zeros(len(replies))
        for piece, bases, ys in self._spans(replies, p):
            given, to = (_part(acc, piece), bases, ys, replies.scales, weights), _part(out, piece)
            if piece == slice(0, p):
                rows, clients = (old, anchors, new), replies.clients
                forms: dict[str, Any] = {"row": row, "adds": adds, "keys": keys, "reducer": self._opened.reducer}
                return exchange_whole(self._opened.store, clients, *given, *rows, out=to, **forms)
            rows = _cut(old, piece), _cut(anchors, piece), _cut(new, piece)
            squares += exchange(*given, *rows, out=to, row=row, adds=adds, keys=keys)
        return Squares(squares)

    def _anchors(self, replies: UpdateBatch) -> list[F32 | None]:
        if self._algorithm.keeps_history:
            return list(map(self._opened.direction_of, self._opened.store.rounds_of(replies.clients)))
        return [self._opened.offset if self._algorithm.reads_offset else None] * len(replies)

    def _accumulate(self, replies: UpdateBatch, span: slice, scales: F64) -> Squares:
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
        self, acc: SumVector | None, bases: Sequence[Any], ys: Any, scales: F64, weights: F64, out: SumVector | None
    ) -> Squares:
        """Fold what nobody's row remembers."""
        assert out is not None
        kernel: Any = kernels.accumulate_exact if isinstance(out, ExactSum) else kernels.accumulate
        room = self._opened.reducer.room(len(out.high if isinstance(out, ExactSum) else out), len(ys))
        with span("fold", None, (acc, bases, ys, out)):
            return Squares(kernel(acc, bases, ys, scales, weights, out=out, partials=room), room)

    def _zero(self) -> None:
        """Zeros, if nothing was folded yet: else the first fold makes them itself."""
        if not self._begun:
            _clear(self._value)
            self._begun = True

    def _spans(self, replies: UpdateBatch, stop: int) -> Iterator[tuple[slice, Sequence[Any], Sequence[Any]]]:
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

    def _rows(self, replies: UpdateBatch) -> tuple[list[Any], list[Any]]:
        """The rows as they are, and those that are staged."""
        store, clients = self._opened.store, replies.clients
        return store.replace_rows(clients)

    def _keys(self, replies: UpdateBatch) -> npt.NDArray[np.uint64] | None:
        return rounding_keys(self._opened.store, "a reply", self._opened.round, replies.clients)

    def _fold_buffers(self, replies: UpdateBatch) -> Squares:
        """Fold x - y of the float buffers; a gradient has none, and of a model's shards one has them all."""
        which, squares = replies.has_buffers, np.zeros(len(replies))
        span = slice(self._layout.n_parameters, self._layout.n)
        room = self._opened.reducer.room(span.stop - span.start, len(replies))
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


def _two(n: int, dtype: Any, *, exact: bool, device: str) -> tuple[SumVector, SumVector]:
    """A sum of zeros, and a spare."""
    if exact:
        return ExactSum.zeros(n), ExactSum.empty(n)
    return zeros(n, dtype, device=device), empty(n, dtype, device=device)


def _part(sum: SumVector, span: slice) -> SumVector:
    return sum.cut(span) if isinstance(sum, ExactSum) else sum[span]


def _clear(sum: SumVector) -> None:
    for words in sum if isinstance(sum, ExactSum) else [sum]:
        set_to_zero(words)


def _cut(vectors: Sequence[Any], span: slice) -> list[Any]:
    """A span of each vector, as a view; None stays None."""
    return [vector if vector is None else vector[span] for vector in vectors]
