"""The sums of a round: batches of updates, the exchange of clients' rows, and the reducer over shards."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.algorithms import Claims
from fedcore.algorithms.base import NOTHING
from fedcore.arrays import CPU, F32, F64, Bools, BufferPool, Floats, core, device_of, empty, set_to_zero, zeros
from fedcore.errors import RangeError
from fedcore.kernels import ExactSum, Terms
from fedcore.kernels.forms import CHANGE, H
from fedcore.options import RoundPolicy, Settings
from fedcore.profiling import span
from fedcore.rules import Chain, PrivateMean
from fedcore.rules.private import Ledger
from fedcore.server.update import digest_of_numbers
from fedcore.store import ClientStore
from fedcore.store.client_store import rounding_keys
from fedcore.store.registry import ClientId, Registry

Counters = dict[str, npt.NDArray[np.integer[Any]]]
"""Integer buffers of a model by name, such as BatchNorm's batch counts."""

NO_COUNT, COUNTED, WEIGHTED = 0, 1, 2
"""The source of an update's examples: none (counted as 1), the client, or a weight from the caller."""


UNKNOWN: Any = np.empty(0)  # the default of a column
_empty: Any = partial(np.empty, 0)


@dataclass(kw_only=True, eq=False, repr=False)
class UpdateBatch:
    """k updates as a table of columns with k entries. Only the fold checks that their numbers are finite.

    For small models, one Python object per update would cost more than the fold.
    """

    clients: list[ClientId] = field(default_factory=list)
    vectors: list[Any] = field(default_factory=list)
    """floating[n], or [n_parameters] for a gradient; or a list of tensors, as the layout's slices. None once folded."""
    bases: Sequence[F32 | None] = ()
    """float32[n], the x from which the client started; None if the vector is a difference."""
    scales: F64 = field(default_factory=lambda: UNKNOWN)
    """h = (base - y) scale, or -y scale."""
    claims: Claims = field(default_factory=lambda: Claims(UNKNOWN, UNKNOWN, UNKNOWN))
    """The reported steps, examples and counts."""
    eta_steps: F64 = field(default_factory=lambda: UNKNOWN)
    """eta_i K_i, the length of the path for a gradient of norm 1."""
    has_buffers: Bools = field(default_factory=partial(_empty, np.bool_))
    counters: Sequence[Counters] = ()
    controls: list[Any] = field(default_factory=list)
    """floating[n_parameters], the second vectors; None if the method has none, and once folded."""
    sources: npt.NDArray[np.int8] = field(default_factory=partial(_empty, np.int8))
    """``NO_COUNT``, ``COUNTED`` or ``WEIGHTED``."""
    starts: npt.NDArray[np.int64] = field(default_factory=partial(_empty, np.int64))
    """The round from whose model each client started."""
    orders: npt.NDArray[np.int64] = field(default_factory=partial(_empty, np.int64))
    """The number of each update in the order of arrival, if the round may have several updates of a client."""
    digests: list[str | None] = field(default_factory=list)
    """The digests of the vectors, if rounds are audited."""
    factors: F64 = field(default_factory=lambda: UNKNOWN)
    """The factor of all vectors of an update: 1, or less if the update was clipped."""
    weights: F64 = field(default_factory=lambda: UNKNOWN)
    """w_i, the weight that the method computes from the claims."""
    squares: F64 = field(default_factory=lambda: UNKNOWN)
    """|h_i|^2, after the fold."""

    @classmethod
    def joined(cls, parts: Sequence["UpdateBatch"]) -> "UpdateBatch":
        """Return the updates of several batches, in order."""
        if len(parts) == 1:
            return parts[0]
        return _by_column(parts, _joined) if parts else cls()

    @classmethod
    def cohort(cls, parts: Sequence["UpdateBatch"], settings: Settings, registry: Registry) -> "UpdateBatch":
        """Return the updates of several batches, in the order in which a round with these settings sums them."""
        batch = cls.joined(parts)
        return batch.ordered(registry.numbers(batch.clients)) if settings.sorts_updates else batch

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def bytes(self) -> int:
        """The bytes that the clients sent, without counters."""
        vectors = [tensor for y in self.vectors + self.controls for tensor in (y if isinstance(y, list) else [y])]
        return sum([vector.nbytes for vector in vectors if vector is not None])

    def chosen(self, which: Bools | npt.NDArray[np.int64]) -> "UpdateBatch":
        """Return the updates that ``which`` selects: bool[k], or indices."""
        at: Any = np.flatnonzero(which) if which.dtype == np.bool_ else which
        chosen: UpdateBatch = _by_column([self], lambda columns: _chosen(columns[0], at))
        return chosen

    def ordered(self, numbers: npt.NDArray[np.int64]) -> "UpdateBatch":
        """Return the updates ordered by these numbers, int64[k]."""
        return self.chosen(np.argsort(numbers, kind="stable"))

    def without_vectors(self) -> "UpdateBatch":
        """Return the updates without vectors and second vectors."""
        none: list[Any] = [None] * len(self)
        return replace(self, vectors=none, controls=none)

    def clip(self, factors: F64) -> None:
        """Scale the updates by these factors, float64[k]."""
        self.factors, self.scales = factors, self.scales * factors

    def discounts(self, policy: RoundPolicy, round: int) -> F64 | None:
        """Return s(tau) of the updates in a round, float64[k]; None if the policy has no discount."""
        return policy.discounts(round - self.starts) if policy.discount else None

    def settle(self, squares: F64, settings: Settings | None = None, round: int = 0) -> None:
        """Store |h_i|^2 of the folded updates from ``squares``, float64[k], before the discounts of these settings.

        Drop second vectors, and the vectors, unless a robust rule needs them until the step.
        """
        if settings is not None and (discounts := self.discounts(settings.policy, round)) is not None:
            self.factors, squares = self.factors * discounts, squares * discounts**2
        self.squares = squares
        if settings is not None and settings.rules.robust is not None:
            self.controls = [None] * len(self)
        else:
            self.drop()

    def drop(self) -> None:
        """Drop the vectors."""
        nothing = [None] * len(self.clients)
        self.vectors, self.bases, self.controls = nothing, nothing, nothing

    def longest(self) -> str:
        """Return the end of an error message with the client of the longest update; empty without updates."""
        if not self.clients:
            return ""
        i = int(np.argmax(self.squares))
        return f"; the update with the largest norm, {self.squares[i] ** 0.5:g}, is from client {self.clients[i]!r}"


