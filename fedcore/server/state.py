"""The state of a server: the snapshot and the clients' rows, changed together by a commit."""

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from logging import INFO, WARNING, Logger
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.algorithms import Cohort, check_step
from fedcore.arrays import (
    CPU,
    F32,
    F64,
    Floats,
    Recycled,
    copied,
    device_of,
    device_ordinal,
    empty,
    freeze,
    ieee,
    view_of,
    zeros,
)
from fedcore.errors import ArrayError, CorruptionError, RangeError, RoundError, StoreError
from fedcore.interrupts import uninterrupted
from fedcore.kernels import ExactSum, Linear
from fedcore.native import core
from fedcore.options import Callback, Settings
from fedcore.profiling import begin, span
from fedcore.rules import ClaimWindows
from fedcore.server.aggregation import (
    Aggregator,
    Counters,
    LocalReducer,
    Opened,
    Reducer,
    Result,
    Sum,
    UpdateBatch,
    combined_square,
    exchange_whole,
    longest_term,
    longest_update,
)
from fedcore.server.broadcast import SentVectors, WholeVectors
from fedcore.server.report import checked
from fedcore.server.step import (
    History,
    ModelStep,
    Population,
    PreparedStep,
    Sizes,
    Snapshot,
    checked_sizes,
    claimless_gamma,
    counted_steps,
    farthest_gamma,
    fold_history,
    step_length,
)
from fedcore.server.update import as_sent, digest_of_text, in_float32
from fedcore.server.validation import Buffers, grown
from fedcore.store import ClientStore
from fedcore.store.client_store import rounding_keys
from fedcore.store.reader import ReadRows
from fedcore.store.registry import ClientId, Registry, canonical

# The way of what clients send from host memory to the server's device.


class Upload:
    """Copies vectors that lie in host memory to a device, in memory that is used again; what is there stays as it is.

    Args:
        device: the device.
        lengths: of the vectors that come.
        most: how many of each length are copied at a time.

    Cost: 4 n bytes on the device for each of them.
    """

    def __init__(self, device: str, lengths: set[int], most: int) -> None:
        self._device, self.most = device, most
        self._copies = core.CopyStream(device_ordinal(device), min(64 << 20, 8 * max(lengths)))
        self._memory = {length: Recycled(length, most=most, device=device) for length in lengths}

    def portions(self, replies: UpdateBatch) -> list[UpdateBatch]:
        """The replies, as many at a time as may be copied; all at once where their vectors are on the device."""
        k = len(replies)
        if k <= self.most or all(map(self._is_there, [*replies.vectors, *replies.controls])):
            return [replies]
        place = np.arange(k) // self.most
        return [replies.chosen(place == portion) for portion in range(place[-1] + 1)]

    def bring(self, replies: UpdateBatch) -> None:
        """Put copies on the device in the place of the replies' vectors that lie in host memory."""
        replies.vectors, replies.controls = self.vectors(replies.vectors), self.vectors(replies.controls)

    def vectors(self, ys: Sequence[Any]) -> list[Any]:
        """The vectors, float32 on the device where they lay in host memory; None stays None.

        Args:
            ys: each one vector, or a list of tensors.
        """
        there = [y if self._is_there(y) else self._copied(y) for y in ys]
        self._copies.join()
        return there

    def _is_there(self, y: Any) -> bool:
        if isinstance(y, list):
            return all(device_of(tensor) == self._device for tensor in y)
        return y is None or device_of(y) == self._device

    def _copied(self, y: Any) -> Any:
        if not isinstance(y, list):
            return self._parts([y])[0]
        here = iter(self._parts([part for part in y if not self._is_there(part)]))
        return [part if self._is_there(part) else next(here) for part in y]  # apart as they were: norms are of parts

    def _parts(self, parts: Sequence[Any]) -> list[Any]:
        """Copies on the device of some parts of a vector, one behind the other."""
        lengths = [int(np.prod(part.shape)) for part in parts]
        due = sum(lengths)
        memory: Any = self._memory[next(length for length in sorted(self._memory) if length >= due)].take()
        copies, start = [], 0
        for part, length in zip(parts, lengths, strict=True):
            copies.append(memory[start : start + length])
            with np.errstate(over="ignore"):  # to an infinity, for which the reply is refused
                self._copies.upload(in_float32(part).reshape(-1), copies[-1])
            start += length
        return copies


# The way of a server's vectors from its device to a store's files.


Vector = npt.NDArray[Any]


