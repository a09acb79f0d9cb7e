"""A shard: the state of a server for one range of the model, and its sums of an open round.

A shard computes like a server. Where a number is of whole vectors, its ``ClusterReducer`` asks the coordinator.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fedcore import kernels, runtime
from fedcore.arrays import F32, F64, Bools, copied, ieee, zeros
from fedcore.cluster.manifest import BLOCK, ShardInfo, delete_shard, shard_in
from fedcore.errors import ArrayError, DtypeError, FedcoreError, LockedError, StoreError
from fedcore.files import is_own_folder
from fedcore.kernels import ExactSum
from fedcore.kernels.robust import symmetric
from fedcore.model import Layout
from fedcore.options import Settings, Storage
from fedcore.server.aggregation import Counters, Lengths, Reducer, Squares, Sum, UpdateBatch
from fedcore.server.folder import Transactions, checkpoint_errors, go_back, transactions_of
from fedcore.server.groups import Context, GroupedState
from fedcore.server.opening import Asked, first_state, resumed_state
from fedcore.server.requests import Change, Query, VectorQuery
from fedcore.server.state import NewClients, State
from fedcore.server.step import Population
from fedcore.server.update import Kind, as_vector, bytes_of, digest_of, in_float32
from fedcore.server.validation import UpdateReader
from fedcore.store import ClientStore, Durability
from fedcore.store.files.folder import remove, require_copy
from fedcore.store.files.inventory import INDEX
from fedcore.store.files.locks import WriterLock
from fedcore.store.registry import ClientId
from fedcore.validation import rejection_reason


class Question(NamedTuple):
    """A reply of a call that waits for an answer: a key of ``coordinator.ANSWERS``, and this shard's contribution."""

    name: str
    value: Any


class Returned(NamedTuple):
    """A reply: the result of a call."""

    value: Any


class Raised(NamedTuple):
    """A reply: the error of a call."""

    error: BaseException


Reply: TypeAlias = Question | Returned | Raised


class AbandonedError(Exception):
    """A question gets no answer because another shard has failed; the call ends."""