def _by_column(tables: Sequence[Any], make: Callable[[list[Any]], Any]) -> Any:
    """Return a table that has, for each column, what ``make`` returns for that column of the tables."""
    kind = type(tables[0])
    return kind(**{one.name: make([getattr(table, one.name) for table in tables]) for one in fields(kind)})


def _joined(columns: list[Any]) -> Any:
    if any(column is None for column in columns):
        return None  # shares and ages, which are recomputed
    if isinstance(columns[0], np.ndarray):
        return np.concatenate(columns)
    if isinstance(columns[0], Claims):
        return _by_column(columns, _joined)
    return [entry for column in columns for entry in column]


def _chosen(column: Any, at: npt.NDArray[np.int64]) -> Any:
    if column is None or (isinstance(column, np.ndarray) and not len(column)):
        return column  # not computed yet
    if isinstance(column, np.ndarray):
        return column[at]
    if isinstance(column, Claims):
        return _by_column([column], lambda columns: _chosen(columns[0], at))
    return [column[i] for i in at.tolist()]


class Squares(NamedTuple):
    """The squared norms of k vectors, or of a shard's slices of them."""

    here: F64
    """float64[k], the sums over the elements of this server or shard."""
    partials: F64 | None = None
    """float64[blocks, k], the sums of each block, for the reducer. None without shards."""


class Reducer:
    """Answers questions about whole vectors, here for a server without shards.

    A shard has a subclass that asks the other shards. All shards make the same calls in the same order, each with its
    slice, and get the same answers. They thus make the same decisions.

    Attributes:
        has_buffers: whether the model has float buffers; with shards, one shard has them.
        first: the index of the slice's first parameter in a row.
        place: the description of the shard in its folder; None without shards.
        is_present: whether there are elements here; a shard takes part in sums of groups of which it has none.
    """

    is_present = True

    def __init__(self, *, has_buffers: bool, first: int = 0, place: dict[str, Any] | None = None) -> None:
        self.has_buffers, self.first, self.place = has_buffers, first, place

    def room(self, n: int, k: int = 1) -> F64 | None:
        """Return memory for a kernel's ``partials=`` over k vectors of n elements; None if it is not needed."""
        return None

    def add(self, *squares: Squares) -> list[F64]:
        """Return the squared norms of the whole vectors, with the bits of one kernel call over each."""
        return [one.here for one in squares]

    def count(self, n: int) -> int:
        """Return the number of elements of a whole vector; the slice has n."""
        length = np.array([float(n)])
        return int(self.add(Squares(length, length[None]))[0][0])

    def gram_matrix(self, n: int, bases: Sequence[Any], ys: Sequence[Any], scales: F64) -> F64:
        """Return ``kernels.gram_matrix`` of whole vectors with the bits of one call; the slices have n elements."""
        return kernels.gram_matrix(bases, ys, scales)

    def digests(self, *vectors: Any) -> list[str]:
        """Return ``digest_of_numbers`` of whole vectors."""
        return list(map(digest_of_numbers, vectors))

    def of_first(self, value: Any) -> Any:
        """Return the value of the first shard."""
        return value

    def agree(self, yes: bool) -> bool:
        """Whether all shards answer yes."""
        return yes

    def ready(self) -> None:
        """Wait until all shards are ready to commit, after every step that can fail; else raise ClusterError."""


def combined_square(reducer: Reducer, terms: Sequence[Floats], coefficients: Sequence[float]) -> float:
    """Return ``kernels.combined_square`` of whole vectors; the terms are this shard's slices."""
    room = reducer.room(len(terms[0]))
    square = kernels.combined_square(terms, coefficients, partials=room)
    return float(reducer.add(Squares(np.array([square]), room))[0][0])