class Download:
    """Copies vectors from a device into memory that is used again, all of them behind one wait.

    Args:
        device: the device.
        largest: bytes of the longest vector.

    Cost: as much host memory as the vectors of one commit take, and two pinned buffers.
    """

    def __init__(self, device: str, largest: int) -> None:
        self._copies = core.CopyStream(device_ordinal(device), min(64 << 20, largest))
        self._memory: dict[tuple[int, str], list[Vector]] = {}

    def brought(self, vectors: Mapping[str, Any]) -> dict[str, Vector]:
        """The vectors by name in host memory: themselves, or copies that last until the next call."""
        found: dict[str, Vector] = {}
        used: dict[tuple[int, str], int] = {}
        for name, vector in vectors.items():
            if isinstance(vector, np.ndarray):
                found[name] = vector
                continue
            kind = vector.size, vector.dtype.name
            memory, place = self._memory.setdefault(kind, []), used.get(kind, 0)
            if place == len(memory):
                memory.append(empty(vector.size, vector.dtype))
            found[name], used[kind] = memory[place], place + 1
            self._copies.download(vector, found[name])
        self._copies.wait()
        for kind, memory in self._memory.items():
            del memory[used.get(kind, 0) :]
        return found


# Newcomers of a round: clients that count from their first update that does, not from when they were asked.


NewClients = Iterable[ClientId] | Mapping[ClientId, int]
"""Ids, with n_k by id where clients have sizes."""


class Newcomers:
    """The clients that may come with the open round.

    They are registered while it lasts, which no commit has seen yet. Those that it heard stay; the others leave before
    the commit, or all of them with a round that is given up.

    Attributes:
        before: how many clients there were before them.
        population: with them; None where there are none.
        share_of_total: n with all of them over n with those that were heard: the shares p^k of the round were of the
            former and are due of the latter, both the same number of times for every client. 1 where nobody has a size,
            and where the method weighs by none.

    Args:
        store: of the rows, with the registry.
        weighs_shares: whether the method's weights are of shares.
    """

    def __init__(self, store: ClientStore, *, weighs_shares: bool) -> None:
        self._store, self._weighs_shares = store, weighs_shares
        self._ids: list[ClientId] = []
        self._sizes: list[int] | None = None
        self.before = 0
        self.population: Population | None = None
        self.share_of_total = 1.0

    def admit(self, clients: Sequence[ClientId], sizes: list[int] | None, now: Snapshot) -> None:
        """Register them for the open round.

        Raises:
            RangeError, UnknownClientError: one is registered already, or named twice, or is no id; none is then.
        """
        self.before, self.share_of_total = len(self._store.registry), 1.0
        if not clients:
            return
        with uninterrupted():
            self._ids = list(map(canonical, clients))  # before they are: whatever comes between, they are forgotten
            try:
                self._store.add_all(self._ids)
                self._sizes = sizes
                self.population = self._with(now, self._ids, sizes)
            except BaseException:
                self.forget()
                raise

    def settle(self, heard: Iterable[ClientId], now: Snapshot) -> Population:
        """Let those go that the round did not hear; returns the population of those that there are then."""
        if self.population is None:
            return now.population
        came = self._came(set(heard))
        for client in self._ids:
            if client not in came:
                self._store.forget(client)
        sizes = None if self._sizes is None else [came[client] for client in came]
        population = self._with(now, [*came], sizes)
        if population.total and self._weighs_shares:
            self.share_of_total = self.population.total / population.total
        return population

    def forget(self) -> None:
        """Forget them: the round was given up. One whose commit counts has nobody to forget."""
        if self._ids:
            self._store.rollback()
        self._ids, self._sizes, self.population = [], None, None

    def _came(self, heard: set[ClientId]) -> dict[ClientId, int]:
        sizes = self._sizes or [0] * len(self._ids)
        return {client: size for client, size in zip(self._ids, sizes, strict=True) if client in heard}

    def _with(self, now: Snapshot, clients: Sequence[ClientId], sizes: list[int] | None) -> Population:
        if not clients:
            return now.population
        numbers = self._store.registry.numbers(list(clients)).tolist()
        # Who comes with the first round was there from the start.
        return now.population.with_clients(numbers, clients, sizes, now.round_number or None)


# A running total without a client: what it has in T is taken off, from integers to the last bit.


def without_client(
    now: Snapshot, client: ClientId, store: ClientStore, part: Callable[[ClientId], Floats], *, corrections: bool
) -> Snapshot:
    """The snapshot with a T that has nothing of a client, as a new vector.

    Args:
        part: what a client has in T: its row, or its correction v[t_i] - r_i.
        corrections: which of the two.

    Where the client's row is damaged, nobody knows what its part was: the others' are added up anew.

    Raises:
        CorruptionError: a row is longer than an exact sum holds.

    Cost: reads one row; all of them where it is damaged.
    """
    if now.exact_total is not None:
        exact = _exact_without(now.exact_total, client, store, now.history if corrections else None)
        return now._replace(total=kernels.read_exact(exact), exact_total=exact)
    total, device = now.total, device_of(now.x)
    assert total is not None
    try:
        without: F64 = empty(len(total), np.float64, device=device)
        return now._replace(total=kernels.combine([total, part(client)], [1.0, -1.0], without))
    except CorruptionError:
        rest: F64 = zeros(len(total), np.float64, device=device)
        for other in store.registry:
            with suppress(CorruptionError):  # a part that can be read no more is in no sum either
                if other != client:
                    kernels.combine([rest, part(other)], [1.0, 1.0], rest)
        return now._replace(total=rest)


