"""A shard: the state and the rounds of a server over one range of the model, with its part of every row.

A shard computes as a server does. Where a decision needs all shards, its ``ClusterReducer`` asks the coordinator.
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
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from fedcore import runtime
from fedcore.arrays import F32, F64, copied, freeze
from fedcore.cluster.manifest import BLOCK, ShardInfo, delete_shard, shard_in
from fedcore.errors import ArrayError, FedcoreError, LockedError, StoreError
from fedcore.options import Settings
from fedcore.server.aggregation import Counters, Squares
from fedcore.server.folder import Transactions, believed, go_back, transactions
from fedcore.server.report import Report
from fedcore.server.round import LOGGER, LocalRound
from fedcore.server.server import first_state, require_clients, require_finite, resumed_state
from fedcore.server.state import NewClients, State
from fedcore.server.step import Sizes
from fedcore.server.update import Update, as_sent, bytes_of, digest_of
from fedcore.server.validation import UpdateReader
from fedcore.store import ClientStore, Durability
from fedcore.store.files.folder import remove, require_copy
from fedcore.store.files.inventory import INDEX, is_own_folder
from fedcore.store.files.locks import WriterLock
from fedcore.store.registry import ClientId

CHANGES = frozenset({"add_clients", "update_clients", "remove_client", "change"})
"""Methods of ``State`` that are a transaction; first the shard discards an unfinished round."""


class Question(NamedTuple):
    """A call waits for an answer.

    Attributes:
        name: of the question, a key of ``coordinator.ANSWERS``.
        value: this shard's part.
    """

    name: str
    value: Any


class Returned(NamedTuple):
    """A call has returned."""

    value: Any


class Raised(NamedTuple):
    """A call has failed."""

    error: BaseException


Reply: TypeAlias = Question | Returned | Raised


class AbandonedError(Exception):
    """A question has no answer, since another shard has failed; the call ends."""


class ShardThread:
    """The thread of a shard. It runs one call at a time, and stops where the call asks a question."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._replies: SimpleQueue[Reply] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, call: Callable[[], Any]) -> None:
        """Begin a call, after the one before has ended. Return at once."""
        self._calls.put(call)

    def answer(self, value: Any) -> None:
        """Answer the question for which the call waits; an error is raised there. Return at once."""
        self._answers.put(value)

    def wait(self, seconds: float | None = None) -> Reply | None:
        """Wait for a question or the end of the call; return None after so many seconds."""
        try:
            return self._replies.get(timeout=seconds)
        except Empty:
            return None

    def ask(self, name: str, value: Any) -> Any:
        """Ask a question within the call and return the answer.

        Raises:
            AbandonedError: there is none.
        """
        self._replies.put(Question(name, value))
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def end(self, last: Callable[[], Any], seconds: float | None = None) -> bool:
        """End the thread after one more call; return whether it ended within so many seconds.

        A call that still runs fails at its next question.
        """
        self._answers.put(AbandonedError("the shards are ended"))
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
            del call  # free its memory before the caller continues
            self._replies.put(reply)