PART = 256
"""Rows per kernel call; a call compares outputs with all other arrays, in k^2 steps, and holds Python's lock."""


def exchange(
    acc: Any, *columns: Any, out: Any, keys: Any = None, sums: Any = None, partials: F64 | None = None, **options: Any
) -> F64:
    """Return ``kernels.exchange`` of any number of disjoint rows, with the same bits.

    The columns are bases, ys, scales, weights, old rows, anchors and new rows; the options are those of the kernels.
    """
    bases, ys, _, _, *rows = columns
    squares = np.empty(len(ys))
    with span("fold", None, (acc, bases, ys, *rows, out)):
        for start in range(0, len(ys), PART):
            some = slice(start, start + PART)
            part = partials if partials is None or len(ys) <= PART else np.empty_like(partials[:, some], order="C")
            squares[some] = kernels.exchange(
                out if start else acc,
                *[column[some] for column in columns],
                out=out,
                keys=None if keys is None else keys[some],
                sums=None if sums is None else sums[some],
                partials=part,
                **options,
            )
            if partials is not None and part is not partials:
                partials[:, some] = part
    return squares


def exchange_whole(
    store: ClientStore, clients: Sequence[ClientId], *arguments: Any, reducer: Reducer, **options: Any
) -> Squares:
    """Exchange whole rows, or a shard's slices of them, into the clients' staged rows.

    The store gets the checksums, so that a commit need not read the rows again.
    """
    sums, room = store.room_for_checksums(len(clients)), reducer.room(store.n, len(clients))
    squares = exchange(*arguments, **options, sums=sums, first=reducer.first, partials=room)
    if sums is not None:
        store.note_checksums(clients, sums)
    return Squares(squares, room)


class Lengths(NamedTuple):
    """The squared norms of the terms of k updates, float64[k]; not finite if a sum cannot hold the term."""

    parameters: F64
    """|h_i|^2."""
    buffers: F64 | None = None
    """|x - y_i|^2 over the float buffers, if the model has any; 0 for a gradient."""
    controls: F64 | None = None
    """|control_i|^2, if clients send a second vector."""
    own: F64 | None = None
    """|h_i - o_i|^2 with the client's offset o_i, if the method has offsets and rules compare norms with medians."""


class Result(NamedTuple):
    """The sums of a cohort, as in the papers: views of the sum's memory, valid until its next ``begin``."""

    A: Floats
    """Floating[n_parameters], the sum over the updates."""
    B: F64 | None
    """float64[n_parameters], the sum over the changes of rows; None if the method does not need it."""
    buffers: Floats
    """Floating[n - n_parameters], the weighted sum of x - y over the float buffers."""
    W: float
    """The sum of the weights."""
    buffer_weight: float
    """The sum of the weights of the updates that have buffers."""
    exact: tuple[ExactSum, ExactSum | None] | None = None
    """A and B as exact sums; the fields above are then their float64 values."""
    center: F32 | None = None
    """Float32[n_parameters], the robust combination, if the rule needs it in the next round."""
    ledger: Ledger | None = None
    """The ledger after a private round."""
    times: float = 1.0
    """The factor of ``A``: W for a robust combination, which thus keeps its bits if the step divides by W."""
    plain: F64 | None = None
    """float64[n_parameters], the sum that A would be without a robust rule, for the total; None without a total."""
    at_once: bool = False
    """Whether the sums are those of ``Sum.total_at_once``; the step is then along the mean."""


SumVector: TypeAlias = npt.NDArray[Any] | ExactSum

LARGE = 1 << 20
"""The elements from which a server's vectors share memory between the fold and the step."""
MOST_EXACT = 2.0**50
"""Bound of a round's sum of |w_i h_i| in an exact sum: a quarter of its range, since rows and anchors add to it."""
LONGEST = 1e30
"""Bound of |w_i h_i| in a float32 sum: 10^8 such updates stay in range."""
LEAST_EXACT, LEAST_FLOAT32, LEAST_FLOAT64 = 2.0**-40, 2.0**-100, 2.0**-900
"""The least W that may divide each sum. A term of an exact sum has an error of at most 2^-61, so 2^-21 in the mean."""
FARTHEST = 1e34
"""Bound of the length of a server's step: thousands of steps stay within float32's range."""
SQUARED = 1e15
"""The same bound if an optimizer squares the step."""


def longest_term(population: int) -> float:
    """Return the bound of |w_i h_i| in an exact sum.

    It depends on the number of all clients, not of the cohort, so that the order of updates cannot matter.
    """
    return MOST_EXACT / max(2**11, population)


def longest_update(farthest_gamma: float, *, squared: bool) -> float:
    """Return the greatest norm of an update with which a step of the round cannot leave float32's range.

    A step is at most a few updates long, times gamma; so an accepted update cannot make the round fail. ``squared``:
    whether an optimizer squares the step.
    """
    return min(LONGEST, FARTHEST / farthest_gamma, SQUARED if squared else LONGEST)


class LowWeightsError(RangeError):
    """The weights of a round are too small for its sums, so that a round of the same updates would fail again."""


def _no_direction(round: int | None) -> None:
    """Return None between two rounds."""