def _exact_without(total: ExactSum, client: ClientId, store: ClientStore, history: History | None) -> ExactSum:
    """T as integers without a client's part: of the history, where it is a correction."""
    try:
        return _with(total, client, -1, store, history)
    except CorruptionError:
        rest = ExactSum.zeros(len(total.high))
        for other in store.registry:
            with suppress(CorruptionError):
                if other != client:
                    rest = _with(rest, other, 1, store, history)
        return rest


def _with(total: ExactSum, client: ClientId, times: int, store: ClientStore, history: History | None) -> ExactSum:
    """The total and so many times a client's part."""
    if store.row(client) is None:
        return total
    terms: list[Any] = [total, store.read(client)]
    coefficients = [1, times if history is None else -times]
    if history is not None and (v := history.get(store.round_of(client))) is not None:
        terms, coefficients = [*terms, v], [*coefficients, times]
    found = kernels.combine_exact(terms, coefficients)
    if found is None:
        raise CorruptionError(f"client {client!r}: expected a row that an exact sum holds, got a longer one")
    return found


# A start from rows that are not zero: the clients' gradients at x_0.


def require_start(settings: Settings, now: Snapshot, reducer: Reducer) -> None:
    """Check that a server can be given gradients: before its first round, and once.

    Raises:
        RoundError, RangeError: as ``Server.warm_start``.
    """
    vectors = [v for v in (now.momentum, now.total) if v is not None]
    if now.round_number or any(combined_square(reducer, [v], [1.0]) > 0 for v in vectors):
        raise RoundError(
            "warm_start: expected a server before its first round and its first warm start, got one after it"
        )
    if not settings.algorithm.takes_warm_start:
        raise RangeError(
            "warm_start: expected a method that can start from gradients (SCAFFOLD, MIFA or a -VR), got"
            f" {settings.algorithm}"
        )


class WarmStart:
    """The gradients that clients start from.

    Args:
        directions: of which g_0 takes its memory.
        gradients: float32[n_parameters] by client.
        upload: what brings them to the server's device; None where that is the CPU.

    Raises:
        DtypeError, ShapeError, ArrayError: one is not what is said above.
    """

    def __init__(
        self,
        settings: Settings,
        store: ClientStore,
        reducer: Reducer,
        directions: Recycled,
        gradients: Mapping[ClientId, Any],
        upload: Upload | None,
    ) -> None:
        self._settings, self._store, self._reducer, self._directions = settings, store, reducer, directions
        self._clients, k = list(gradients), len(gradients)
        ys = list(gradients.values())
        self._ys = ys if upload is None else upload.vectors(ys)
        self._mean: F64 = empty(settings.layout.n_parameters, np.float64, device=settings.device)
        squares = kernels.accumulate(None, [None] * k, self._ys, -np.ones(k), np.ones(k) / k, out=self._mean)
        if not np.isfinite(squares).all():
            bad = self._clients[int(np.flatnonzero(~np.isfinite(squares))[0])]
            raise ArrayError(f"gradients[{bad!r}]: expected finite numbers, got a NaN or an infinity")

    def after(self, now: Snapshot) -> Snapshot:
        """The snapshot that starts from them; their rows are staged."""
        after, algorithm, mean, share = now, self._settings.algorithm, self._mean, 1.0
        if now.total is not None:
            if now.exact_total is not None:
                exact = ExactSum(*map(copied, now.exact_total))
                self._add(exact)
                after, total = after._replace(exact_total=exact), kernels.read_exact(exact)
            else:
                total = copied(now.total)
                self._add(total)
            after, mean, share = after._replace(total=total), total, 1 / len(self._store.registry)
        if algorithm.direction.b:
            momentum = kernels.combine([mean], [share], self._directions.take())
            after = after._replace(momentum=momentum)
        return after

    def _add(self, total: Any) -> None:
        """Add the gradients to a total, as rows where the method keeps them."""
        k = len(self._clients)
        none, minus, ones = [None] * k, -np.ones(k), np.ones(k)
        if self._settings.algorithm.keeps_rows:
            new = self._store.stage_all(self._clients)
            keys = rounding_keys(self._store, "a warm start", 0, self._clients)
            arguments = total, none, self._ys, minus, ones, none, none, new
            exchange_whole(self._store, self._clients, *arguments, out=total, keys=keys, reducer=self._reducer)
        elif isinstance(total, ExactSum):
            kernels.accumulate_exact(total, none, self._ys, minus, ones, out=total)
        else:
            kernels.accumulate(total, none, self._ys, minus, ones, out=total)