class ShardThread:
    """The thread of a shard. It runs one call at a time, and waits whenever the call asks a question."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._replies: SimpleQueue[Reply] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, call: Callable[[], Any]) -> None:
        """Start a call once the previous one has ended. Return at once."""
        self._calls.put(call)

    def answer(self, value: Any) -> None:
        """Answer the pending question; an error is raised in the call. Return at once."""
        self._answers.put(value)

    def wait(self, seconds: float | None = None) -> Reply | None:
        """Wait for a question or the end of the call. Return None after the timeout, in seconds."""
        try:
            return self._replies.get(timeout=seconds)
        except Empty:
            return None

    def ask(self, name: str, value: Any) -> Any:
        """Ask a question from within a call, and return the answer."""
        self._replies.put(Question(name, value))
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def end(self, last: Callable[[], Any], seconds: float | None = None) -> bool:
        """End the thread after one more call; return whether it ended in time. A running call fails at a question."""
        self._answers.put(AbandonedError("the shards were closed"))
        self._calls.put(last)
        self._calls.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                reply: Reply = Returned(call())
            except BaseException as error:
                reply = Raised(error)
            del call  # frees its memory before the caller continues
            self._replies.put(reply)


class ClusterReducer(Reducer):
    """A reducer over all shards, which asks the coordinator. ``sent`` returns the form in which it sends a vector."""

    def __init__(self, thread: ShardThread, *, first: int, has_buffers: bool, place: dict[str, Any]) -> None:
        super().__init__(has_buffers=has_buffers, first=first, place=place)
        self._thread = thread
        self.sent: Callable[[Any], Any] = lambda vector: vector

    def room(self, n: int, k: int = 1) -> F64 | None:
        """See ``Reducer``."""
        return np.empty((-(-n // BLOCK), k))

    def add(self, *squares: Squares) -> list[F64]:
        """See ``Reducer``."""
        kept = slice(None if self.is_present else 0)
        partials = [one.partials[kept] for one in squares if one.partials is not None]
        # Copied, since shards share an answer and Ray's arrays are read-only.
        return [np.array(one) for one in self._thread.ask("add", partials)]

    def gram_matrix(self, n: int, bases: Sequence[Any], ys: Sequence[Any], scales: F64) -> F64:
        """See ``Reducer``."""
        k = len(scales)
        room = self.room(n, k * (k + 1) // 2)
        products = kernels.gram_matrix(bases, ys, scales, partials=room)
        return symmetric(self.add(Squares(products, room))[0], k)

    def digests(self, *vectors: Any) -> list[str]:
        """See ``Reducer``."""
        return list(self._thread.ask("digests", list(map(self.sent, vectors))))

    def of_first(self, value: Any) -> Any:
        """See ``Reducer``."""
        return self._thread.ask("first", value)

    def agree(self, yes: bool) -> bool:
        """See ``Reducer``."""
        return bool(self._thread.ask("agree", yes))

    def ready(self) -> None:
        """See ``Reducer``."""
        self._thread.ask("ready", None)


class ShardGroups(GroupedState):
    """The states of the groups in a shard. An update has a slice of each group that it sends, by name."""

    def sent_groups(self, y: Any) -> list[str]:
        """See ``GroupedState``; the names of groups may take the place of a vector."""
        return [name for name in self.groups if name in y]

    def tensors_of(self, name: str, y: Any) -> Any:
        """See ``GroupedState``."""
        return y[name]


class ShardState(NamedTuple):
    """The round and transaction numbers, which are the same in all shards."""

    round_number: int
    transactions: int


@dataclass
class ShardRound:
    """The part of an open round in a shard.

    Attributes:
        sums: the sums of its slices; with groups, a ``GroupSums``.
        reader: reads models of earlier rounds, and checks float buffers.
        tried: the batch of the last ``try_fold``.
        folded: the accepted batches; with a robust rule they have their vectors.
    """

    sums: Sum
    reader: UpdateReader
    tried: UpdateBatch = field(default_factory=UpdateBatch)
    squares: F64 = field(default_factory=partial(np.empty, 0))
    folded: list[UpdateBatch] = field(default_factory=list)
    is_open: bool = True


class Shard:
    """A shard. All calls of its methods, or of its ``State``, run in its thread, one at a time."""

    def __init__(self, info: ShardInfo, threads: int | None = None) -> None:
        if threads is not None:
            runtime.set_threads(threads)
        self.info, self.thread = info, ShardThread(f"fedcore shard {info.shard}")
        self._reducer = ClusterReducer(
            self.thread, first=info.first, has_buffers=info.has_buffers, place=info.to_state()
        )
        self._stores: list[ClientStore] = []
        self._state: State
        self._round: ShardRound | None = None

    def begin(self, name: str, *arguments: Any) -> None:
        """Start a call in the shard's thread."""
        self.thread.begin(lambda: (getattr(self, name, None) or getattr(self._state, name))(*arguments))

    def end(self, seconds: float | None = None) -> bool:
        """Close the store after the present call and end the thread; return whether it ended in time."""
        return self.thread.end(self.close, seconds)

    def make(
        self, clients: Asked, storage: Storage, is_new: bool, settings: Settings, x: F32, counters: Counters
    ) -> None:
        """Create the shard of a new server. Copy x unless ``is_new``; the settings have the layout of this range.

        ``storage`` has the codec and the durability.
        """
        self.info.require_inside()
        layout, folder = settings.layout, self.info.folder
        x = x if is_new and not layout.groups else self._flat(x, layout, has_buffers=True)
        if folder is not None:
            delete_shard(self.info.cluster, folder, self.info.shard)  # of a creation that was killed
            storage = replace(storage, path=folder, keep_previous=True)
        self._state = first_state(settings, (x, counters), clients, storage, context=self._context(layout))
        self._stores = [state.store for state in self._state.states]

    def _context(self, layout: Layout) -> Context:
        """Return the class for groups of tensors, and the reducers of the shard and of its groups."""
        place, reducers = self.info.to_state(), dict[str | None, Reducer]({None: self._reducer})
        if layout.groups:
            self._reducer.sent = lambda vector: {name: layout.cut(vector, name) for name in self.info.present}
        for name, piece in self.info.groups.items():
            own = ClusterReducer(self.thread, first=piece.start, has_buffers=self.info.has_buffers, place=place)
            own.is_present, reducers[name] = name in self.info.present, own
        return Context(ShardGroups, reducers)

    def _flat(self, parts: Any, layout: Layout, *, has_buffers: bool) -> Any:
        """Return a copy of a slice; with groups, from the parts of each."""
        if not layout.groups:
            return copied(parts)
        dtype = next(iter(parts.values())).dtype
        return layout.join(parts, zeros(layout.n if has_buffers else layout.n_parameters, dtype))

    def unmake(self) -> None:
        """Delete the result of ``make`` because another shard could not be created."""
        if self._stores:
            self.close()
            if self.info.folder is not None:
                remove(Path(self.info.folder))

    def open_folder(self, durability: Durability, seconds: float) -> Transactions:
        """Lock and open the folder, and return its transactions. Retry for ``seconds`` while it is locked."""
        until = time.monotonic() + seconds
        while True:
            try:
                self._stores = self.info.open_all(durability=durability)
                return transactions_of(self._stores)
            except LockedError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)

    def resume(self, transaction: int, given: Mapping[str, Any]) -> dict[str, Any]:
        """Continue from the folder's last transaction or the one before; return the saved settings."""
        for store in self._stores:
            go_back(store, transaction)
        folder = self.info.folder or "store"

        def read(store: ClientStore) -> tuple[dict[str, Any], Settings]:
            saved = self.info.require(store.state)
            return saved, Settings.from_state(saved["settings"], given)

        with checkpoint_errors(folder):
            context = self._context(read(self._stores[0])[1].layout)
            self._state, saved = resumed_state(folder, self._stores, read, context)
        self._state.sign_by(given.get("audit_key"))
        return {**saved, "codec": self._stores[-1].codec}

    def read(self, query: Query) -> Any:
        """Return the answer to a query; of a vector, with groups, a part for each."""
        answer = self._state.read(query)
        return self._reducer.sent(answer) if isinstance(query, VectorQuery) else answer

    def start_for(self, client: ClientId) -> Any:
        """See ``State``."""
        return self._reducer.sent(self._state.start_for(client))

    def shard_state(self) -> ShardState:
        """Return the numbers that are the same in all shards."""
        now = self._state.snapshot
        return ShardState(now.round_number, now.transactions)

    @ieee
    def begin_round(self, newcomers: NewClients) -> Population | None:
        """Open a round, and abort an unfinished one; return the population with the newcomers, if any."""
        self.abort()
        sums = self._state.begin(newcomers)
        self._round = ShardRound(sums, self._state.reader(self._state.settings, self._state))
        return self._state.newcomers.population

    def valid(self, name: str, *arguments: Any) -> Any:
        """Return the result of one of the next three methods, which check parts of updates, or its error as text."""
        try:
            return getattr(self, name)(*arguments)
        except FedcoreError as error:
            return rejection_reason(error)

    def check_slice(self, name: str, has_buffers: bool, returns: bool, digest: str | None, vector: Any) -> Any:
        """Return the bytes of a slice, and with ``returns`` the slice as float32.

        Raise an error if it is invalid or does not match the client's digest.
        """
        read = self._read(name, has_buffers, digest, vector)
        return bytes_of(read), in_float32(read) if returns else None

    def check_buffers(self, kind: Kind, started: int, vector: Any) -> None:
        """Raise an error if a slice makes a float buffer negative that must not be."""
        self._opened.reader.check_buffers(self._update(kind, True, vector), kind, started)

    def of_groups(self, name: str, *arguments: Any) -> Any:
        """Return what the reader of partial updates, their sums or the groups return."""
        has: Any = next(one for one in (self._opened.reader, self._opened.sums, self._state) if hasattr(one, name))
        return getattr(has, name)(*arguments)

    def first_not_finite(self, has_buffers: bool, vector: Any) -> str | None:
        """Return the name of the first tensor with a NaN or infinity in a slice, or None."""
        return self._state.first_not_finite(self._read("update", has_buffers, None, vector))

    def _update(self, name: str, has_buffers: bool, vector: Any) -> Any:
        """Return a slice of an update as an array; with groups, one for each that it has."""
        if self._state.settings.layout.groups:
            return {group: part if len(part) else zeros(1) for group, part in vector.items()}
        return self._read(name, has_buffers, None, vector)

    def _read(self, name: str, has_buffers: bool, digest: str | None, vector: Any) -> Any:
        """Return a slice as an array; raise if it is invalid."""
        if digest is not None and digest_of(vector) != digest:
            raise ArrayError(f"{name}: a slice does not match the client's digest; send all slices of one vector again")
        layout = self._state.settings.layout
        if layout.groups:  # which the coordinator has read
            return self._flat(vector, layout, has_buffers=has_buffers)
        n = layout.n if has_buffers else layout.n_parameters
        array = as_vector(name, vector, n)
        if array is None:
            raise DtypeError(f"{name}: expected float32[{n}], got {type(vector).__name__}")
        return copied(array) if isinstance(array, np.ndarray) and not array.flags.aligned else array

    @property
    def _opened(self) -> ShardRound:
        assert self._round is not None
        return self._round

    @ieee
    def try_fold(self, batch: UpdateBatch, *slices: Any) -> Lengths:
        """Fold the slices of a batch; see ``Sum``.

        The values come before the second vectors. ``bases`` has the rounds of the models, or None.
        """
        opened, k = self._opened, len(batch)
        rounds: Sequence[Any] = batch.bases
        sent = zip(batch.has_buffers.tolist(), slices[:k], strict=True)
        vectors = [self._update("update", has, one) for has, one in sent]
        controls = [self._read("control", False, None, one) for one in slices[k:]] or batch.controls
        bases = [*map(self._base_of, batch.clients, vectors, rounds)]
        opened.tried = replace(batch, vectors=vectors, controls=controls, bases=bases)
        lengths = opened.sums.try_fold(opened.tried)
        opened.squares = lengths.parameters
        return lengths

    def _base_of(self, client: ClientId, y: Any, started: int | None) -> Any:
        """Return the model from which an update is subtracted, or None; with groups, one for each."""
        reader = self._opened.reader
        if started is not None and self._state.settings.algorithm.own_starts:
            reader.own_start(client, y)
        return None if started is None else reader.start_of(started)

    def accept(self) -> None:
        """Add the batch of ``try_fold``."""
        self._opened.sums.accept(self._opened.tried)
        self._keep(self._opened.tried, self._opened.squares)

    @ieee
    def refold(self, batch: UpdateBatch, accepted: Bools, factors: F64) -> F64:
        """Add the accepted updates of ``try_fold`` with new claims and weights; return their |h_i|^2. See ``Sum``."""
        tried = self._opened.tried
        tried.claims, tried.weights = batch.claims, batch.weights
        kept, squares = self._opened.sums.refold(tried, accepted, factors)
        self._keep(kept, squares)
        return squares

    @ieee
    def join(self, batch: UpdateBatch, more: Sequence[Any], *words: Any) -> bool:
        """Add slices of the words of an exact sum, and of that of the changes; see ``Sum``."""
        if (layout := self._state.settings.layout).groups:
            words = tuple(self._flat(one, layout, has_buffers=i < 2) for i, one in enumerate(words))
        sums = [ExactSum(*pair) for pair in zip(words[::2], words[1::2], strict=True)]
        if joined := self._opened.sums.join(sums[0], batch, *sums[1:], *more):
            self._opened.folded.append(batch)
        return joined

    def words(self) -> tuple[ExactSum, ExactSum | None]:
        """See ``Sum``."""
        sums: Any = [one and ExactSum(*map(self._reducer.sent, one)) for one in self._opened.sums.words()]
        return sums[0], sums[1]

    def _keep(self, batch: UpdateBatch, squares: F64) -> None:
        self._opened.tried = UpdateBatch()
        if len(batch):
            batch.settle(squares, self._state.settings, self._state.round_number)
            self._opened.folded.append(batch)

    @ieee
    def finish(self, norms: Mapping[str, Any], rejected: Sequence[Any], has_noise: bool) -> Any:
        """Take the step; return it without vectors, and its diagnostics.

        ``norms`` are those of accepted updates, for the rules. ``rejected`` is for the audit. ``has_noise``: whether
        the clients of a private round added the noise.
        """
        opened = self._opened
        state, rules, now = self._state, self._state.settings.rules, self._state.snapshot
        batch = UpdateBatch.cohort(opened.folded, state.settings, state.registry)
        result = opened.sums.total(batch, rules, now.ledger, now.center, has_noise=has_noise)
        batch.drop()
        prepared, found = state.take_step(opened, result, batch, norms, rejected)
        self._round = None  # if the step fails, ``abort`` discards what the round has staged
        none: Any = None
        after = state.snapshot.shared()
        return prepared._replace(before=none, result=none, cohort=none, step=None, after=after), found

    def abort(self) -> None:
        """Abort the round, if one is open."""
        if self._round is not None:
            self._round = None
            self._state.abandon()

    def apply(self, change: Change, digests: Sequence[str | None], *vectors: Any) -> None:
        """Make a change with slices of its vectors, which must have these digests; discard an unfinished round."""
        self._state.abandon()
        parts = zip(change.vectors, digests, vectors, strict=True)
        cut = {name: self._read(name, change.has_buffers, digest, part) for name, digest, part in parts}
        if change.has_buffers and not self._state.settings.layout.groups:
            cut = {name: copied(vector) for name, vector in cut.items()}
        self._state.apply(replace(change, vectors=cut))

    def registry(self) -> tuple[int, list[tuple[int, ClientId | None]]]:
        """Return the registered clients: the arguments of ``Registry.restore``."""
        return self._state.registry.explicit()

    def client_numbers(self, clients: Sequence[object]) -> list[int | None]:
        """Return the registry number of each client; None for an unregistered one."""
        registry = self._state.registry
        return [registry.number(client) if client in registry else None for client in clients]

    def require_unused(self, paths: list[str]) -> None:
        """Reject this shard's part of an older copy if a process writes to it, or a server was resumed from it."""
        for path in map(Path, self._own(paths)):
            if os.path.lexists(path) and is_own_folder(path) and (path / INDEX).exists():
                WriterLock(path, shared=True).close()
                require_copy(path, of_shard=True)

    def delete_copy(self, cluster: str, paths: list[str]) -> bool:
        """Delete this shard's part of an older copy of a cluster; return whether it is deleted."""
        deleted = [delete_shard(cluster, path, shard_in(os.path.basename(path))) for path in self._own(paths)]
        return all(deleted)

    def _own(self, paths: list[str]) -> list[str]:
        """Return this shard's part of a copy's folders; the copy may have a different number of shards."""
        return paths[self.info.shard :: self.info.shards]

    def close(self) -> None:
        """Abort an open round, and close the store."""
        with suppress(StoreError):
            self.abort()
        while self._stores:
            self._stores[-1].close()  # if this fails, a later call closes it
            self._stores.pop()
