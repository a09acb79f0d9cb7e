"""A shard: the state and the rounds of a server for one range of the model.

A shard computes like a server. Where a decision needs all shards, its ``ClusterReducer`` asks the coordinator.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fedcore import kernels, runtime
from fedcore.arrays import F32, F64, copied, freeze
from fedcore.cluster.manifest import BLOCK, ShardInfo, delete_shard, shard_in
from fedcore.errors import ArrayError, FedcoreError, LockedError, StoreError
from fedcore.files import is_own_folder
from fedcore.kernels.robust import symmetric
from fedcore.options import Settings, Storage
from fedcore.server.aggregation import Counters, Reducer, Squares
from fedcore.server.folder import Transactions, checkpoint_errors, go_back, transactions
from fedcore.server.opening import first_of, first_state, require_clients, resumed_state
from fedcore.server.report import Report
from fedcore.server.requests import Change
from fedcore.server.round import LOGGER, LocalRound
from fedcore.server.state import NewClients, State
from fedcore.server.step import Sizes
from fedcore.server.update import Update, bytes_of, digest_of, require_finite
from fedcore.server.validation import UpdateReader
from fedcore.store import ClientStore, Durability
from fedcore.store.files.folder import remove, require_copy
from fedcore.store.files.inventory import INDEX
from fedcore.store.files.locks import WriterLock
from fedcore.store.registry import ClientId


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
    """A reducer over all shards, which asks the coordinator."""

    def __init__(self, thread: ShardThread, *, first: int, has_buffers: bool, place: dict[str, Any]) -> None:
        super().__init__(has_buffers=has_buffers, first=first, place=place)
        self._thread = thread

    def room(self, n: int, k: int = 1) -> F64 | None:
        """See ``Reducer``."""
        return np.empty((-(-n // BLOCK), k))

    def add(self, *squares: Squares) -> list[F64]:
        """See ``Reducer``."""
        partials = [one.partials for one in squares]
        assert all(one is not None for one in partials)
        # Copied, since shards share an answer and Ray's arrays are read-only.
        return [np.array(one) for one in self._thread.ask("add", partials)]

    def gram_matrix(self, n: int, bases: Sequence[Any], ys: Sequence[Any], scales: F64) -> F64:
        """See ``Reducer``."""
        k = len(scales)
        room = self.room(n, k * (k + 1) // 2)
        products = kernels.gram_matrix(bases, ys, scales, partials=room)
        return symmetric(self.add(Squares(products, room))[0], k)

    def rejections(self, reasons: list[str | None]) -> Any:
        """See ``Reducer``."""
        return self._thread.ask("rejections", reasons)

    def agree(self, yes: bool) -> bool:
        """See ``Reducer``."""
        return bool(self._thread.ask("agree", yes))

    def ready(self) -> None:
        """See ``Reducer``."""
        self._thread.ask("ready", None)


@dataclass(slots=True)
class Slice:
    """A shard's slice of a client's vector: the ``value`` or ``control`` of an ``Update``.

    Attributes:
        error: the reason to reject the vector, if the coordinator has already read it; then there is no slice.
        digests: the client's digests of all slices.
        counters: the integer counters, for the shard that keeps them.
        is_named: whether the client sent named tensors, whose bytes are counted once they are read.
        vector: the slice. It follows the updates in a message.
    """

    error: FedcoreError | None = None
    digests: Sequence[str] | None = None
    counters: Counters = field(default_factory=dict)
    is_named: bool = False
    vector: Any = None

    def of_shard(self, k: int) -> "Slice":
        """Return what a shard needs of it."""
        return replace(self, digests=self.digests and [self.digests[k]], counters={} if k else self.counters)

    @property
    def nbytes(self) -> int:
        """The bytes that the client sent."""
        return 0 if self.is_named else bytes_of(self.vector)

    def read(self, name: str, read: Callable[[Any], Any]) -> Any:
        """Return what ``read`` makes of the slice; raise if the coordinator found an error, or the digest differs."""
        if self.error is not None:
            raise self.error
        if self.digests is not None and digest_of(self.vector) != self.digests[0]:
            raise ArrayError(f"{name}: a slice does not match the client's digest; send all slices of one vector again")
        return read(self.vector)


class SliceReader(UpdateReader):
    """An ``UpdateReader`` for slices."""

    def _read_vector(self, update: Update) -> tuple[Any, bool]:
        read = super()._read_vector
        vector: tuple[Any, bool] = update.value.read(update.kind, lambda own: read(update._replace(value=own)))
        return vector

    def _read_counters(self, update: Update) -> Counters:
        counters: Counters = update.value.counters
        return counters

    def _read_control(self, control: Slice | None) -> Any:
        read = super()._read_control
        return read(None) if control is None else control.read("control", read)


class ShardState(NamedTuple):
    """The round and transaction numbers, which are the same in all shards."""

    round_number: int
    transactions: int


class Finished(NamedTuple):
    """The result of a round: the report, the last rejections, and the log records."""

    report: Report
    rejected: tuple[tuple[ClientId, str], ...]
    records: list[logging.LogRecord]


class Shard:
    """A shard. All calls of its methods, or of its ``State``, run in its thread, one at a time."""

    def __init__(self, info: ShardInfo, threads: int | None = None) -> None:
        if threads is not None:
            runtime.set_threads(threads)
        self.info, self.thread = info, ShardThread(f"fedcore shard {info.shard}")
        self._reducer = ClusterReducer(
            self.thread, first=info.first, has_buffers=info.has_buffers, place=info.to_state()
        )
        self._rows: ClientStore | None = None
        self._state: State
        self._round: LocalRound | None = None
        self._reported = 0  # the number of rejections that the coordinator has received

    def begin(self, name: str, *arguments: Any) -> None:
        """Start a call in the shard's thread."""
        self.thread.begin(lambda: (getattr(self, name, None) or getattr(self._state, name))(*arguments))

    def end(self, seconds: float | None = None) -> bool:
        """Close the store after the present call and end the thread; return whether it ended in time."""
        return self.thread.end(self.close, seconds)

    def make(
        self,
        clients: Any,
        client_sizes: Sizes | None,
        codec: Any,
        durability: Durability,
        is_new: bool,
        settings: Settings,
        x: F32,
        counters: Counters,
    ) -> None:
        """Create the shard of a new server. Copy x unless ``is_new``; the settings have the layout of this range."""
        self.info.require_inside()
        p, folder = settings.layout.n_parameters, self.info.folder
        x = x if is_new else copied(x)
        require_finite(x, settings.layout)
        freeze(x)
        rows = ClientStore(clients, p, codec=codec)
        require_clients(rows, clients)
        storage = Storage()
        if folder is not None:
            delete_shard(self.info.cluster, folder, self.info.shard)  # of a creation that was killed
            storage = Storage(folder, durability=durability, keep_previous=True)
        self._state = first_state(first_of(settings, x, counters, client_sizes, rows), storage, self._reducer)
        self._rows = self._state.store

    def unmake(self) -> None:
        """Delete the result of ``make`` because another shard could not be created."""
        if self._rows is not None:
            self.close()
            if self.info.folder is not None:
                remove(Path(self.info.folder))

    def open_folder(self, durability: Durability, seconds: float) -> Transactions:
        """Lock and open the folder, and return its transactions. Retry for ``seconds`` while it is locked."""
        until = time.monotonic() + seconds
        while True:
            try:
                self._rows = self.info.open(durability=durability)
                return transactions(self._rows)
            except LockedError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)

    def resume(self, transaction: int, given: Mapping[str, Any]) -> dict[str, Any]:
        """Continue from the folder's last transaction or the one before; return the saved settings."""
        assert self._rows is not None
        go_back(self._rows, transaction)
        folder = self.info.folder
        assert folder is not None
        saved = self.info.require(self._rows.state)
        with checkpoint_errors(folder):
            settings = Settings.from_state(saved["settings"], given)
            self._state = resumed_state(self._rows, saved, settings, self._reducer)
        return {**saved["settings"], "codec": self._rows.codec}

    def shard_state(self) -> ShardState:
        """Return the numbers that are the same in all shards."""
        now = self._state.snapshot
        return ShardState(now.round_number, now.transactions)

    def begin_round(self, newcomers: NewClients) -> None:
        """Open a round, and abort an unfinished one."""
        self.abort()
        self._records: list[logging.LogRecord] = []
        logger = logging.Logger(LOGGER.name)
        logger.setLevel(logging.INFO)
        logger.handle = self._records.append  # type: ignore[assignment, method-assign]  # the coordinator logs them
        self._round = LocalRound(
            self._state.settings, self._state, reader=SliceReader, batch_size=1, may_hold=False, logger=logger
        )
        self._reported = 0
        self._round.start(newcomers)

    def add(self, updates: Sequence[Update], *vectors: Any) -> tuple[list[tuple[ClientId, str]], int]:
        """Aggregate updates of slices; return the rejections since the last call, and the bytes of the slices.

        ``vectors`` are the slices, in the order of the updates: values before controls.
        """
        assert self._round is not None
        before, slices = self._round.received, iter(vectors)
        for update in updates:
            for part in (update.value, update.control):
                if part is not None and part.error is None:
                    part.vector = next(slices)
        self._round.add_group(updates)
        return self._new_rejections(), self._round.received - before

    def settle(self) -> list[tuple[ClientId, str]]:
        """Decide on all updates of the round; return the rejections since the last call."""
        assert self._round is not None
        self._round.settle()
        return self._new_rejections()

    def _new_rejections(self) -> list[tuple[ClientId, str]]:
        assert self._round is not None
        rejected, reported = self._round.rejected, self._reported
        self._reported = len(rejected)
        return list(rejected[reported:])

    def finish(self) -> Finished:
        """Finish the round."""
        assert self._round is not None
        opened, self._round = self._round, None
        report = opened.finish()
        return Finished(report, report.rejected[self._reported :], self._records)

    def abort(self) -> None:
        """Abort the round, if one is open."""
        if self._round is not None:
            self._round.abort()
            self._round = None

    def apply(self, change: Change, digests: Sequence[str | None], *vectors: Any) -> None:
        """Make a change with slices of its vectors, which must have these digests; discard an unfinished round."""
        self._state.abandon()

        def own(vector: Any) -> Any:
            return copied(vector) if change.has_buffers else vector

        parts = zip(change.vectors, digests, vectors, strict=True)
        cut = {name: Slice(digests=digest and [digest], vector=part).read(name, own) for name, digest, part in parts}
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
        if self._rows is not None:
            self._rows.close()  # if this fails, a later call closes it
            self._rows = None


def settings_of_shard(settings: Settings, layout: Any) -> Settings:
    """Return the server's settings with a shard's layout."""
    names = set(layout.names)
    own = tuple(name for name in settings.started_nonnegative if name in names)
    return replace(settings, layout=layout, started_nonnegative=own)