# The log of clients that a method waits for, which leaves x alone until each was heard: a line for every change.


TOLD = 5
"""Clients that a line names."""


class AwaitedClients:
    """The clients that are waited for, as they were told last."""

    def __init__(self) -> None:
        self._last = (0, 0)
        self._warned = False

    def log(self, awaited: int, store: ClientStore, logger: Logger) -> None:
        """Log who is waited for, if that has changed; and once in all as a warning, if a round left it as it was.

        Args:
            awaited: how many clients have no row, for which x waits; 0 where it does not.

        Cost: where a line is logged, a pass over the clients' slots.
        """
        now = awaited, len(store.registry)
        changed, self._last = now != self._last, now
        warns = not changed and not self._warned
        if not awaited or not (changed or warns) or not logger.isEnabledFor(WARNING if warns else INFO):
            return
        self._warned |= warns
        missing = store.without_row(TOLD)
        others = f", and {awaited - len(missing)} others" if awaited > len(missing) else ""
        told = f"x stays, waiting for {awaited} of {now[1]} clients: {', '.join(map(repr, missing))}{others}"
        if changed:
            logger.info("%s", told)
        else:
            logger.warning("%s: wait=False starts without them, remove_client() removes one", told)


# The changes of a server's state by a finished round: all at once, in memory and in the store.