class Sum:
    """A and B, the sums over the cohort, for the parameters and the float buffers of one round at a time.

    A fold reads a sum and writes a spare. ``accept`` swaps them after the whole batch is accepted, so that a rejected
    update cannot change a sum. Sums are float64 if the method has rows or a total, which must equal the sum of the rows
    as stored. Exact sums also add weights exactly, so that the order of updates has no effect.

    Args:
        vectors: the pool of the server's float32[n] vectors, which a large model's sum shares with the step.

    Cost: 8 n or 16 n bytes, 16 n more with second vectors, allocated once; 40 n and 40 n if sums are exact.
    """

    def __init__(self, settings: Settings, store: ClientStore, reducer: Reducer, vectors: BufferPool) -> None:
        self._algorithm, self._layout, self._store, self._reducer = settings.algorithm, settings.layout, store, reducer
        algorithm, layout, device = settings.algorithm, settings.layout, settings.device
        self._device = device
        self._exact, p = settings.is_exact, layout.n_parameters
        dtype: Any = settings.accumulator
        if algorithm.keeps_total or algorithm.keeps_rows or self._exact or settings.rules.private:
            dtype = np.float64
        self._value, self._spare = _two(layout.n, dtype, exact=self._exact, device=device)
        self._least = LEAST_EXACT if self._exact else LEAST_FLOAT32 if dtype == "float32" else LEAST_FLOAT64
        self._pool = vectors if dtype == "float32" and layout.n >= LARGE else None  # has the spare between two rounds
        self._changes, self._spare_changes = None, None
        if algorithm.sums_changes:
            self._changes, self._spare_changes = _two(p, np.float64, exact=self._exact, device=device)
        self._read: Floats = empty(layout.n if self._exact else 0, np.float64, device=device)
        self._read_changes: F64 = empty(p if self._exact and algorithm.sums_changes else 0, np.float64, device=device)
        self._has_value = True  # if not, the value counts as zero
        self._times = abs(algorithm.adds.h) if algorithm.row == NOTHING else 1.0
        self._n_tensors = sum(piece.kind == "parameter" for piece in layout.slices)
        self._weight = self._buffer_weight = 0.0
        self._weights: list[float] = []
        self._buffer_weights: list[float] = []
        sent = algorithm.direction
        self._from_row = sent.from_row if algorithm.keeps_rows else 0.0
        self._has_offsets = bool(self._from_row or sent.from_mean or sent.from_momentum)
        self._direction_of: Callable[[int | None], F32 | None] = _no_direction
        self._start_of: Callable[[int], Any] = _no_direction

    def begin(
        self,
        settings: Settings,
        round: int,
        direction_of: Callable[[int | None], F32 | None],
        start_of: Callable[[int], F32],
        offset: F32 | None,
        longest: tuple[float, float],
        distance: float,
    ) -> None:
        """Start a round with empty sums. ``offset`` is sent to every client; None for zero.

        The rules and the policy of ``settings`` may differ from those of earlier rounds. ``longest`` has the greatest
        norms of an update and of a term of an exact sum.
        ``distance`` is the usual factor of offsets in h_i: 1 for gradients, eta K if models are averaged.
        ``direction_of(t)`` returns v[t], float32[n_parameters], if rows refer to round t, else None. ``start_of(t)``
        returns the model of round t as it was sent, float32[n].
        """
        self._direction_of, self._start_of = direction_of, start_of
        self._round, self._offset = round, offset
        self._longest, term = longest
        self._longest_term = term if self._exact else LONGEST
        self._policy, self._distance = settings.policy, distance
        self._centers = self._has_offsets and "medians" in settings.rules.needs
        self._has_value = False
        if self._spare is None and self._pool is not None:
            self._spare = self._pool.get()
        if self._changes is not None:
            _clear(self._changes)
        self._weight = self._buffer_weight = 0.0
        self._weights, self._buffer_weights = [], []

    def forget(self) -> None:
        """Drop the round's references to v[t] and models, which may be in files."""
        self._direction_of, self._start_of = _no_direction, _no_direction

    def try_fold(self, batch: UpdateBatch, *, again: bool = False) -> Lengths:
        """Fold a batch into the spare sums, stage its rows, and measure it; ``accept`` or ``refold`` must follow.

        ``again``: whether the rules have decided on the batch.
        """
        own = self._own_squares(batch) if self._centers and not again else None
        squares = [self._fold_parameters(batch)]
        if self._reducer.has_buffers:
            squares.append(self._fold_buffers(batch))
        controls = None if self._changes is None else self._fold_changes(batch)
        if controls is not None and self._algorithm.second_vector is not None:
            squares.append(controls)
        whole = iter(self._reducer.add(*squares))
        parameters = self._bounded(next(whole), batch.weights, self._times)
        buffers = self._bounded(next(whole), batch.weights) if self._reducer.has_buffers else None
        second = next((self._bounded(rest, np.ones(len(batch))) for rest in whole), None)
        return Lengths(parameters, buffers, second, own)

    def accept(self, batch: UpdateBatch) -> None:
        """Add the batch of ``try_fold``."""
        self._value, self._spare, self._has_value = self._spare, self._value, True
        self._changes, self._spare_changes = self._spare_changes, self._changes
        self._count(batch)

    def refold(self, batch: UpdateBatch, accepted: Bools, factors: F64) -> tuple[UpdateBatch, F64]:
        """Add the updates of ``try_fold`` that ``accepted``, bool[k], selects, scaled by these factors, float64[k].

        Return them with their |h_i|^2. Only the difference h_i - o_i to the offset is scaled.

        Cost: with offsets, n elements of memory for each update with a factor below 1.
        """
        for i in np.flatnonzero(~accepted).tolist():
            self._store.unstage(batch.clients[i])
        batch, squares = batch.chosen(accepted), np.empty(0)
        if len(batch):
            self._scale(batch, factors[accepted])
            squares = self.try_fold(batch, again=True).parameters
            self.accept(batch)
        return batch, squares

    def total_at_once(self, batch: UpdateBatch) -> Result | None:
        """Return the sums of a whole cohort that only adds h, and measure it; None if an update may not count."""
        ys, scales, weights = batch.vectors, batch.scales, batch.weights
        W: float = core.column_sum(0.0, weights, None)
        if not self._least <= W:
            return None
        with span("fold", None, (batch.bases, ys, self._spare)):
            squares = kernels.accumulate(None, batch.bases, ys, scales, weights, out=self._spare)
        if not self._fits(squares, weights):
            return None
        batch.settle(squares)
        return Result(self._spare, None, self._spare[:0], W, W, at_once=True)

    def join(self, words: ExactSum, batch: UpdateBatch, changes: ExactSum | None = None) -> bool:
        """Add an exact sum of another server over parameters and buffers, with its updates; return False on overflow.

        ``words`` are in host memory, and ``changes`` too, the sum of the changes of rows. Cost: reads 32 n bytes and
        writes 16 n; 16 n bytes of memory more on a device; twice that with ``changes``.
        """
        if fits := self.try_join(words, changes):
            self.accept(batch)
        return fits

    def try_join(self, words: ExactSum, changes: ExactSum | None = None) -> bool:
        """Add an exact sum into the spare sums, for ``accept``; return False on overflow. See ``join``."""
        self._zero()
        fits = True
        for value, spare, more in ((self._value, self._spare, words), (self._changes, self._spare_changes, changes)):
            if more is None or value is None:
                continue
            if (device := device_of(value.high)) != CPU:
                more = more.copied(device=device)
            fits &= kernels.combine_exact([value, more], [1, 1], spare) is not None
        return self._reducer.agree(fits)

    def words(self) -> tuple[ExactSum, ExactSum | None]:
        """Return copies in host memory of the exact sum over parameters and buffers, and of that of the changes."""
        self._zero()
        return self._value.copied(device=CPU), None if self._changes is None else self._changes.copied(device=CPU)

    def result(self) -> Result:
        """Return the sums over all accepted updates."""
        self._zero()
        if self._pool is not None:
            self._spare = None  # its memory is free for the step
        p = self._layout.n_parameters
        if not self._exact:
            return Result(self._value[:p], self._changes, self._value[p:], self._weight, self._buffer_weight)
        kernels.read_exact(self._value, self._read)
        changes = None if self._changes is None else kernels.read_exact(self._changes, self._read_changes)
        weights = math.fsum(self._weights), math.fsum(self._buffer_weights)
        exact = self._value.cut(slice(0, p)), self._changes
        return Result(self._read[:p], changes, self._read[p:], *weights, exact=exact)

    def precise(self, result: Result, share: float) -> Result:
        """Return the sums, without weight for the buffers if theirs is so small that a mean of them would lose digits.

        Raises:
            LowWeightsError: W is so small; ``share`` is about 1 / W.
        """
        if (share := abs(share * result.times)) and (W := 1 / share) < self._least:
            raise LowWeightsError(
                f"weights: they sum to {W:g} in round {self._round}; below {self._least:g} the sums lose digits, so x "
                'stays as it was; scale weights and examples up (QFedAvg: lower q), or use accumulator="float64"'
            )
        return result if result.buffer_weight >= self._least else result._replace(buffer_weight=0.0)

    def total(
        self, batch: UpdateBatch, rules: Chain, ledger: Ledger, center: F32 | None, *, has_noise: bool = False
    ) -> Result:
        """Return the sums of all accepted updates, with the noise of a private mean, or their robust combination.

        Args:
            batch: the updates, in the cohort's order; with a robust rule they have their vectors.
            ledger, center: those of the last round.
            has_noise: whether the clients added the noise.

        Raises:
            TooFewUpdatesError: the robust rule needs more updates.
        """
        if (private := rules.at(ledger).private) is not None:
            return self.noised(batch, private, ledger, has_noise=has_noise)
        if rules.robust is None or not len(batch):
            return self.result()
        return self.combined(batch, rules, center)

    def noised(self, batch: UpdateBatch, rule: PrivateMean, ledger: Ledger, *, has_noise: bool) -> Result:
        """Return ``result`` with the rule's noise, unless it has it, and with the expected number of clients as W."""
        result = self.result()
        if has_noise:
            return result._replace(W=rule.expected, ledger=ledger.after(rule.rate, rule.noise, ledger.clip))
        total: Any = result.A  # float64 for these rules
        n, first = self._reducer.count(len(total)), self._reducer.first
        with span("noise", None, (total,)):
            ledger = rule.add_noise(total, batch.factors, ledger, self._round, n=n, first=first)
        return result._replace(W=rule.expected, ledger=self._reducer.of_first(ledger))  # its clip has noise

    def combined(self, batch: UpdateBatch, rules: Chain, previous: F32 | None) -> Result:
        """Return ``result`` with the robust combination of the updates in place of their weighted mean.

        The rule acts on the terms of A, so on differences from rows and anchors for methods that have them. Float
        buffers are combined in the same way; an update without buffers counts as one that left them unchanged.

        Args:
            batch: all accepted updates with their vectors, in the cohort's order.
            previous: ``Result.center`` of the last round, or None.
        """
        p = self._layout.n_parameters
        more: list[F32] = []
        if "previous" in rules.needs:
            more = [zeros(p, device=self._device) if previous is None else previous]
        form = self._algorithm.sums
        terms: tuple[Any, Any, F64] = (*self._cut_updates(batch, slice(0, p)), batch.scales)
        if form.r or form.q:
            vectors_of_A = list(self._terms(batch, [form] * len(batch), self._anchors(batch.clients)))
            terms = [None] * len(batch), vectors_of_A, -np.ones(len(batch))
        vectors = _with(*terms, more)
        combination = rules.combination(len(batch), lambda: self._reducer.gram_matrix(p, *vectors), self._round)
        result = self.result()
        if self._algorithm.keeps_total:
            plain: Any = result.A
            result = result._replace(A=self._spare[:p], plain=plain)
        combination.write(*vectors, result.A)
        result = result._replace(times=result.W * (1.0 if form.r or form.q else form.h))
        if more:
            result = result._replace(center=kernels.combine([result.A], [1.0], empty(p, device=self._device)))
        if result.buffer_weight > 0 and self._layout.n > p:
            unchanged = zeros(self._layout.n - p, device=self._device)
            bases, ys = self._cut_updates(batch, slice(p, self._layout.n))
            ys = [y if has else unchanged for y, has in zip(ys, batch.has_buffers, strict=True)]
            bases = [base if has else None for base, has in zip(bases, batch.has_buffers, strict=True)]
            vectors = _with(bases, ys, batch.factors, [unchanged] * len(more))
            combination.write(*vectors, result.buffers)
            result = result._replace(buffer_weight=1.0)
        return result

    def _terms(self, batch: UpdateBatch, forms: Sequence[Terms], anchors: Sequence[F32 | None]) -> Iterator[F32]:
        """Yield form.h h_i + form.r r_i + form.q q_i of each update, float32[n_parameters], with the anchors q_i."""
        updates = self._cut_updates(batch, slice(0, self._layout.n_parameters))
        for client, base, y, scale, form, anchor in zip(
            batch.clients, *updates, batch.scales.tolist(), forms, anchors, strict=True
        ):
            term: F32 = empty(self._layout.n_parameters, device=self._device)
            row = self._store.read(client) if form.r else None
            given = [(vector, c) for vector, c in ((row, form.r), (anchor, form.q)) if vector is not None and c]
            acc = kernels.combine([vector for vector, _ in given], [c for _, c in given], term) if given else None
            kernels.accumulate(acc, [base], [y], np.array([scale]), np.array([form.h]), out=term)
            yield term

    def _around_offsets(self, batch: UpdateBatch, of_h: F64, of_offset: F64) -> Iterator[F32]:
        """Yield ``of_h`` h_i + ``of_offset`` o_i of each update, with the offset o_i that the client added."""
        pairs = zip(of_h.tolist(), (of_offset * self._distance).tolist(), strict=True)
        forms = [Terms(h=h, r=offset * self._from_row, q=offset) for h, offset in pairs]
        return self._terms(batch, forms, [self._offset] * len(batch))

    def _scale(self, batch: UpdateBatch, factors: F64) -> None:
        """Scale h_i - o_i of each update, its buffers and its second vector."""
        n, p = self._layout.n, self._layout.n_parameters
        clipped = np.flatnonzero(factors < 1) if self._centers else np.empty(0, np.int64)
        some = batch.chosen(clipped)
        terms = self._around_offsets(some, factors[clipped], 1 - factors[clipped])
        batch.clip(factors)
        batch.vectors, batch.bases, batch.scales = list(batch.vectors), list(batch.bases), batch.scales.copy()
        for i, vector, base, y in zip(clipped.tolist(), terms, *self._cut_updates(some, slice(p, n)), strict=True):
            if p < n and batch.has_buffers[i]:
                whole: F32 = empty(n, device=self._device)
                kernels.combine([vector], [1.0], whole[:p])
                kernels.accumulate(None, [base], [y], -np.ones(1), np.ones(1), out=whole[p:])
                vector = whole
            batch.vectors[i], batch.bases[i], batch.scales[i] = vector, None, -1.0

    def _own_squares(self, batch: UpdateBatch) -> F64:
        """Return |h_i - o_i|^2, float64[k]. Cost: reads the updates, their rows and the offset once more."""
        terms = self._around_offsets(batch, np.ones(len(batch)), -np.ones(len(batch)))
        return np.array([combined_square(self._reducer, [term], [1.0]) for term in terms])

    def _anchors(self, clients: Sequence[ClientId]) -> list[F32 | None]:
        """Return the vectors q_i."""
        if self._algorithm.keeps_history:
            return list(map(self._direction_of, self._store.rounds_of(clients)))
        return [self._offset if self._algorithm.reads_offset else None] * len(clients)

    def _count(self, batch: UpdateBatch) -> None:
        """Add the weights of a batch."""
        if self._exact:
            self._weights += batch.weights.tolist()
            self._buffer_weights += batch.weights[batch.has_buffers].tolist()
        # One by one, so that fractions have the same bits for every batch size.
        self._weight = core.column_sum(self._weight, batch.weights, None)
        if self._layout.n > self._layout.n_parameters:
            with_buffers = batch.weights[batch.has_buffers]
            self._buffer_weight = core.column_sum(self._buffer_weight, with_buffers, None)

    def _fold_parameters(self, batch: UpdateBatch) -> Squares:
        """Fold A, and stage the rows if they depend on y."""
        if self._algorithm.row == NOTHING:
            return self._accumulate(batch, slice(0, self._layout.n_parameters), batch.scales)
        self._zero()
        return self._exchange(self._value, self._spare, batch, batch.weights, self._algorithm.adds)

    def _fold_buffers(self, batch: UpdateBatch) -> Squares:
        """Fold x - y over the float buffers. A gradient has none; with shards, one shard has them."""
        which, squares = batch.has_buffers, np.zeros(len(batch))
        part = slice(self._layout.n_parameters, self._layout.n)
        room = self._reducer.room(part.stop - part.start, len(batch))
        if part.stop > part.start:
            chosen = batch if which.all() else batch.chosen(which)
            folded = self._accumulate(chosen, part, chosen.factors)
            squares[which] = folded.here
            if room is not None:
                room[:] = 0
                room[:, which] = folded.partials
        return Squares(squares, room)

    def _fold_changes(self, batch: UpdateBatch) -> Squares:
        """Fold B: the changes of the rows, computed here or reported by clients that keep their rows."""
        ones, out = np.ones(len(batch)), self._spare_changes
        if self._algorithm.second_vector is None:
            return self._exchange(self._changes, out, batch, ones, CHANGE)
        none, minus = [None] * len(batch), -batch.factors
        if not self._algorithm.keeps_rows:
            return self._add(self._changes, none, batch.controls, minus, ones, out)
        old, new = self._store.replace_rows(batch.clients)
        arguments = self._changes, none, batch.controls, minus, ones, old, none, new
        keys, reducer = self._keys(batch), self._reducer
        return exchange_whole(self._store, batch.clients, *arguments, out=out, keys=keys, reducer=reducer)

    def _exchange(self, acc: Any, out: Any, batch: UpdateBatch, weights: F64, adds: Terms) -> Squares:
        """Stage the rows, and add the terms of ``adds`` to a sum over the parameters."""
        p, clients = self._layout.n_parameters, batch.clients
        if runs := _runs(batch.vectors):
            squares = np.empty(len(batch))
            for run in runs:
                some = batch.chosen(np.arange(run.start, run.stop))
                squares[run] = self._exchange(out if run.start else acc, out, some, weights[run], adds).here
            return Squares(squares)
        old, new = self._store.replace_rows(clients)
        anchors = self._anchors(clients)
        options: dict[str, Any] = {"row": self._algorithm.row, "adds": adds, "keys": self._keys(batch)}
        squares = np.zeros(len(batch))
        for piece, bases, ys in self._pieces(batch, p):
            vectors, to = (_part(acc, piece), bases, ys, batch.scales, weights), _part(out, piece)
            if piece == slice(0, p):
                rows = old, anchors, new
                return exchange_whole(self._store, clients, *vectors, *rows, out=to, reducer=self._reducer, **options)
            squares += exchange(*vectors, _cut(old, piece), _cut(anchors, piece), _cut(new, piece), out=to, **options)
        return Squares(squares)

    def _keys(self, batch: UpdateBatch) -> npt.NDArray[np.uint64] | None:
        return rounding_keys(self._store, "a reply", self._round, batch.clients)

    def _accumulate(self, batch: UpdateBatch, part: slice, scales: F64) -> Squares:
        """Fold h over the parameters, or x - y over the float buffers, in one pass."""
        bases, ys = self._cut_updates(batch, part)
        acc, weights = _part(self._value, part) if self._has_value else None, batch.weights
        if (discounts := batch.discounts(self._policy, self._round)) is not None:
            weights = weights * discounts
        if part.start == 0 and self._algorithm.adds != H:
            weights = weights * self._algorithm.adds.h
        return self._add(acc, bases, ys, scales, weights, _part(self._spare, part))

    def _cut_updates(self, batch: UpdateBatch, part: slice) -> tuple[Sequence[Any], list[Any]]:
        """Return the bases and ys over the parameters, or over the float buffers.

        New buffers are a mean of those that clients sent, so their base is today's x, wherever a client started.
        """
        if self._layout.n == self._layout.n_parameters:  # cutting would take as long as a small fold
            return batch.bases, batch.vectors
        tensors = slice(None, self._n_tensors) if part.start == 0 else slice(self._n_tensors, None)
        bases, is_late = _cut(batch.bases, part), (batch.starts < self._round) & (batch.scales > 0)  # not of ``_scale``
        for i in np.flatnonzero(is_late).tolist() if part.start else ():
            base = self._start_of(self._round)[part]
            if bases[i] is None:  # a difference from an earlier model
                earlier = self._start_of(int(batch.starts[i]))[part]
                base = kernels.combine([base, earlier], [1.0, -1.0], empty(len(base), device=self._device))
            bases[i] = base
        return bases, [y[tensors] if isinstance(y, list) else y[part] for y in batch.vectors]

    def _add(self, acc: Any, bases: Sequence[Any], ys: Any, scales: F64, weights: F64, out: Any) -> Squares:
        """Fold vectors without changing rows."""
        if runs := _runs(ys):
            squares = np.empty(len(ys))
            for run in runs:
                some = bases[run], ys[run], scales[run], weights[run]
                squares[run] = self._add(out if run.start else acc, *some, out).here
            return Squares(squares)
        room = self._reducer.room(len(out.high if self._exact else out), len(ys))
        with span("fold", None, (acc, bases, ys, out)):
            return Squares(kernels.accumulate(acc, bases, ys, scales, weights, out=out, partials=room), room)

    def _zero(self) -> None:
        """Write zeros if the sum is empty; a first fold of ``_accumulate`` does not need them."""
        if not self._has_value:
            _clear(self._value)
            self._has_value = True

    def _pieces(self, batch: UpdateBatch, stop: int) -> Iterator[tuple[slice, Sequence[Any], Sequence[Any]]]:
        """Yield the bases and ys over the parameters: at once, or by tensor if an update has separate tensors."""
        if list not in map(type, batch.vectors):
            part = slice(0, stop)
            if stop == self._layout.n:  # nothing to cut
                yield part, batch.bases, batch.vectors
            else:
                yield part, _cut(batch.bases, part), _cut(batch.vectors, part)
            return
        for i, piece in enumerate(self._layout.slices):
            if piece.start < piece.stop <= stop:
                part = slice(piece.start, piece.stop)
                ys = [y[i] if isinstance(y, list) else y[part] for y in batch.vectors]
                yield part, _cut(batch.bases, part), ys

    def _fits(self, squares: F64, weights: F64, times: float = 1.0) -> bool:
        """Whether the sum could hold the longest update with the largest weight."""
        most, heaviest = core.column_range(squares)[1], core.column_range(weights)[1]
        return (
            most >= 0 and (norm := math.sqrt(most)) < self._longest and norm * (heaviest * times) < self._longest_term
        )

    def _bounded(self, squares: F64, weights: F64, times: float = 1.0) -> F64:
        """Return the squares, made infinite for updates that could move a sum or the step beyond float32's range."""
        if not self._fits(squares, weights, times):
            with np.errstate(over="ignore", invalid="ignore"):  # a NaN does not fit either
                norms = np.sqrt(squares)
                squares[~((norms * (weights * times) < self._longest_term) & (norms < self._longest))] = np.inf
        return squares


