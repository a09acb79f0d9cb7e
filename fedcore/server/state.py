"""The state of a server: the snapshot and the clients' rows, which change together in one commit."""

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from logging import INFO, WARNING, Logger
from pathlib import Path
from typing import Any, Literal, TypeVar
from weakref import proxy

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.algorithms import Cohort, check_step
from fedcore.algorithms.rates import rate_at
from fedcore.arrays import (
    CPU,
    F32,
    F64,
    BufferPool,
    Floats,
    core,
    device_of,
    device_ordinal,
    empty,
    freeze,
    ieee,
    view_of,
    zeros,
)
from fedcore.errors import CheckpointError, DivergedError, RoundError, StoreError
from fedcore.kernels import ExactSum, Linear
from fedcore.options import Compute, Settings
from fedcore.profiling import span
from fedcore.rules.base import RESULTS, checked
from fedcore.runtime import uninterrupted
from fedcore.server.aggregation import (
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
from fedcore.server.report import (
    Diagnosis,
    Diagnostics,
    Document,
    audit_errors,
    document_of,
    public_key,
    round_facts,
    signer_of,
    undo_document,
)
from fedcore.server.step import (
    History,
    ModelStep,
    Population,
    PreparedStep,
    Snapshot,
    checked_sizes,
    claimless_gamma,
    counted_steps,
    farthest_gamma,
    step_length,
    usual_distance,
)
from fedcore.server.update import as_sent, digest_of_text, first_not_finite, in_float32
from fedcore.server.validation import Buffers, UpdateReader, settled
from fedcore.store import ClientStore
from fedcore.store.client_store import rounding_keys
from fedcore.store.files.inventory import GROUPS
from fedcore.store.registry import ClientId, Registry, canonical
from fedcore.validation import failed

A = TypeVar("A")
Vector = npt.NDArray[Any]
Documents = Sequence[tuple[int, str]]
"""Numbered texts."""

MOST_ROUNDS = 2**53
"""The cutoff of intervals for methods without one."""
SUMMED = 1 << 16
"""The bytes of a block with a checksum of its own. The shards of a server end at such blocks."""


class Upload:
    """Copies vectors from host memory into reused memory on a device; vectors on the device are not copied.

    ``lengths`` are the possible lengths of a vector. For each length, up to ``most`` copies exist at a time. Each copy
    costs 4 n bytes on the device.
    """

    def __init__(self, device: str, lengths: set[int], most: int) -> None:
        self._device, self.most = device, most
        self._copies = core.CopyStream(device_ordinal(device), min(64 << 20, 8 * max(lengths)))
        self._memory = {length: BufferPool(length, most=most, device=device) for length in lengths}

    def portions(self, batch: UpdateBatch) -> list[UpdateBatch]:
        """Split a batch into portions of ``most`` updates; one portion if all vectors are on the device."""
        k = len(batch)
        if k <= self.most or all(map(self._is_on_device, [*batch.vectors, *batch.controls])):
            return [batch]
        portion = np.arange(k) // self.most
        return [batch.chosen(portion == i) for i in range(portion[-1] + 1)]

    def bring(self, batch: UpdateBatch) -> None:
        """Replace a batch's vectors in host memory by copies on the device."""
        batch.vectors, batch.controls = self.vectors(batch.vectors), self.vectors(batch.controls)

    def vectors(self, ys: Sequence[Any]) -> list[Any]:
        """Return the vectors, or lists of tensors, on the device; those in host memory become float32 copies."""
        on_device = [y if self._is_on_device(y) else self._copied(y) for y in ys]
        self._copies.join()
        return on_device

    def _is_on_device(self, y: Any) -> bool:
        if isinstance(y, list):
            return all(map(self._is_on_device, y))
        return y is None or device_of(y) == self._device

    def _copied(self, y: Any) -> Any:
        if not isinstance(y, list):
            return self._copied_parts([y])[0]
        copies = iter(self._copied_parts([part for part in y if not self._is_on_device(part)]))
        return [part if self._is_on_device(part) else next(copies) for part in y]  # separate: norms are by part

    def _copied_parts(self, parts: Sequence[Any]) -> list[Any]:
        """Return copies on the device of some parts of a vector, in adjacent memory."""
        lengths = [int(np.prod(part.shape)) for part in parts]
        memory: Any = self._memory[min(length for length in self._memory if length >= sum(lengths))].get()
        copies, start = [], 0
        for part, length in zip(parts, lengths, strict=True):
            copies.append(memory[start : start + length])
            with np.errstate(over="ignore"):  # an infinity makes the fold reject the update
                self._copies.upload(in_float32(part).reshape(-1), copies[-1])
            start += length
        return copies


class Download:
    """Copies vectors from a device into reused host memory. It starts all copies and then waits once.

    ``largest`` is the size in bytes of the longest vector.

    Cost: host memory for the vectors of one commit, and two pinned staging areas.
    """

    def __init__(self, device: str, largest: int) -> None:
        self._copies = core.CopyStream(device_ordinal(device), min(64 << 20, largest))
        self._memory: dict[tuple[int, str], list[Vector]] = {}

    def brought(self, vectors: Mapping[str, Any]) -> dict[str, Vector]:
        """Return the vectors by name in host memory; copies are valid until the next call."""
        on_host: dict[str, Vector] = {}
        used: dict[tuple[int, str], int] = {}
        for name, vector in vectors.items():
            if isinstance(vector, np.ndarray):
                on_host[name] = vector
                continue
            kind = vector.size, vector.dtype.name
            memory, i = self._memory.setdefault(kind, []), used.get(kind, 0)
            if i == len(memory):
                memory.append(empty(vector.size, vector.dtype))
            on_host[name], used[kind] = memory[i], i + 1
            self._copies.download(vector, on_host[name])
        self._copies.wait()
        for kind, memory in self._memory.items():
            del memory[used.get(kind, 0) :]
        return on_host


NewClients = Iterable[ClientId] | Mapping[ClientId, int]
"""Ids, or a mapping from id to n_k if clients have sizes."""


class Newcomers:
    """The clients that may join with the open round.

    They are registered during the round, before any commit. The commit removes newcomers without an accepted update; an
    aborted round removes all newcomers.

    Attributes:
        before: the number of clients before the round.
        ids: their ids.
        population: the population with them; None without newcomers.
        share_of_total: the factor that corrects the shares p^k = n_k / n for the step. It is n with all newcomers,
            which the round uses, divided by n with only the accepted newcomers. It is 1 without sizes, or if the method
            does not weight by shares.
        accepted: for a group of tensors, the clients with an accepted update, if they stay without the group.
    """

    accepted: Collection[ClientId] | None = None

    def __init__(self, store: ClientStore, *, weighs_shares: bool) -> None:
        self._store, self._weighs_shares = store, weighs_shares
        self.ids: list[ClientId] = []
        self._sizes: list[int] | None = None
        self.before = 0
        self.population: Population | None = None
        self.share_of_total = 1.0

    def admit(self, clients: Sequence[ClientId], sizes: list[int] | None, now: Snapshot) -> None:
        """Register them for the open round: all, or none if an id is invalid or registered already."""
        self.before = len(self._store.registry)
        with uninterrupted():
            self.ids, self._sizes = list(map(canonical, clients)), sizes  # before any error, for ``forget``
            try:
                self._store.add_all(self.ids)
                self.population = self._joined(now, self.ids, sizes)
            except BaseException:
                self.forget()
                raise

    def settle(self, accepted: Iterable[ClientId], now: Snapshot) -> Population:
        """Remove the newcomers without an accepted update; return the population of the other clients."""
        if self.population is None:
            return now.population
        clients = set(accepted if self.accepted is None else self.accepted)
        joined = [client for client in self.ids if client in clients]
        for client in [one for one in self.ids if one not in clients]:
            self._store.forget(client)
        sizes = self._sizes and [size for one, size in zip(self.ids, self._sizes, strict=True) if one in clients]
        population = self._joined(now, joined, sizes)
        if population.total and self._weighs_shares:
            self.share_of_total = self.population.total / population.total
        return population

    def forget(self) -> None:
        """Remove the newcomers that are not committed."""
        if self.ids:
            self._store.rollback()
        self.ids, self._sizes, self.population, self.share_of_total = [], None, None, 1.0

    def _joined(self, now: Snapshot, clients: Sequence[ClientId], sizes: list[int] | None) -> Population:
        if not clients:
            return now.population
        numbers = self._store.registry.numbers(list(clients)).tolist()
        # A client that joins with the first round counts as an initial client.
        return now.population.with_clients(numbers, clients, sizes, now.round_number or None)


def state_of(
    settings: Settings, snapshot: Snapshot, medium: str, undoable: bool, clients: int, place: Any
) -> dict[str, Any]:
    """Return the fields of a server that are not arrays, as JSON. ``place`` is that of a shard, or None."""
    return {
        "what": "a fedcore server",
        "medium": medium,
        "undoable": undoable,
        "device": settings.device,
        "clients": clients,
        "settings": settings.to_state(snapshot.round_number),
        "numbers": snapshot.numbers(),
    } | ({} if place is None else {"place": place})


class AwaitedClients:
    """Logs the clients that a method waits for: x is unchanged until each has an update."""

    NAMED = 5
    """The number of clients in a line."""

    def __init__(self) -> None:
        self._last = (0, 0)
        self._warned = False

    def log(self, waiting_for: int, state: "State", logger: Logger) -> None:
        """Log the clients without a row for which x waits, if they have changed; warn once if they have not.

        Cost: for each logged line, a pass over the clients' slots.
        """
        now = waiting_for, len(state.registry) if waiting_for else 0
        changed, self._last = now != self._last, now
        warns = not changed and not self._warned
        level = WARNING if warns else INFO
        if not waiting_for or not (changed or warns) or not logger.isEnabledFor(level):
            return
        self._warned |= warns
        if not (missing := state.without_row(self.NAMED)):  # each has just left a group, which its first update lacks
            return
        count = waiting_for if len(missing) == self.NAMED else len(missing)
        more = f", and {count - len(missing)} more" if count > len(missing) else ""
        line = f"x is unchanged: waiting for {count} of {now[1]} clients: {', '.join(map(repr, missing))}{more}"
        hint = "; use MIFA(wait=False) to start without them, or remove_client() to remove one" if warns else ""
        logger.log(level, "%s%s", line, hint)


class State:
    """The current snapshot and the rows. A round prepares a step, measures it and commits it."""

    reader: type[UpdateReader] = UpdateReader
    compute = Compute()
    """Where the state is: here, in one part."""
    defers_signals = True
    """Whether a signal waits until a step is committed."""
    _audit_key: bytes | None = None

    def __init__(
        self, settings: Settings, snapshot: Snapshot, store: ClientStore, reducer: Reducer | None = None
    ) -> None:
        layout, algorithm, device = settings.layout, settings.algorithm, settings.device
        n, p = layout.n, layout.n_parameters
        self.settings, self.snapshot, self.store = settings, snapshot, store
        self.holds_files = store.medium == "mmap"  # no cached property, which would slow down all attributes
        self.reducer = Reducer(has_buffers=n > p) if reducer is None else reducer
        vectors = BufferPool(n, most=2, device=device)
        self._sum = Sum(settings, store, self.reducer, vectors)
        self.verify = store.verify
        self.newcomers = Newcomers(store, weighs_shares=algorithm.needs_shares)
        self.upper_population = 0  # the number of clients of an edge's upper server
        self._shared: F32 | None = None
        self._zeros: F32 | None = None
        self._offsets = BufferPool(p, device=device)
        self.update_buffers = BufferPool(n, most=settings.batch_size, device=device)  # for ``Round.buffer``
        self.upload = None if device == CPU else Upload(device, {n, p}, settings.batch_size)
        self._download = None if device == CPU else Download(device, 8 * n)
        self.waiting = AwaitedClients()
        self._nonnegative, self.buffers = settings.nonnegative, Buffers(layout, settings.nonnegative, device)
        self.model = ModelStep(settings, self.buffers, self.reducer, vectors)
        self._sent: tuple[F32, F32] | None = None

    def read(self, query: Callable[[Any, Snapshot], A]) -> A:
        """Return the answer to a ``requests.Query``."""
        self.store.require_files()
        return query(self, self.snapshot)

    @ieee
    def apply(self, change: Any) -> None:
        """Make a ``requests.Change`` in one transaction. If it fails before the store's commit, nothing has changed."""
        for state in self.states:
            state.store.require_files()
        parts = self.cut(change)
        with self.changing():
            made = [(state, *part(state)) for state, part in zip(self.states, parts, strict=True)]
            for state, after, facts in made:
                state.become(after._replace(transactions=state.transactions + 1), state.round_number, facts)

    @property
    def states(self) -> list["State"]:
        """The states of the server: this one, and those of groups of tensors."""
        return [self]

    def cut(self, change: Any) -> list[Any]:
        """Return the part of a change for each state."""
        return [change]

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
    def folder(self) -> Path | None:
        """The server's folder, if it has one."""
        return self.store.path

    def require_open_round(self) -> None:
        """Raise an error if the open round cannot go on: the store is closed, or a file was cut short."""
        if self.holds_files:
            self.store.require_files()

    def first_not_finite(self, y: Any) -> str | None:
        """Return the name of the first tensor of an update's vector with a NaN or infinity, or None."""
        return first_not_finite(y, self.settings.layout)

    def without_row(self, most: int) -> list[ClientId]:
        """Return at most this many of the clients without a row."""
        return self.store.without_row(most)

    def facts(self) -> dict[str, Any]:
        """Return the entries of a repr."""
        device, path = self.settings.device, self.store.path
        return {
            "rows": len(self.store),
            "storage": self.store.medium if path is None else str(path),
            "device": None if device == CPU else device,
        }

    def documents(self, first: int = 0) -> Documents:
        """Return the audit documents from the number ``first`` on. An undo leaves those of the change that it undoes.

        A shard only undoes an incomplete change, which leaves none.
        """
        count = None if self.reducer.place is None else max(0, self.snapshot.documents - first)
        return self.store.documents(first)[:count]

    def sign_by(self, key: bytes | None) -> None:
        """Sign the documents from now on; raise CheckpointError if those in the folder have another signer."""
        by, count = None if key is None else public_key(key), self.snapshot.documents
        stored = self.documents(max(0, count - 1))
        with audit_errors(self.store.path or "store"):
            if undone := [text for number, text in stored if number >= count]:
                undo_document(undone, count)  # raises now, not in the next round, if they are damaged
            if stored and (signer := signer_of(stored[0][1])) not in (None, by):
                raise CheckpointError(f"audit_key: the audit log is signed by {signer}; pass Storage(audit_key=) again")
        self._audit_key = key

    def require_round(self, what: str, number: int) -> None:
        """Raise RoundError if the next round is not that of a broadcast."""
        if self.round_number != number:
            now = f"the broadcast was for round {number}, but round {self.round_number} is next"
            raise RoundError(f"{what}: {now}; make a new broadcast")

    def sent_vectors(self, clients: Sequence[ClientId], new: Collection[ClientId]) -> SentVectors:
        """Return the vectors of a broadcast to some clients; ``new`` are the newcomers among them."""
        self.store.require_files()
        algorithm, registry = self.settings.algorithm, self.registry
        number, sent = self.round_number, self.sent_model("sent")  # no snapshot: a compaction erases its vectors
        if algorithm.keeps_rows:
            self.prefetch([client for client in clients if client not in new])

        def offset(client: ClientId, out: Any) -> Any:
            self.require_round("offset", number)
            return self.offset(None if client in new and client not in registry else client, out)

        def start(client: ClientId) -> Any:
            self.require_round("start", number)
            if client in new and client not in registry:
                return sent
            return view_of(self.start_for(registry.check(client)))

        x_prev = self.sent_model("x_prev") if algorithm.direction.b else None
        return WholeVectors(sent, x_prev, offset, start if algorithm.own_starts else None)

    def sent_model(self, name: Literal["sent", "x_prev"]) -> F32:
        """Return the model from which clients start, or the one before, as they get it."""
        now = self.snapshot
        return view_of(self.as_sent(now.sent) if name == "sent" else as_sent(self.settings.layout, now.x_prev))

    def as_sent(self, x: F32) -> F32:
        """Return ``as_sent`` of a model, which is kept until the step or the next model."""
        if not (layout := self.settings.layout).narrow:
            return x
        if self._sent is None or self._sent[0] is not x:
            self._sent = x, as_sent(layout, x, self.model.vectors.get())
        return self._sent[1]

    def keeps_journal(self, on: bool) -> None:
        """Set whether later rounds have a journal; the folder has the setting from the next commit on."""
        self.settings = replace(self.settings, journal=on)

    def begin(self, newcomers: NewClients) -> Sum:
        """Begin a round in which these clients may join, and return its sums."""
        self.require_open_round()
        self.abandon()
        settings = self.settings
        if self._nonnegative is not settings.nonnegative:  # the limits were changed
            self._nonnegative = settings.nonnegative
            self.buffers = self.model.buffers = Buffers(settings.layout, self._nonnegative, settings.device)
        if (private := settings.rules.private) is not None:
            private.require_budget(self.snapshot.ledger)
        now, offset = self.snapshot, self.shared_offset()  # as sent, without the newcomers' share
        longest = longest_update(farthest_gamma(settings, now), squared=settings.takes_squares)
        term = longest_term(max(len(self.store.registry), self.upper_population)) if settings.is_exact else math.inf
        distance = usual_distance(settings, now) if settings.averages_models else 1.0
        own = proxy(self)  # the sum must not keep the state alive
        functions = now.history.get, lambda round: own.start_of(round)
        self._sum.begin(settings, now.round_number, *functions, offset, (longest, term), distance)
        self._admit(newcomers)
        return self._sum

    def _admit(self, newcomers: NewClients) -> None:
        if ids := list(newcomers):
            given = newcomers if isinstance(newcomers, Mapping) else None
            sizes = checked_sizes(ids, given, sized=self.is_sized(given is not None))
            self.newcomers.admit(ids, sizes, self.snapshot)

    def start_from(self, x: F32, round: int) -> None:
        """Start an edge's round of this number, from the model of the upper server."""
        self.snapshot = self.snapshot._replace(x=x, x_prev=x, round_number=round)

    def buffers_square(self) -> float:
        """Return the squared norm of x's float buffers."""
        return combined_square(self.reducer, [self.snapshot.x[self.settings.layout.n_parameters :]], [1.0])

    @property
    def population(self) -> Population:
        """The population of the open round, with its newcomers."""
        return self.newcomers.population or self.snapshot.population

    def abandon(self) -> None:
        """Discard what an unfinished round has staged, its newcomers, and the directions that the last one read."""
        if self.newcomers.ids:
            self.newcomers.forget()
        self.store.discard()
        self._sum.forget()

    def close(self) -> None:
        """Discard an unfinished round, and close the stores."""
        with ExitStack() as closing:
            for state in self.states:
                closing.callback(state.store.close)
            self.abandon()

    def is_sized(self, given: bool) -> bool:
        """Whether new clients need sizes; the very first clients may have them or not."""
        is_first = given and not len(self.store.registry)
        return is_first or self.settings.algorithm.needs_shares or bool(self.snapshot.population.sizes)

    def shared_offset(self) -> F32 | None:
        """Return from_mean c + from_momentum g, float32[n_parameters], read-only and cached; None for zero."""
        direction, now = self.settings.algorithm.direction, self.snapshot
        if self._shared is None and (direction.from_mean or direction.from_momentum):
            per_row = direction.from_mean / max(1, len(self.store.registry))
            terms = [(now.momentum, direction.from_momentum), (now.total, per_row)]
            self._shared = self.combined(terms, self._offsets.get())
            freeze(self._shared)
        return self._shared

    @ieee
    def offset(self, client: ClientId | None, out: Any) -> Any:
        """Return a client's offset; see ``Broadcast.offset``. A new client, None, has a zero row."""
        self.store.require_files()
        shared, from_row = self.shared_offset(), self.settings.algorithm.direction.from_row
        reads = from_row and self.settings.algorithm.keeps_rows
        row = self.store.read(client) if reads and client is not None else None
        if shared is None and row is None:
            if self._zeros is None:  # one vector for all clients
                self._zeros = zeros(self.settings.layout.n_parameters, device=self.settings.device)
                freeze(self._zeros)
            return self._zeros if out is None else kernels.combine([self._zeros], [0.0], out)
        if row is None and out is None:
            return shared
        return self.combined([(shared, 1.0), (row, from_row)], out)

    def combined(self, terms: Sequence[tuple[Floats | None, float]], out: Any) -> Any:
        """Return the linear combination of vectors with coefficients; None counts as zero."""
        given = [(vector, c) for vector, c in terms if vector is not None]
        out = empty(self.settings.layout.n_parameters, device=self.settings.device) if out is None else out
        with span("broadcast", self, (vectors := [vector for vector, _ in given], out)):
            return kernels.combine(vectors, [c for _, c in given], out)

    def prepare(self, result: Result, batch: UpdateBatch, norms: Mapping[str, Floats]) -> PreparedStep:
        """Return the step of the cohort's sums; the server is unchanged until ``accept``.

        ``batch`` has the accepted updates, ``norms`` the norms of the last accepted updates, with those of the round.
        Raise DivergedError if x would become infinite or NaN.
        """
        algorithm, now, settings = self.settings.algorithm, self.snapshot, self.settings
        population, number = self.newcomers.settle(batch.clients, now), now.round_number
        if algorithm.counts_appearances:
            numbers = self.store.registry.numbers(batch.clients)
            population = population.with_appearances(numbers, number, algorithm.cutoff or MOST_ROUNDS)
        window = settings.rules.window("steps", now.norms)
        steps, eta_steps, most_steps = counted_steps(settings, now, batch, window)
        rounds = self.store.rounds_of(batch.clients) if algorithm.keeps_rows else []
        N, share, needs_square = len(self.store.registry), self.newcomers.share_of_total, algorithm.needs_square_of_sum
        cohort = Cohort(
            S=len(batch),
            weighed=int(np.count_nonzero(batch.weights)),
            # c = T / N was sent before newcomers were registered
            N=max(1, self.newcomers.before if self.newcomers.ids else N) if algorithm.direction.from_mean else N,
            devices=N + len(population.included) + population.unnamed,
            W=result.W and max(result.W * share, 2.0**-1000),  # 1 / W is finite, for ``precise``
            rows=len(self.store) + rounds.count(None),
            claims=batch.claims if most_steps is None else replace(batch.claims, steps=steps),
            weights=batch.weights,
            squares=batch.squares,
            eta_steps=eta_steps,
            square_of_sum=combined_square(self.reducer, [result.A], [1.0]) if needs_square else math.nan,
        )
        norms = {**norms, "steps": window.packed} if window.ratio and len(window) else norms
        moves = cohort.N > 0 and checked(algorithm, "moves", (cohort,), *RESULTS["moves"])
        changes: dict[str, Any] = {"round_number": number + 1, "norms": norms, "population": population}
        if result.center is not None:
            changes["center"] = result.center
        if result.ledger is not None:
            changes["ledger"] = result.ledger
        changes |= self._past(batch, population)
        if algorithm.own_starts:
            result = self._with_starts(result, batch)
        if_all = (replace(cohort, rows=cohort.N),)
        waits = not moves and algorithm.keeps_rows and checked(algorithm, "moves", if_all, *RESULTS["moves"])
        waiting_for = cohort.N - cohort.rows if waits else 0
        step, v_square, gamma = None, 0.0, 0.0
        # T includes every changed row, whatever the weight of its update. A method may divide A, which is zero, by W.
        if cohort.W > 0 or moves or (len(batch) and algorithm.keeps_rows):
            try:
                step = algorithm.step(cohort if cohort.W > 0 or moves else replace(cohort, W=1.0))
            except Exception as error:
                failed(algorithm, "step", error)
            step = check_step(algorithm, step)
            if share != 1:
                step = replace(step, v=step.v._replace(A=step.v.A * share), T=step.T._replace(A=step.T.A * share))
            result = self._sum.precise(result, step.v.A)
            # Set even if x waits: the next round may step without clients.
            changes.update(gamma=step_length(settings, now, cohort, step.gamma), gamma_lr=rate_at(settings.lr, number))
            gamma = changes["gamma"] if moves else 0.0
            model, momentum = self.model, now.momentum if step.v.g or step.T.g else None
            read = (result.A, result.B, now.total, now.x, now.moments, momentum)
            self._sent = None  # x' may take its memory
            with span("step", self, (*read, model.v(), model.spare_total, now.x, now.moments)):  # and outputs
                vectors, v_square = model.take(now, result, step, gamma, batch)
            changes |= vectors
            if moves:
                # Flags get no noise, so private updates do not change them.
                private = settings.rules.private is not None
                counters = now.counters if private else settled(settings.layout, now.counters, batch.counters)
                x_prev = now.sent if algorithm.direction.b else changes["x"]  # kept for methods that send it
                changes |= {"x_prev": x_prev, "counters": counters}
            if algorithm.keeps_history and len(batch):
                changes["history"] = self._history(changes, rounds, batch.clients)
        after = now._replace(transactions=now.transactions + 1, changed={}, **changes)
        return PreparedStep(now, result, cohort, after, step, v_square, gamma, waiting_for, most_steps, rounds)

    def _past(self, batch: UpdateBatch, population: Population) -> dict[str, Any]:
        """Return the models that later updates may have started from, and the last starts of the clients."""
        algorithm, now, number = self.settings.algorithm, self.snapshot, self.round_number
        past, late = {**now.past, number: now.sent}, self.settings.policy.max_staleness  # also if x is unchanged
        if algorithm.own_starts:
            needed = population.all_starts(len(self.store.registry))
            return {"past": {t: x for t, x in past.items() if t in needed}}
        if not late:
            return {}
        new = dict(zip(batch.clients, batch.starts.tolist(), strict=True))
        starts = {**now.starts, **new} if self.settings.policy.buffer is None else {}  # else a client may start several
        recent = {} if algorithm.mixes_models else {t: x for t, x in past.items() if t > number - late}
        return {"past": recent, "starts": {client: t for client, t in starts.items() if t > number - late}}

    def _with_starts(self, result: Result, batch: UpdateBatch) -> Result:
        """Return the sums with x - x_(i) of each client added to A.

        Cost: a pass over each earlier model from which a client of the cohort started.
        """
        starts, counts = np.unique(batch.starts[batch.starts < self.snapshot.round_number], return_counts=True)
        if not len(starts):
            return result
        models = [self.snapshot.x, *map(self.start_of, starts.tolist())]
        terms = [result.A, *(model[: len(result.A)] for model in models)]
        out = empty(len(result.A), result.A.dtype, device=device_of(result.A))
        return result._replace(A=kernels.combine(terms, [1.0, float(counts.sum()), *-counts.astype(float)], out))

    def last_round(self, client: ClientId) -> int:
        """Return the round from whose model a client starts, if the method has ``own_starts``."""
        return int(self.population.starts(self.registry.numbers([client]))[0])

    def start_for(self, client: ClientId) -> F32:
        """Return the model from which a client starts, if the method has ``own_starts``."""
        return self.start_of(self.last_round(client))

    def start_of(self, round: int) -> F32:
        """Return the model of a round as clients got it: the current one, or an earlier one in ``Snapshot.past``."""
        now = self.snapshot
        return self.as_sent(now.sent) if round == now.round_number else as_sent(self.settings.layout, now.past[round])

    def _history(self, changes: dict[str, Any], rounds: Sequence[int | None], clients: Sequence[ClientId]) -> History:
        """Return the history after the round, with the surplus folded into rows; update the totals in ``changes``."""
        number, algorithm = self.snapshot.round_number, self.settings.algorithm
        history = self.snapshot.history.after(number, changes["momentum"], len(clients), rounds)
        surplus = history.surplus(algorithm.most_history) if algorithm.folds_history else []
        if not surplus:
            return history
        exact = changes["exact_total"]
        self._fold_directions(history, surplus, changes["total"] if exact is None else exact, frozenset(clients))
        if exact is not None:
            kernels.read_exact(exact, changes["total"])
        return history.folded(surplus)

    def _fold_directions(
        self, history: History, rounds: Iterable[int], total: F64 | ExactSum, staged: Collection[ClientId]
    ) -> None:
        """Stage r_i - v[t] as the row of every client whose last accepted update was in these rounds; adapt the total.

        A correction c_i = v[t] - r_i is then minus the row. T stays the sum of the corrections as stored: T' = T - sum
        of (r_i' - r_i + v[t]), with r_i' the new row as read. New rows keep their rounds, which give their ages.
        ``staged`` are clients whose rows change in this round anyway. Raise DivergedError if a row does not fit the
        codec.

        Cost: a row read and written for each such client; with a codec, 4 n bytes more for each row of a pass.
        """
        store, at_once = self.store, self.settings.batch_size
        for t in rounds:
            v = history.get(t)
            clients = [client for client in store.clients_of(t) if client not in staged]
            for start in range(0, len(clients), at_once):
                some = clients[start : start + at_once]
                k = len(some)
                old = store.rows_of(some)
                rows = old if store.codec == "f32" else [store.read(client) for client in some]
                new = store.stage_all(some, round=t)
                # h = r - v: one step of length 1 from r to v.
                arguments = total, rows, [v] * k, np.ones(k), -np.ones(k), old, [v] * k, new
                keys = rounding_keys(store, "a history that is folded", self.snapshot.round_number, some)
                squares = exchange_whole(store, some, *arguments, out=total, keys=keys, reducer=self.reducer).here
                if (bad := np.flatnonzero(~np.isfinite(squares))).size:
                    raise DivergedError(
                        f"client {some[int(bad[0])]!r}: its correction of round {t} is too large for its "
                        f"{store.codec} row, so x is unchanged; lower the rates, or remove the client"
                    )

    def _step_along_mean(self, result: Result, norms: Mapping[str, Floats]) -> tuple[PreparedStep, Diagnostics] | None:
        """Return the step of ``Sum.total_at_once``, as ``prepare`` does, and its measurements; None if x diverges."""
        now, gamma, share = self.snapshot, claimless_gamma(self.settings, self.snapshot), 1 / result.W
        assert gamma is not None  # as ``Settings.sums_at_once`` requires
        x, v = self.model.new_x(), self.model.v()
        with span("step", None, (result.A, now.x, v, x)):
            v_square, x_square = core.server_step(
                result.A, None, now.x, v_of=Linear(share), gamma=gamma, v=v, total_out=None, x_out=x
            )
        if not math.isfinite(x_square):
            return None
        x.setflags(write=False)
        number, transactions = now.round_number + 1, now.transactions + 1
        moved: dict[str, Any] = {"x": x, "x_prev": x, "momentum": v}
        moved |= {"gamma": gamma, "gamma_lr": rate_at(self.settings.lr, now.round_number)}
        after = now._replace(**moved, norms=norms, changed={}, round_number=number, transactions=transactions)
        step = PreparedStep(now, result, None, after, gamma=gamma)  # type: ignore[arg-type]  # without a ``Cohort``
        return step, Diagnostics(None, v_square / (share * result.W) ** 2)

    def take_step(
        self,
        opened: Any,
        result: Any,
        batch: UpdateBatch,
        norms: Mapping[str, Floats],
        rejected: Sequence[tuple[ClientId, str]],
    ) -> tuple[PreparedStep, Diagnostics]:
        """Take the step of a round, measure it and commit it; see ``prepare``.

        ``opened`` is the round, or a shard's record of it. ``rejected`` is for the audit.
        """
        # Groups and shards have other sums.
        if isinstance(result, Result) and result.at_once and (step := self._step_along_mean(result, norms)) is not None:
            self.commit(step[0].after, opened)
            return step
        prepared, offset = self.prepare(result, batch, norms), self.shared_offset()
        found = Diagnosis(self.settings, self.store, prepared, batch, offset, self.reducer).measure()
        facts = None
        if self.settings.audit:
            joined = [client for client in batch.clients if client in self.newcomers.ids]
            facts = round_facts(self.settings, prepared, batch, rejected, joined)
        self.commit(prepared.after, opened, facts)
        return prepared if facts is None else prepared._replace(after=self.snapshot), found

    def commit(self, after: Snapshot, opened: Any, facts: Document | None = None) -> None:
        """Commit a round's snapshot, and close the round."""
        if not opened.is_open:
            raise RoundError("round: it was aborted before it was finished")
        self.accept(after, facts)
        opened.is_open = False

    def accept(self, after: Snapshot, facts: Document | None = None) -> None:
        """Commit the step of a round; ``facts`` are those of its audit document.

        Raise StoreError if the store could not write the round; nothing has changed then.
        """
        self.become(after, self.snapshot.round_number, facts)
        if self.newcomers.ids:
            self.newcomers.forget()  # the remaining ones are registered now

    def become(self, after: Snapshot, round: int, facts: Document | None) -> None:
        """Commit a snapshot and the staged rows; after the store's commit, memory is updated even on errors.

        ``facts`` are those of the change for its audit document; only a server with an audit needs them.
        """
        before, commits, model = self.snapshot, self.store.commits, self.model
        after, documents = (after, ()) if facts is None else self._documented(after, facts)
        spare_v = model.spare_v
        if after.momentum is not before.momentum:
            # Rows may refer to the old v, so it is not reused. Allocated here: after the commit, nothing may fail.
            used = None if model.is_large else before.momentum
            spare_v = model.directions.get() if self.settings.algorithm.keeps_history else used
        spare_total = model.spare_total if after.total is before.total else before.total
        spare_exact = model.spare_exact if after.exact_total is before.exact_total else before.exact_total
        spares = spare_v, spare_total, spare_exact
        self.reducer.ready()
        try:
            self.keep(after, round, documents)
            self._adopt(after, spares)
        except BaseException:
            if self.store.commits != commits:
                self._adopt(after, spares)
            raise
        self.refer_to_disk()

    def refer_to_disk(self) -> None:
        """Replace the snapshot's vectors by those in the files, which do not take memory."""
        if self.holds_files:
            with suppress(StoreError, MemoryError):  # on failure, the snapshot stays unchanged
                self.snapshot = self.snapshot.on_disk(self.store)

    def _documented(self, after: Snapshot, facts: Document | None) -> tuple[Snapshot, Documents]:
        """Return the snapshot with the digest of the change's audit document, and the documents to store with it."""
        if not self.settings.audit or facts is None:
            return after, ()
        before, texts = self.snapshot, []
        previous, number = before.audited, before.documents
        if undone := [text for _, text in self.documents(number)]:
            texts, number = [undo_document(undone, number)], number + len(undone)
            previous = digest_of_text(texts[0])
        round, key = before.round_number, self._audit_key
        document = document_of(facts, round=round, previous=previous, x=self._digests(after), key=key)
        texts.append(self.reducer.of_first(document))  # each shard has its own time
        after = after._replace(audited=digest_of_text(texts[-1]), documents=number + len(texts))
        return after, list(enumerate(texts, number))

    def _digests(self, after: Snapshot) -> tuple[str, str]:
        """Return the digests of the present x and of that of the next snapshot."""
        x = self.snapshot.x
        ends = self.reducer.digests(x, *([] if after.x is x else [after.x]))
        return ends[0], ends[-1]

    def _adopt(self, after: Snapshot, spares: tuple[Any, Any, Any]) -> None:
        """Make a committed snapshot current, in one statement, which no exception from outside can interrupt."""
        model = self.model
        self.snapshot, self._shared, (model.spare_v, model.spare_total, model.spare_exact) = after, None, spares

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Roll back changes to the store and settings if the block fails before ``become`` commits them."""
        commits, settings = self.store.commits, self.settings
        with uninterrupted():
            try:
                yield
            except BaseException:
                if self.store.commits == commits:
                    self.settings = settings
                    self.store.rollback()
                raise

    def keep(self, after: Snapshot, round: int, documents: Documents = ()) -> None:
        """Commit the staged rows and the changed clients; with files, also the snapshot."""
        if self.holds_files:
            self.store.commit(round, self._vectors(after), self.to_state(after), documents=documents)
        elif self.settings.algorithm.keeps_rows or self.store.is_ahead or documents:
            self.store.commit(round, documents=documents)

    def _vectors(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return the snapshot's vectors in host memory, or as the store has them."""
        vectors = snapshot.vectors(self.settings.algorithm)
        if self._download is None:
            return vectors
        # v[t] never changes, so the store need not write it again.
        known = [name for name in vectors if name.startswith("v/") and name in self.store.vector_names()]
        return self._download.brought(vectors | {name: self.store.vector(name) for name in known})

    def to_state(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return the fields that are not arrays, as JSON."""
        medium, undoable = self.store.medium, self.store.keep_previous
        return state_of(self.settings, snapshot, medium, undoable, len(self.store.registry), self.reducer.place)

    def save(self, path: str | os.PathLike[str]) -> None:
        """See ``Server.save``; copies of groups are in the main store's folder before that is in its place."""

        def parts(folder: Path) -> None:
            for i, state in enumerate(self.states[:-1]):
                state.save(folder / GROUPS / str(i))

        now = self.snapshot
        self.store.save(path, vectors=self._vectors(now), state=self.to_state(now), parts=parts)

    def checkpoint(self) -> None:
        """See ``Server.checkpoint``."""
        for state in self.states:
            state.store.checkpoint()

    def compact(self, erase: bool) -> None:
        """See ``Server.compact``. Nothing refers to the stores' earlier vectors afterwards."""
        self.abandon()
        for state in self.states:
            try:
                state.store.compact(erase=erase)
            finally:  # a compaction may have moved the vectors
                state.refer_to_disk()

    def forget_newcomers(self) -> None:
        """Remove the newcomers of a dropped round."""
        for state in self.states:
            state.newcomers.forget()

    def prefetch(self, clients: Collection[ClientId]) -> None:
        """Read ahead rows that a round will need; raise StoreError if a store is closed."""
        for state in self.states:
            state.store.prefetch(clients if state is self else [one for one in clients if one in state.registry])