class State:
    """The snapshot that counts, the rows, and how a round changes both: it is prepared, looked at, and accepted."""

    def __init__(
        self, settings: Settings, snapshot: Snapshot, store: ClientStore, reducer: Reducer | None = None
    ) -> None:
        n, p, device = settings.layout.n, settings.layout.n_parameters, settings.device
        self.reducer: Reducer = LocalReducer(has_buffers=n > p) if reducer is None else reducer
        self.snapshot = snapshot
        self.store = store
        self._aggregator: Aggregator = Sum(settings.algorithm, settings.layout, settings.accumulator, device=device)
        self.settings = settings
        self.newcomers = Newcomers(store, weighs_shares=settings.algorithm.needs_shares)
        self.upper_population = 0  # where an edge's sums go
        self._shared: F32 | None = None
        self._zeros: F32 | None = None
        self._offsets = Recycled(p, device=device)
        self.lent = Recycled(n, most=settings.batch_size, device=device)  # to clients' replies: ``Round.buffer``
        self.upload = None if device == CPU else Upload(device, {n, p}, settings.batch_size)
        self._download = None if device == CPU else Download(device, 8 * n)
        self.waiting = AwaitedClients()
        self.claimed = ClaimWindows()
        self.buffers = Buffers(settings.layout, settings.nonnegative, device)
        self._model = ModelStep(settings, self.buffers, self.reducer)

    # What ``Server`` asks of a server of one piece; ``fedcore.cluster.backend`` answers the same for shards.

    @property
    def registry(self) -> Registry:
        """The registered clients."""
        return self.store.registry

    @property
    def round_number(self) -> int:
        """The number of finished rounds."""
        return self.snapshot.round_number

    @property
    def transactions(self) -> int:
        """The number of transactions."""
        return self.snapshot.transactions

    @property
    def holds_files(self) -> bool:
        """Whether it holds files open."""
        return self.store.medium == "mmap"

    def facts(self) -> dict[str, Any]:
        """Facts to show."""
        device, path = self.settings.device, self.store.path
        return {
            "rows": len(self.store),
            "storage": self.store.medium if path is None else str(path),
            "device": None if device == CPU else device,
        }

    def rows(self) -> ReadRows:
        """The rows, to be read."""
        return ReadRows(self.store)

    def row(self, client: ClientId) -> F32:
        """A client's row."""
        row: F32 = self.store.read(client)
        return row

    def client_sizes(self) -> npt.NDArray[np.int64] | None:
        """n_k, the smallest first."""
        self.store.require_files()
        return self.snapshot.population.listed()

    def vector(self, what: str) -> Any:
        """x, ``next`` (the model that clients start from), or a copy of v."""
        self.store.require_files()
        now = self.snapshot
        return copied(now.momentum) if what == "v" else view_of(now.x if what == "x" else now.sent)

    def counters(self) -> Counters:
        """The integer counters and constants by name."""
        return self.snapshot.counters

    def total(self) -> F64 | None:
        """A copy of T."""
        return None if self.snapshot.total is None else copied(self.snapshot.total)

    def audit_log(self) -> list[dict[str, Any]]:
        """See ``Server.audit_log``."""
        return checked(self.store.documents(), self.snapshot.audited, self.snapshot.round_number)

    def checkpoint(self) -> None:
        """See ``Server.checkpoint``."""
        self.store.checkpoint()

    def compact(self) -> None:
        """See ``Server.compact``."""
        self.store.compact()

    def verify(self) -> list[str]:
        """See ``Server.verify``."""
        return self.store.verify()

    def forget_newcomers(self) -> None:
        """Forget the newcomers of a round that was dropped."""
        self.newcomers.forget()

    def require_open_store(self) -> None:
        """Raise an error if the store is closed."""
        self.store.prefetch(())

    def sent_vectors(self, clients: Sequence[ClientId], new: Collection[ClientId]) -> SentVectors:
        """The vectors of a broadcast to some clients, of which some are newcomers."""
        self.store.require_files()
        algorithm, layout, now, registry = self.settings.algorithm, self.settings.layout, self.snapshot, self.registry
        if algorithm.keeps_rows:
            self.store.prefetch(client for client in clients if client not in new)

        def offset(client: ClientId, out: Any) -> Any:
            if self.snapshot.round_number != now.round_number:
                raise RoundError(
                    f"offset: the broadcast was for round {now.round_number}, and round {self.snapshot.round_number} "
                    "is next; make a new broadcast"
                )
            return self.offset(client, out, is_new=client in new and client not in registry)

        x_prev = view_of(as_sent(layout, now.x_prev)) if algorithm.direction.b else None
        return WholeVectors(view_of(as_sent(layout, now.sent)), x_prev, offset)

    def new_round(self, kind: Any, batch_size: int, *, may_hold: bool, callbacks: Sequence[Callback]) -> Any:
        """A round that has not begun."""
        return kind(self.settings, self, batch_size=batch_size, may_hold=may_hold, callbacks=callbacks)

    def may_be_whole(self) -> bool:
        """Whether a round may be one native call: in memory, and every valid update counts as it is."""
        by_others = self.settings.limits.max_norm is not None or not self.settings.rules.is_plain
        in_memory = self.store.medium == "ram" and self.upload is None and type(self.reducer) is LocalReducer
        return in_memory and not (by_others or self.settings.is_exact or self.snapshot.norms)

    def begin(self, newcomers: NewClients) -> Aggregator:
        """Begin a round, in which those who are new may come; returns what folds its replies.

        Raises:
            RangeError, UnknownClientError: a newcomer is registered already, or is no id, or its size is not what was
                due; there is no round then.
        """
        self.store.require_files()
        self.abandon()
        now, offset = self.snapshot, self.shared_offset()  # c as it was sent: of those who were there before newcomers
        longest = longest_update(farthest_gamma(self.settings, now), squared=self.settings.takes_squares)
        term = longest_term(max(len(self.store.registry), self.upper_population))
        self._aggregator.begin(
            Opened(now.round_number, self.store, now.history.get, offset, longest, term, self.reducer)
        )
        sizes = None
        if ids := list(newcomers):
            given = newcomers if isinstance(newcomers, Mapping) else None
            sizes = checked_sizes(ids, given, sized=self._is_sized(given is not None))
        self.newcomers.admit(ids, sizes, now)
        return self._aggregator

    @property
    def population(self) -> Population:
        """The population of the open round: with those who may come."""
        return self.newcomers.population or self.snapshot.population

    def abandon(self) -> None:
        """Forget what a round has left that was never finished: the rows that it staged, and who would have come."""
        self.newcomers.forget()
        self.store.discard()

    def close(self) -> None:
        """Forget what was never finished, and close the store."""
        try:
            self.abandon()
        finally:
            self.store.close()

    def _is_sized(self, told: bool) -> bool:
        """Tell whether clients that arrive have sizes."""
        # Where nobody is there, whoever comes first says it.
        told = told and not len(self.store.registry)
        return told or self.settings.algorithm.needs_shares or self.snapshot.population.is_sized

    def shared_offset(self) -> F32 | None:
        """from_mean c + from_momentum g, float32[n_parameters] and read-only; None for zero. Made once a round."""
        direction, now = self.settings.algorithm.direction, self.snapshot
        if self._shared is None and (direction.from_mean or direction.from_momentum):
            per_row = direction.from_mean / max(1, len(self.store.registry))
            terms = [(now.momentum, direction.from_momentum), (now.total, per_row)]
            self._shared = self._combined(terms, self._offsets.take())
            freeze(self._shared)
        return self._shared

    @ieee
    def offset(self, client: ClientId, out: Any, *, is_new: bool = False) -> Any:
        """A client's offset; see ``Broadcast.offset``. Who is new has a row of zeros."""
        self.store.require_files()
        shared, from_row = self.shared_offset(), self.settings.algorithm.direction.from_row
        row = self.store.read(client) if from_row and self.settings.algorithm.keeps_rows and not is_new else None
        if shared is None and row is None:
            return self._no_offset(out)
        if row is None and out is None:
            return shared
        return self._combined([(shared, 1.0), (row, from_row)], out)

    def _combined(self, terms: Sequence[tuple[Floats | None, float]], out: Any) -> Any:
        """The linear combination of vectors and their coefficients, without those that are None."""
        given = [(vector, c) for vector, c in terms if vector is not None]
        out = empty(self.settings.layout.n_parameters, device=self.settings.device) if out is None else out
        with span("broadcast", self, (vectors := [vector for vector, _ in given], out)):
            return kernels.combine(vectors, [c for _, c in given], out)

    def _no_offset(self, out: Any) -> Any:
        """Zeros, float32[n_parameters] and read-only: of the system's own page of zeros, and made once for all."""
        if self._zeros is None:
            self._zeros = zeros(self.settings.layout.n_parameters, device=self.settings.device)
            freeze(self._zeros)
        return self._zeros if out is None else kernels.combine([self._zeros], [0.0], out)

    @ieee
    def correction(self, client: ClientId) -> F64:
        """c_i = v[t_i] - r_i, float64[n_parameters]; zero for a client without a row."""
        self.store.require_files()
        p, device = self.settings.layout.n_parameters, self.settings.device
        if (round := self.store.round_of(client)) is None:
            return zeros(p, np.float64, device=device)
        terms, out = (
            [(self.store.read(client), -1.0), (self.snapshot.history.get(round), 1.0)],
            empty(p, np.float64, device=device),
        )
        correction: F64 = self._combined(terms, out)
        return correction

    def cohort(
        self,
        heard: UpdateBatch,
        population: Population,
        result: Result,
        counted: tuple[F64, F64, int | None],
        square: float,
        rounds: list[int | None],
    ) -> Cohort:
        """The cohort in the papers' symbols."""
        steps, eta_steps, most_steps = counted
        rows, algorithm = len(self.store), self.settings.algorithm
        if algorithm.keeps_rows:
            rows += rounds.count(None)
        N = len(self.store.registry)
        return Cohort(
            S=len(heard),
            weighed=int(np.count_nonzero(heard.weights)),
            # c = T / N is what was sent, before anybody came with the round
            N=max(1, self.newcomers.before) if algorithm.direction.from_mean else N,
            devices=N + len(population.included),
            W=result.W * self.newcomers.share_of_total,
            rows=rows,
            claims=heard.claims if most_steps is None else replace(heard.claims, steps=steps),
            weights=heard.weights,
            squares=heard.squares,
            eta_steps=eta_steps,
            square_of_sum=square,
        )

    def prepare(self, result: Result, heard: UpdateBatch, norms: Mapping[str, Floats]) -> PreparedStep:
        """The round's step with the cohort's sums; nothing that counts has changed yet.

        Args:
            heard: the cohort.
            norms: of the replies heard lately, those of the round among them.

        Raises:
            DivergedError: x would become infinite or NaN.
        """
        algorithm, now = self.settings.algorithm, self.snapshot
        population, number = self.newcomers.settle(heard.clients, now), now.round_number
        steps = self.claimed.of("steps", self.settings.rules.steps_ratio, now.norms)
        counted = counted_steps(self.settings, self.snapshot, heard, steps)
        square = math.nan
        if algorithm.needs_square_of_sum:
            square = combined_square(self.reducer, [result.A], [1.0])
        rounds = self.store.rounds_of(heard.clients) if algorithm.keeps_rows else []
        cohort = self.cohort(heard, population, result, counted, square, rounds)
        norms = {**norms, "steps": steps.packed} if len(steps) else norms
        moves = cohort.N > 0 and algorithm.moves(cohort)
        changes: dict[str, Any] = {"round_number": number + 1, "norms": norms, "population": population}
        if late := self.settings.max_staleness:
            # x of every round, whether it moved or not: a client may have started from it.
            past = {**now.past, number: now.sent}
            starts = {**now.starts, **dict(zip(heard.clients, heard.starts.tolist(), strict=True))}
            changes["past"] = {t: x for t, x in past.items() if t > number - late}
            changes["starts"] = {client: t for client, t in starts.items() if t > number - late}
        waits = not moves and algorithm.keeps_rows and algorithm.moves(replace(cohort, rows=cohort.N))
        awaited = cohort.N - cohort.rows if waits else 0
        step, v_square, gamma = None, 0.0, 0.0
        if (
            cohort.W > 0 or moves or (len(heard) and algorithm.keeps_rows)
        ):  # rows that changed are in T whatever they weigh
            step = check_step(algorithm, algorithm.step(cohort))
            if (share := self.newcomers.share_of_total) != 1:
                step = replace(step, v=step.v._replace(A=step.v.A * share), T=step.T._replace(A=step.T.A * share))
            # Kept also of a round in which x waits: one without clients may come next, and step.
            changes["gamma"] = step_length(self.settings, now, cohort, step.gamma)
            gamma = changes["gamma"] if moves else 0.0
            model, momentum = self._model, now.momentum if step.v.g or step.T.g else None
            read = (result.A, result.B, now.total, now.x, now.moments, momentum)
            with span("step", self, (*read, model.spare_v, model.spare_total, now.x, now.moments)):  # and written
                vectors, v_square = model.take(now, result, step, gamma, heard)
            changes |= vectors
            if moves:
                counters = grown(now.counters, heard.counters)
                x_prev = now.sent if algorithm.direction.b else changes["x"]  # not kept for those who never send it
                changes |= {"x_prev": x_prev, "counters": counters}
            if algorithm.keeps_history and len(heard):
                history = now.history.after(number, changes["momentum"], len(heard), rounds)
                total = changes["total"] if changes["exact_total"] is None else changes["exact_total"]
                changes["history"] = self._bounded(history, total, number, heard.clients)
                if changes["exact_total"] is not None and len(changes["history"]) < len(history):
                    kernels.read_exact(changes["exact_total"], changes["total"])
        after = now._replace(changed={}, **changes)
        return PreparedStep(now, result, cohort, after, step, v_square, gamma, awaited, counted[-1], rounds)

    def step_by_mean(self, ys: list[Any], scales: F64, weights: F64) -> tuple[Snapshot, F64, float] | None:
        """The snapshot after a round of FedAvg, |h_i|^2, and that of their mean, as ``prepare`` makes them.

        None, and nothing has changed, where a reply may have to be refused, or x would diverge.
        """
        now, model, gamma = self.snapshot, self._model, claimless_gamma(self.settings, self.snapshot)
        assert isinstance(self._aggregator, Sum)
        assert gamma is not None
        folding = begin("fold")
        folded = self._aggregator.fold_at_once(now.x, ys, scales, weights)
        if folding:
            folding.end((now.x, ys, folded and folded[0]))
        if folded is None:
            return None
        A, W, squares = folded
        stepping = folding and begin("step")
        x, v_of = model.vectors.take(), Linear(1 / W)
        v_square, x_square = kernels.server_step(
            A, None, now.x, v_of=v_of, gamma=gamma, v=model.spare_v, total_out=None, x_out=x
        )
        if stepping:
            stepping.end((A, now.x, model.spare_v, x))
        if not math.isfinite(x_square):
            return None
        freeze(x)
        after = now._replace(
            x=x, x_prev=x, momentum=model.spare_v, round_number=now.round_number + 1, gamma=gamma, changed={}
        )
        return after, squares, v_square / (1 / W * W) ** 2

    def accept(self, after: Snapshot, document: str | None = None) -> None:
        """Make everything that the round changed count, and keep its document.

        Raises:
            StoreError: the store could not keep the round; nothing was changed.
        """
        after = after if document is None else after._replace(audited=digest_of_text(document))
        self._become(after, self.snapshot.round_number, document)
        self.newcomers.forget()  # those that are left are no newcomers

    def _bounded(
        self, history: History, total: F64 | ExactSum | None, round: int, heard: Sequence[ClientId]
    ) -> History:
        """The history, with as many rounds as may be kept; the total follows the rows that others are folded into."""
        surplus = history.surplus(self.settings.algorithm.most_history) if self.settings.algorithm.folds_history else []
        if surplus:
            assert total is not None
            staged, at_once = frozenset(heard), self.settings.batch_size
            fold_history(
                self.store, history, surplus, total, round=round, staged=staged, at_once=at_once, reducer=self.reducer
            )
        return history.folded(surplus)

    def _become(self, after: Snapshot, round: int, document: str | None = None) -> None:
        """Let the store keep the rows of the round and the snapshot, and then believe it.

        What the store has accepted is believed whatever comes after it.
        """
        before, commits = self.snapshot, self.store.commits
        after = after._replace(transactions=before.transactions + 1)
        spare_v = before.momentum
        if after.momentum is not before.momentum and self.settings.algorithm.keeps_history:
            spare_v = (
                self._model.directions.take()
            )  # the other stays v[t]; now, since after the commit nothing may fail
        self.reducer.ready()
        try:
            self.keep(after, round, document)
            self._adopt(before, after, spare_v)
        except BaseException:
            if self.store.commits != commits:
                self._adopt(before, after, spare_v)
            raise
        if self.store.medium == "mmap":
            with suppress(StoreError, MemoryError):  # else it stays in memory, where it is as good
                self.snapshot = after.on_disk(self.store)

    def _adopt(self, before: Snapshot, after: Snapshot, spare_v: F32) -> None:
        """Believe a snapshot. Twice is as once."""
        model = self._model
        spare_v = model.spare_v if after.momentum is before.momentum else spare_v
        spare_total = model.spare_total if after.total is before.total else before.total
        spare_exact = model.spare_exact if after.exact_total is before.exact_total else before.exact_total
        spares = spare_v, spare_total, spare_exact
        # In one statement, within which no exception can come from outside.
        self.snapshot, self._shared, (model.spare_v, model.spare_total, model.spare_exact) = after, None, spares

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Changes to the store that count together at the block's end, by ``_become``, or not at all."""
        commits, settings = self.store.commits, self.settings
        with uninterrupted():
            try:
                yield
            except BaseException:
                if self.store.commits == commits:
                    self.settings = settings
                    self.store.rollback()
                raise

    def keep(self, after: Snapshot, round: int, document: str | None = None) -> None:
        """Commit the staged rows and who came or went, and on a disk the snapshot with them."""
        if self.store.medium == "mmap":
            self.store.commit(round, self._vectors(after), self.to_state(after), document=document)
        elif self.settings.algorithm.keeps_rows or self.store.is_ahead or document is not None:
            self.store.commit(round, document=document)

    def _vectors(self, snapshot: Snapshot) -> dict[str, Any]:
        """The snapshot's vectors as the store takes them: in host memory, or where it has them already."""
        vectors = snapshot.vectors(self.settings.algorithm)
        if self._download is None:
            return vectors
        # v[t] never changes: one that is in the store need not be brought, nor written, again.
        known = [name for name in vectors if name.startswith("v/") and name in self.store.vector_names()]
        return self._download.brought(vectors | {name: self.store.vector(name) for name in known})

    def to_state(self, snapshot: Snapshot) -> dict[str, Any]:
        """The fields that are no arrays, as JSON can hold them."""
        return {
            "what": "a fedcore server",
            "medium": self.store.medium,
            "undoable": self.store.undoable,
            "device": self.settings.device,
            "clients": len(self.store.registry),
            "settings": self.settings.to_state(snapshot.round_number),
            "numbers": snapshot.numbers(),
        } | ({} if self.reducer.place is None else {"place": self.reducer.place})

    def save(self, path: str | os.PathLike[str]) -> None:
        """See ``Server.save``."""
        self.store.save(path, vectors=self._vectors(self.snapshot), state=self.to_state(self.snapshot))

    @ieee
    def add_clients(self, clients: list[ClientId], sizes: Sizes | None) -> None:
        """See ``Server.add_clients``."""
        now = self.snapshot
        checked = checked_sizes(clients, sizes, sized=self._is_sized(sizes is not None))
        with self._changing():
            ids = list(map(canonical, clients))
            numbers = self.store.add_all(ids)
            self._repopulate(now.population.with_clients(numbers, ids, checked, now.round_number))

    def change(self, options: Mapping[str, Any]) -> None:
        """See ``Server.change``."""
        changed, now = self.settings.changed(options), self.snapshot
        after = now._replace(changed={**now.changed, **changed.shown(options)})
        if "lr" in options:
            after = after._replace(past={})  # clients that started from these models trained at the old rate
        with self._changing():
            self.settings = changed
            self._become(after, after.round_number)

    def update_clients(self, sizes: Mapping[ClientId, int]) -> None:
        """See ``Server.update_clients``."""
        self._repopulate(self.population.with_sizes(self.store.registry, sizes))

    def _repopulate(self, population: Population) -> None:
        with self._changing():
            self._become(self.snapshot._replace(population=population), self.snapshot.round_number)

    @ieee
    def remove_client(self, client: ClientId, from_objective: bool) -> None:
        """See ``Server.remove_client``."""
        if self.settings.algorithm.rows_at_clients:
            raise RangeError(
                f"client: expected one whose row is on the server, got {client!r}, which keeps its own: leave it "
                "registered"
            )
        client, now = self.store.registry.check(client), self.snapshot
        number = self.store.registry.number(client)
        population = now.population.without_client(number, client, from_objective=from_objective)
        after = now._replace(population=population, history=now.history.without([self.store.round_of(client)]))
        if now.total is not None and self.store.round_of(client) is not None:
            if not self.settings.algorithm.total_sums_rows:
                raise RangeError(
                    f"client: expected a method whose T is the sum of its rows, of which {client!r} can be taken out, "
                    f"got {self.settings.algorithm}: leave it registered"
                )
            kept = self.settings.algorithm.keeps_history
            part = self.correction if kept else self.store.read
            changed = without_client(now, client, self.store, part, corrections=kept)
            after = after._replace(total=changed.total, exact_total=changed.exact_total)
        with self._changing():
            self.store.forget(client)
            self._become(after, now.round_number)

    @ieee
    def warm_start(self, gradients: Mapping[ClientId, Any]) -> None:
        """See ``Server.warm_start``."""
        now = self.snapshot
        require_start(self.settings, now, self.reducer)
        given = WarmStart(self.settings, self.store, self.reducer, self._model.directions, gradients, self.upload)
        with self._changing():
            self._become(given.after(now), now.round_number)