def _runs(vectors: Sequence[Any]) -> list[slice]:
    """Return the runs of flat vectors and of lists of tensors among some vectors; empty if all have one form.

    In one kernel call, all vectors would be measured like the lists, tensor by tensor. The last bits of a norm must not
    depend on the other updates of a batch.
    """
    if list not in map(type, vectors):
        return []
    forms = [isinstance(y, list) for y in vectors]
    if all(forms):
        return []
    starts = [0, *(i for i in range(1, len(forms)) if forms[i] != forms[i - 1]), len(forms)]
    return [slice(*ends) for ends in pairwise(starts)]


def _two(n: int, dtype: Any, *, exact: bool, device: str) -> tuple[Any, Any]:
    if exact:
        return ExactSum.zeros(n, device=device), ExactSum.empty(n, device=device)
    return zeros(n, dtype, device=device), empty(n, dtype, device=device)


def _with(bases: Sequence[Any], ys: list[Any], scales: F64, more: list[F32]) -> tuple[Any, Any, F64]:
    """Return updates with further vectors h."""
    none = [None] * len(more)
    return [*bases, *none], [*ys, *more], np.append(scales, [-1.0] * len(more))


def _part(sum: SumVector, part: slice) -> SumVector:
    return sum.cut(part) if isinstance(sum, ExactSum) else sum[part]


def _clear(sum: SumVector) -> None:
    for words in sum if isinstance(sum, ExactSum) else [sum]:
        set_to_zero(words)


def _cut(vectors: Sequence[Any], part: slice) -> list[Any]:
    return [vector if vector is None else vector[part] for vector in vectors]