class ClusterReducer:
    """A ``fedcore.server.aggregation.Reducer`` over all shards: it asks the coordinator.

    Args:
        thread: of the shard's calls.
        first: the place of the shard's first parameter.
        has_buffers: whether a shard has float buffers.
        place: the shard's description in its folder.
    """

    def __init__(self, thread: ShardThread, *, first: int, has_buffers: bool, place: dict[str, Any]) -> None:
        self._thread = thread
        self.first, self.has_buffers = first, has_buffers
        self.place: dict[str, Any] | None = place

    def room(self, n: int, k: int = 1) -> F64 | None:
        """See ``Reducer``."""
        return np.empty((-(-n // BLOCK), k))

    def add(self, *squares: Squares) -> list[F64]:
        """See ``Reducer``."""
        partials = [one.partials for one in squares]
        assert all(one is not None for one in partials)
        added: list[F64] = self._thread.ask("add", partials)
        return [np.array(one) for one in added]  # shards share an answer, and Ray's arrays are read-only

    def refusals(self, reasons: list[str | None]) -> list[str | None]:
        """See ``Reducer``."""
        merged: list[str | None] = self._thread.ask("refusals", reasons)
        return merged

    def agree(self, yes: bool) -> bool:
        """See ``Reducer``."""
        return bool(self._thread.ask("agree", yes))

    def ready(self) -> None:
        """See ``Reducer``."""
        self._thread.ask("ready", None)


class UpdateHeader(NamedTuple):
    """An update without its vectors.

    Attributes:
        update: the client's claims; value and control are None.
        error: the reason to reject its vector, if the coordinator has read the whole vector.
        control: whether a slice of a second vector follows, or the reason to reject it.
        counters: the integer counters, for the shard that keeps them; None for the others.
        is_named: whether the client sent a model by names, whose bytes count once it is read.
        digests: of each shard's slice, as the client made them of one vector; None if it made none.
        control_digests: of the second vector, likewise.
    """

    update: Update
    error: FedcoreError | None = None
    control: bool | FedcoreError = False
    counters: Counters | None = None
    is_named: bool = False
    digests: Sequence[str] | None = None
    control_digests: Sequence[str] | None = None


@dataclass(slots=True)
class Slice:
    """A shard's slice of a client's vector: the value or the control of an ``Update``."""

    vector: Any
    counters: Counters = field(default_factory=dict)
    error: FedcoreError | None = None
    digest: str | None = None
    nbytes: int = 0

    def require_digest(self, name: str, vector: Any) -> None:
        """Reject a vector, as it was read, that has another digest.

        Raises:
            ArrayError: it has.
        """
        if self.digest is not None and digest_of(vector) != self.digest:
            raise ArrayError(f"{name}: a digest is not the client's; send all slices of one vector again")


def updates_of(headers: Sequence[UpdateHeader], vectors: Sequence[Any], shard: int) -> list[Update]:
    """The updates of a shard.

    Args:
        vectors: its slices, in the order of the headers: the value, then the second vector, of each that has them.
    """
    slices, updates = iter(vectors), []
    for header in headers:
        vector = None if header.error is not None else next(slices)
        control: Any = header.control if isinstance(header.control, FedcoreError) else None
        if header.control is True:
            control = Slice(next(slices), digest=_digest(header.control_digests, shard))
        size = 0 if header.is_named else bytes_of(vector)
        value = Slice(vector, header.counters or {}, header.error, _digest(header.digests, shard), size)
        updates.append(header.update._replace(value=value, control=control))
    return updates


def _digest(digests: Sequence[str] | None, shard: int) -> str | None:
    return None if digests is None else digests[shard]


class SliceReader(UpdateReader):
    """Reads updates of slices."""

    def _read_vector(self, update: Update) -> tuple[Any, bool]:
        value = update.value
        assert isinstance(value, Slice)
        if value.error is not None:
            raise value.error
        vector, is_fixed = super()._read_vector(update._replace(value=value.vector))
        value.require_digest(update.kind, vector)
        return vector, is_fixed

    def _read_counters(self, update: Update) -> Counters:
        value: Slice = update.value
        return value.counters

    def _read_control(self, control: Any) -> Any:
        if isinstance(control, FedcoreError):
            raise control
        if not isinstance(control, Slice):
            return super()._read_control(control)
        vector = super()._read_control(control.vector)
        control.require_digest("control", vector)
        return vector


class ShardState(NamedTuple):
    """The numbers of round and transaction, which all shards have alike."""

    round_number: int
    transactions: int


class Finished(NamedTuple):
    """The end of a round: the report, the last rejections, and the log records."""

    report: Report
    rejected: tuple[tuple[ClientId, str], ...]
    records: list[logging.LogRecord]


class Shard:
    """A shard. All calls run in its thread, one at a time: of its methods, or of those of its ``State``."""

    def __init__(self, info: ShardInfo, threads: int | None = None) -> None:
        if threads is not None:
            runtime.set_threads(threads)
        self.info, self._thread = info, ShardThread(f"fedcore shard {info.shard}")
        self._reducer = ClusterReducer(
            self._thread, first=info.first, has_buffers=info.has_buffers, place=info.to_state()
        )
        self._rows: ClientStore | None = None
        self._state: State
        self._round: LocalRound | None = None
        self._reported = 0  # rejections that the coordinator has

    def begin(self, name: str, *arguments: Any) -> None:
        """Begin a call; ``wait`` gives its reply."""
        self._thread.begin(lambda: self._method(name)(*arguments))

    def answer(self, value: Any) -> None:
        """Answer the call's question."""
        self._thread.answer(value)

    def wait(self, seconds: float | None = None) -> Reply | None:
        """Wait for a question or the end of the call; return None after so many seconds."""
        return self._thread.wait(seconds)

    def end(self, seconds: float | None = None) -> bool:
        """Close the store after the present call and end the thread; return whether it ended in so many seconds."""
        return self._thread.end(self.close, seconds)

    def _method(self, name: str) -> Callable[..., Any]:
        own: Callable[..., Any] | None = getattr(self, name, None)
        if own is not None:
            return own
        if name in CHANGES:
            self._state.abandon()
        method: Callable[..., Any] = getattr(self._state, name)
        return method

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
        """Make the shard of a new server.

        Args:
            is_new: whether no other code has the memory of x.
            settings: with the layout of this range.
            x: float32, the first model's elements.
        """
        self.info.require_inside()
        p, folder = settings.layout.n_parameters, self.info.folder
        x = x if is_new else copied(x)
        require_finite(x, settings.layout)
        freeze(x)
        in_folder: dict[str, Any] = {}
        if folder is not None:
            in_folder = {"medium": "mmap", "path": folder, "durability": durability, "undoable": True}
        self._rows = ClientStore(clients, p, codec=codec, **in_folder)
        try:
            require_clients(self._rows, clients)
            self._state = first_state(settings, x, counters, client_sizes, self._rows, self._reducer)
        except BaseException:
            self.unmake()
            raise

    def unmake(self) -> None:
        """Delete what ``make`` made: another shard could not be made."""
        if self._rows is not None:
            self.close()
            if self.info.folder is not None:
                remove(Path(self.info.folder))

    def open_folder(self, durability: Durability, seconds: float) -> Transactions:
        """Open the folder, which locks it, and return its transactions.

        Args:
            seconds: to wait for the lock: a process that is being killed may still commit.
        """
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
        """Go on from the folder's last transaction or the one before; return the saved settings."""
        assert self._rows is not None
        go_back(self._rows, transaction)
        folder = self.info.folder
        assert folder is not None
        saved = self.info.require(self._rows.state)
        with believed(folder):
            self._state = resumed_state(self._rows, saved, given, reducer=self._reducer)
        settings: dict[str, Any] = saved["settings"]
        return settings

    def shard_state(self) -> ShardState:
        """The numbers that all shards have alike."""
        now = self._state.snapshot
        return ShardState(now.round_number, now.transactions)

    def begin_round(self, newcomers: NewClients) -> None:
        """Open a round; an unfinished one is aborted."""
        self.abort()
        self._records: list[logging.LogRecord] = []
        logger = logging.Logger(LOGGER.name)
        logger.setLevel(logging.INFO)
        logger.handle = self._records.append  # type: ignore[assignment, method-assign]  # the coordinator logs them
        self._round = LocalRound(
            self._state.settings, self._state, batch_size=1, may_hold=False, logger=logger, reader=SliceReader
        )
        self._reported = 0
        self._round.begin(newcomers)

    def add(self, headers: Sequence[UpdateHeader], *vectors: Any) -> tuple[list[tuple[ClientId, str]], int]:
        """Fold slices of some updates; return the rejections since the last call, and the bytes of the slices."""
        assert self._round is not None
        before = self._round.received
        self._round.add_together(updates_of(headers, vectors, self.info.shard))
        rejected, reported = self._round.rejected, self._reported
        self._reported = len(rejected)
        return list(rejected[reported:]), self._round.received - before

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

    def warm_start(self, clients: list[ClientId], digests: Sequence[str | None], *gradients: Any) -> None:
        """See ``Server.warm_start``; the digests are of the gradients' slices."""
        self._state.abandon()
        for client, digest, gradient in zip(clients, digests, gradients, strict=True):
            Slice(gradient, digest=digest).require_digest(f"gradients[{client!r}]", gradient)
        self._state.warm_start(dict(zip(clients, gradients, strict=True)))

    def prefetch(self, clients: Sequence[ClientId]) -> None:
        """Read ahead the rows that a round will need."""
        self._state.store.prefetch(clients)

    def vector(self, name: Literal["x", "sent", "x_prev", "v"]) -> F32:
        """The shard's slice of a vector; ``sent`` and ``x_prev`` as clients receive them."""
        now, layout = self._state.snapshot, self._state.settings.layout
        if name == "x":
            return now.x
        if name == "v":
            return copied(now.momentum)
        return as_sent(layout, now.sent if name == "sent" else now.x_prev)

    def offset(self, client: ClientId, is_new: bool) -> F32:
        """The shard's slice of a client's offset."""
        offset: F32 = self._state.offset(client, None, is_new=is_new)
        return offset

    def registry(self) -> tuple[int, list[tuple[int, ClientId | None]]]:
        """The registered clients, as ``Registry.restore`` takes them."""
        return self._state.registry.explicit()

    def client_numbers(self, clients: Sequence[object]) -> list[int | None]:
        """The number of each client in the registry; None if it is not registered."""
        registry = self._state.registry
        return [registry.number(client) if client in registry else None for client in clients]

    def require_unused(self, paths: list[str]) -> None:
        """Reject this shard's part of an older copy if a process writes to it, or a server went on in it.

        Raises:
            StoreError, LockedError: it is one.
        """
        for path in map(Path, self._own(paths)):
            if os.path.lexists(path) and is_own_folder(path) and (path / INDEX).exists():
                WriterLock(path, shared=True).close()
                require_copy(path, of_shard=True)

    def delete_copy(self, cluster: str, paths: list[str]) -> bool:
        """Delete this shard's part of an older copy of that cluster; return whether it is deleted."""
        deleted = [delete_shard(cluster, path, shard_in(os.path.basename(path))) for path in self._own(paths)]
        return all(deleted)

    def _own(self, paths: list[str]) -> list[str]:
        """This shard's part of a copy's folders; the copy may have more or fewer shards."""
        return paths[self.info.shard :: self.info.shards]

    def close(self) -> None:
        """Abort an open round, and close the store."""
        with suppress(StoreError):
            self.abort()
        if self._rows is not None:
            self._rows.close()  # if this fails, a later call closes it
            self._rows = None


def settings_of_shard(settings: Settings, layout: Any) -> Settings:
    """The server's settings, with a shard's layout."""
    names = set(layout.names)
    return replace(settings, layout=layout, nonnegative=tuple(name for name in settings.nonnegative if name in names))


def concatenate(slices: Sequence[Any]) -> Any:
    """The whole of a vector, read-only."""
    vector = np.concatenate([np.asarray(one) for one in slices])
    vector.flags.writeable = False
    return vector
