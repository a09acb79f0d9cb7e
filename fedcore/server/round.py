"""An open round: updates are read, validated and added to the sums as they arrive; they are not stored."""

import logging
import time
from _thread import RLock  # without the function around it in ``threading``
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import cached_property, partial, wraps
from operator import itemgetter
from threading import Lock
from typing import Any, Concatenate, ParamSpec, Self, TypeVar
from weakref import ref

import numpy as np

from fedcore.arrays import F32, BufferPool, FileMemory, ieee
from fedcore.errors import (
    AlgorithmError,
    ClusterError,
    DeviceError,
    FedcoreError,
    RangeError,
    RoundError,
    StoreError,
    TooFewUpdatesError,
    UnknownClientError,
    UnknownNameError,
)
from fedcore.options import Callback, Storage
from fedcore.profiling import begin, span
from fedcore.runtime import Unpicklable, uninterrupted
from fedcore.server.aggregation import NO_COUNT, LowWeightsError, UpdateBatch
from fedcore.server.compatibility import require_compatible
from fedcore.server.folder import Journal
from fedcore.server.partial import PartialSum, PartialSums
from fedcore.server.report import Attendance, Rejected, Report, announce, report_of, warn_if_capped
from fedcore.server.state import NewClients, State
from fedcore.server.update import (
    ACCEPTED,
    ALREADY,
    HELD,
    IDS,
    NO_ROUND,
    CountedIds,
    Incoming,
    Kind,
    Reply,
    Staging,
    Update,
    bytes_of,
    digest_of_id,
    immutable_copy,
)
from fedcore.server.validation import LOGGER, NOT_FINITE, Decision, ReadUpdate, Validator, Weighing
from fedcore.store.registry import ClientId, Registry
from fedcore.validation import Represented, check_integer, check_number, is_integer, listed, rejection_reason

SECOND = "update: the round already has an update of this client; only the first counts"
NO_EXAMPLES = "examples: missing, but other updates of the round report a number"
UNLISTED = "round %d: it rejects more updates than it lists; the report has the first ones"
ANY_EXAMPLES, SAME_EXAMPLES = -1, 2
"""Whether updates have numbers of examples: as each likes, or all or none. 0 and 1 stand for none and all."""
IN_PARTIAL = "client: already part of a partial sum of this round; limit an edge with add_partial_sum(clients=...)"


class OpenRound(Represented, Unpicklable):
    """Base class of the rounds of servers and networks: one call at a time, the rejections, and the context manager."""

    _instead = "finish it, or abort it, and pickle its report"
    report: Report | None = None
    is_open = True
    _is_ending = False  # whether a signal handler called ``abort`` in a call, which then aborts the round
    _bytes = 0
    _seconds = 0.0

    def __init__(self, number: int, callbacks: Sequence[Callback], logger: logging.Logger) -> None:
        self._number, self._callbacks, self._logger = number, callbacks, logger
        # A thread that calls the round holds _turn, and _inside during the call; ``with`` releases both even if a
        # signal handler raises.
        self._turn, self._inside = RLock(), Lock()
        self._rejected = Rejected(partial(logger.warning, UNLISTED, number))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy with new locks."""
        round = memo[id(self)] = type(self).__new__(type(self))
        locks = {"_turn": RLock(), "_inside": Lock()}
        round.__dict__.update(deepcopy({k: v for k, v in self.__dict__.items() if k not in locks}, memo) | locks)
        return round

    @abstractmethod
    def finish(self) -> Report:
        """Take the step and close the round."""

    @abstractmethod
    def _counts(self) -> dict[str, int]:
        """The numbers in the repr of an open round."""

    def _abort(self) -> None:
        """Close the round; the caller holds ``_turn``."""
        self.is_open = False

    @property
    def rejected(self) -> tuple[tuple[ClientId, str], ...]:
        """The clients whose updates were rejected so far, with the reasons."""
        return tuple(self._rejected)

    def _facts(self) -> dict[str, Any]:
        if not self.is_open:
            return {"is_open": False, "report": self.report}
        return {"round": self._number, "is_open": True, **self._counts()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort(keep=True)
        elif self.is_open:
            try:
                self.finish()
            except BaseException:
                self.abort(keep=True)
                raise

    def abort(self, *, keep: bool = False) -> None:
        """Close the round and leave the server as it was before ``open_round``. Do nothing if the round is closed.

        A signal handler may call it too. If it interrupts ``add``, the round is aborted when ``add`` returns.

        Args:
            keep: with ``Storage(journal=True)``, whether the next round starts with the updates of this one.
        """
        with self._turn:
            if self._inside.locked():
                self._is_ending = True
            elif self.is_open:
                self._abort()
                if not keep:
                    self._empty_journal()

    def _empty_journal(self) -> None:
        """Drop the updates that a later round would start with."""

    def _announce(self, report: Report) -> None:
        """Warn if the round rejected all updates, and call the callbacks."""
        announce(report, self._callbacks, self._logger)

    def _require_open(self) -> None:
        if not self.is_open:
            raise RoundError("round: it is finished or aborted; open a new round")


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound=OpenRound)


def one_call(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Let one thread at a time call the round. Raise RoundError if a signal handler calls it during a call."""

    @wraps(method)
    def called(self: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._turn:
            if self._inside.locked():
                raise RoundError("round: a signal handler may only call abort() during another call")
            try:
                with self._inside:
                    return method(self, *args, **kwargs)
            finally:
                if self._is_ending and self.is_open:
                    self._abort()
                    self._empty_journal()

    return called


class Round(OpenRound):
    """An open round of a server, from ``Server.open_round``; use it as a context manager.

    An exception in the block, or ``abort()``, leaves the server as it was before ``open_round``. Otherwise the round is
    finished at the end of the block, if still open. Signals that arrive during the commit wait until its end. Several
    threads may add updates; each call waits for the one before it.

    With ``Storage(journal=True)``, an accepted update is on disk when ``add`` returns. If the process is killed, an
    exception leaves the block, or the step diverges, the next round of the server starts with these updates. They are
    dropped by ``abort()``, and if their weights are too small for the sums.

    Attributes:
        report: the ``Report`` once the round is finished, else None.
        is_open: whether the round accepts updates.
        newcomers: the clients that may join with the round.
        takes_weights: whether an update may have a ``weight``.
    """

    # Defaults of the class: Python finds an object's attributes faster if there are at most 30.
    newcomers: NewClients = ()
    takes_weights = True
    _ids: CountedIds  # of updates that count
    _arrivals = 0  # the order of the next valid update
    _plain: Any = None  # a ``core.PlainUpdates`` of held updates, if the server takes them
    _has_examples = False  # whether an update of the round has a number of examples or a weight
    _staging: Staging | None = None  # of updates in pieces
    _journal: Journal | None = None

    def __init__(
        self,
        state: State,
        *,
        batch_size: int,
        may_hold: bool,
        callbacks: Sequence[Callback] = (),
        attendance: Attendance | None = None,
    ) -> None:
        state.prefetch(())  # raises StoreError if the store is closed
        super().__init__(state.snapshot.round_number, callbacks, LOGGER)
        settings = self._settings = state.settings
        self._state, self._batch_size, self._may_hold = state, batch_size, may_hold
        self._reader, self._weighing = state.reader(settings, state), Weighing(settings, state)
        # The clients of held and folded updates, or (order, client) of each where clients may send several.
        self._known: set[Any] = set()
        self._summed: set[ClientId] = set()  # the clients of partial sums
        self._held: list[UpdateBatch] = []  # before those of ``_plain``
        self._undecided: list[UpdateBatch] = []
        self._folded: list[UpdateBatch] = []
        self._keeps_vectors = settings.rules.robust is not None  # until the step
        in_files = self._keeps_vectors and isinstance(settings.device, FileMemory)
        self._most_plain = 1 if in_files else batch_size  # updates that ``_plain`` may hold
        self.attendance = Attendance(settings.policy) if attendance is None else attendance

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy without the open updates, which belong to this round."""
        with self._turn:
            if self._inside.locked():
                raise RoundError("round: it cannot be copied during a call")
            self._read_plain()
            plain, self._plain = self._plain, None
            try:
                round = super().__deepcopy__(memo)
            finally:
                self._plain = plain
        round._staging = None
        if self.is_open:
            round._plain = round._reader.plain_updates(may_hold=self._may_hold, may_weigh=self.takes_weights)
        return round

    @property
    def clients(self) -> tuple[ClientId, ...]:
        """The clients whose updates are accepted so far; the updates of a resumed round are among them.

        If a client has several updates in an asynchronous round, it is listed once for each, in the order of arrival.
        """
        if self._settings.repeats:
            return tuple(client for _, client in sorted(self._known, key=itemgetter(0)))
        return tuple(self._accepted)

    @one_call
    def may_close(self) -> str | None:
        """Return why the round's policy lets it close now; see ``RoundPolicy``.

        Returns:
            "all clients": every asked client has sent an update, accepted or rejected. "min_share": the share was
            reached, and the grace is over. "buffer": K updates are accepted. "deadline": the deadline is over.
            None: the round should wait, or has fewer than ``min_clients`` accepted clients.

        Raises:
            RoundError: the round is closed.

        Cost: on average independent of the number of clients; linear in it once as many updates as asked clients
            arrived.
        """
        self._require_open()
        reason = self.attendance.reason(self._accepted, self._rejected)
        if reason is not None and self._settings.policy.buffer is not None:
            self._fold_held(last=True)  # may reject some
            reason = self.attendance.reason(self._accepted, self._rejected)
        return reason

    @one_call
    def wait(self) -> float | None:
        """Return the seconds until the round may close without a further update.

        Returns:
            0 if it may close now; None if it needs a further update first.

        Raises:
            RoundError: the round is closed.
        """
        self._require_open()
        return self.attendance.wait(self._accepted, self._rejected)

    def fill(self, updates: Sequence[Update], start: int) -> int:
        """Add updates from ``start`` on to a buffer until it may be full; return how many.

        Those of unregistered clients are rejected.
        """
        some = updates[start : start + (self.attendance.full or 0) - len(self._accepted)]
        for update in some:
            if update.client not in self._clients:
                self.reject(update.client, "client: not registered")
        self.add_batch([update for update in some if update.client in self._clients])
        return len(some)

    @property
    def _accepted(self) -> set[Any]:
        return self._known | self._summed if self._summed else self._known

    def _require_enough(self) -> None:
        """Raise RoundError if the round has fewer accepted clients than its policy requires."""
        count, needed = len(self._known) + len(self._summed), self.attendance.policy.min_clients
        if count < needed:
            raise RoundError(
                f"min_clients={needed}: the round has {count} accepted clients, so {needed - count} are missing; add "
                "their updates, or abort the round"
            )

    def add(
        self,
        client: ClientId,
        value: Any,
        *,
        steps: int,
        kind: Kind = "model",
        examples: float | None = None,
        lr: float | None = None,
        control: Any = None,
        count: int = 1,
        round: int | None = None,
        keep: bool = False,
        weight: float | None = None,
        loss: float | None = None,
        update_id: ClientId | None = None,
    ) -> Reply:
        """Add one client's update; the arguments are those of ``Update``.

        An update with invalid content (value, steps, examples, lr, control, round, loss) is rejected and listed in the
        report; the round continues, and the client may send a new one. The round rejects a second update of a client,
        except in an asynchronous round, and an update of a client that is part of an edge's partial sum. An update with
        the ``update_id`` of one of its client that counts, in this round or the last ones, is a copy and has no effect.

        Returns:
            A ``Reply``: true if the update is accepted so far or a copy, else false with the reason. A held update can
            still be rejected when it is folded; ``report.rejected`` is final.

        Raises:
            RoundError: the round is closed.
            UnknownClientError: the client is not registered.
            UnknownNameError: ``kind`` is unknown.
            RangeError: ``count`` or ``weight`` is out of range, or the method does not support it.

        Cost: that of ``kernels.accumulate`` or ``kernels.exchange`` for one row. Held updates share one pass over
            ``batch_size`` rows. The round copies small updates, of at most 256 KiB, to hold them.
        """
        sent = value, steps, examples, lr, control, count, round, kind, keep, weight, loss, update_id
        return self.add_batch([Update(client, *sent)])[0]

    @one_call
    def begin(
        self,
        client: ClientId,
        *,
        steps: int,
        kind: Kind = "model",
        examples: float | None = None,
        lr: float | None = None,
        count: int = 1,
        round: int | None = None,
        weight: float | None = None,
        loss: float | None = None,
        update_id: ClientId | None = None,
    ) -> Incoming:
        """Return an ``Incoming`` for an update that arrives in pieces; the arguments are those of ``add``.

        An update that is not ``done`` when the round is finished does not count. A client has one open update: if it
        begins another one, the first one is abandoned, and its ``write`` and ``done`` raise a RoundError. ``done`` of a
        copy of an update that counts returns "already counted".

        Raises:
            RoundError: the round is closed; or it has an update of this client, ``Limits.max_open`` updates are open,
                or the client has replaced 100 of them, and it is listed as rejected.
            RangeError: a claim is out of range, such as a round that is too early; the client is listed as rejected.
            UnknownClientError, UnknownNameError: as ``add``.
            StoreError: the disk is full, or too many files are open; the client is listed as rejected.

        Cost: an update that is begun, or done and not yet folded, takes its bytes as sent, at most 4 n. The first
            ``batch_size`` such updates are in memory. Each further one is in an unlinked file of 4 n bytes, in the
            server's folder or else in the system's folder for temporary files. Indices and scales stay in memory.
        """
        self._require_open()
        sent = None, steps, examples, lr, None, count, round, kind, False, weight, loss, update_id
        update = Update(client, *sent)
        client = self._clients.check(client)
        self.require_valid([update])
        layout, algorithm = self._settings.layout, self._settings.algorithm
        if self._staging is None:
            pool = self._state.update_buffers if self._state.upload is None else BufferPool(layout.n)
            self._staging = Staging(pool, self._batch_size, self._state.folder)
        try:
            if not self._is_copy(update, client):
                if self._is_second(client):
                    raise RoundError(f"client {client!r}: {SECOND}")
                self._reader.check_claims(update)
            self._staging.make_room(client, self._settings.limits.max_open)
            vector = self._staging.get()[: layout.n_parameters if kind == "gradient" else layout.n]
            control = None if algorithm.second_vector is None else self._staging.get()[: layout.n_parameters]
        except FedcoreError as error:
            self._rejected.append((client, rejection_reason(error)))
            raise
        incoming = Incoming(layout, update._replace(client=client), vector, control, self)
        self._staging.begun[client] = ref(incoming)
        return incoming

    @property
    def _clients(self) -> Registry:
        return self._state.registry

    @one_call
    def add_batch(self, updates: Sequence[Update]) -> list[Reply]:
        """Add the updates of some clients, in one pass where they can be held.

        Returns:
            For each update, whether it is accepted so far, as ``add``; ``report.rejected`` is final.

        Raises:
            RoundError, UnknownClientError, UnknownNameError, RangeError: as ``add``. No update was added.
        """
        began, given = time.perf_counter(), updates if type(updates) is list else listed("updates", updates)
        self._require_open()
        try:
            if (replies := self._add_plain(given)) is None:
                self.require_valid(given)
                list(map(self._clients.check, [one.client for one in given]))
                replies = self._add_new(given)
            if replies is not None:
                return replies
            if len(given) == 1:
                return self._add_one(given)
            return [(self._add_plain([u]) or self._add_new([u]) or self._add_one([u]))[0] for u in given]
        finally:
            if self.attendance.policy.grace and self.is_open:
                self.attendance.note(self._accepted, self._rejected)
            self._seconds += time.perf_counter() - began

    @ieee
    @one_call
    def add_partial_sum(
        self, partial: PartialSum | bytes, sender: ClientId, clients: Iterable[ClientId] | None = None
    ) -> Reply:
        """Add a partial sum of ``Round.partial_sum``, with the bits of adding each of its updates here.

        The sum is accepted as a whole, or rejected and listed in the report with the sender. Rules that compare updates
        (``RejectLong``, ``CapExamples``) apply only in the edge's round, where updates are whole. A later update of a
        client of the sum is rejected.

        Args:
            clients: the edge's own clients. The server rejects a sum or rejection of any other client. Default: the
                edge may send for every client.

        Returns:
            The ``Reply``: accepted, or rejected with the reason.

        Raises:
            RoundError: the round is closed.
            RangeError: as ``Server.require_partial_sums``.
            UnknownClientError: one of ``clients`` is not registered.
        """
        began = time.perf_counter()
        self._require_open()
        has_noise = isinstance(partial, PartialSum) and partial.noise > 0
        self._require_partial_sums("masked sums" if has_noise else "edges")
        own = None if clients is None else {self._clients.check(client) for client in clients}
        self._fold_held()
        try:
            sent, batch = self._partials.read(partial, own, self._accepted)
            of_groups = () if sent.group_squares is None else (sent.group_squares,)
            reason = self._settle_examples(batch)
            if reason is None and not self._sum.join(sent.sum, batch, sent.changes, *of_groups):
                reason = "high: the round's exact sum would overflow"
        except FedcoreError as error:
            reason = rejection_reason(error)
        self._bytes += bytes_of(partial)
        self._seconds += time.perf_counter() - began
        if reason is not None:
            self._rejected.append((sender, reason), is_known=sender in self._clients)
            return Reply("rejected", reason)
        for one in sent.rejected:  # of an edge, which may name any client
            self._rejected.append(one, is_known=one[0] in self._clients)
        if len(batch):
            self._summed.update(batch.clients)
            self._folded.append(batch)
        if self.attendance.policy.grace:
            self.attendance.note(self._accepted, self._rejected)
        return ACCEPTED

    @cached_property
    def _partials(self) -> PartialSums:
        return PartialSums(self._settings, self._state, self._weighing)

    def _require_partial_sums(self, feature: str) -> None:
        """Raise RangeError if the server does not combine with partial sums of this kind."""
        storage = Storage(medium="mmap", journal=self._journal is not None)
        require_compatible(self._settings, storage, self._state.compute, feature)

    @ieee
    @one_call
    def partial_sum(self) -> PartialSum:
        """Close the round without a step; return its sum and claims, for ``add_partial_sum`` of the upper server.

        Rules that compare updates remember those of the round.

        Raises:
            RoundError: the round is closed.
            RangeError: as ``Server.require_partial_sums``; or an update is late, or has a ``weight``.

        Cost: reads and writes 16 n bytes.
        """
        self._require_open()
        self._require_partial_sums("edges")
        self._fold_held(last=True)
        partial = self._partials.collect(self._sum, self._folded, tuple(self._rejected))
        # Rules compare the updates of the next round with those of this one.
        self._state.snapshot = self._state.snapshot._replace(norms=self._validator.remembered())
        self._abort()
        return partial

    def buffer(self) -> F32:
        """Return an uninitialised vector for one client's y, float32[n], on the server's device.

        Write y into it (``socket.recv_into``, ``out=``, or ``copy_`` into ``torch.from_numpy`` of it), and pass it or a
        view of it to ``add``. The round holds it like an update with ``keep``, and folds several in one pass without a
        copy. Use a new buffer for each client, and do not write to it after ``add``. The server reuses the memory after
        the fold, once the caller has dropped the buffer.

        Raises:
            RoundError: the round is closed.

        Cost: 4 n bytes for each buffer in use: up to ``batch_size`` in the round, and those that the caller keeps.

        >>> import numpy as np
        >>> from fedcore import Server
        >>> server = Server(np.zeros(2, np.float32), "FedAvg", clients=2, lr=0.1)
        >>> with server.open_round() as round:
        ...     for client in range(2):
        ...         y = round.buffer()
        ...         y[:] = client, 4  # as recv_into would
        ...         _ = round.add(client, y, steps=5)
        >>> server.x
        array([0.5, 4. ], dtype=float32)
        """
        self._require_open()
        return self._state.update_buffers.get()

    @one_call
    def reject(self, client: ClientId, reason: str) -> None:
        """List a client as rejected, for an update that the caller could not read."""
        self._require_open()
        self._rejected.append((client, str(reason)), is_known=client in self._clients)

    def replay(self, journal: Journal) -> None:
        """Add the updates of an interrupted round."""
        outdated = journal.outdated(self._number)
        for order, sent, update in journal.updates(self._number):
            self._arrivals, before = order, self._bytes
            try:
                if outdated is None:
                    self.add_batch([update])
                else:
                    self._rejected.append((update.client, outdated))
            except (UnknownClientError, UnknownNameError, RangeError) as error:  # or an option has changed
                self.reject(update.client, str(error))
            self._bytes = before + sent if sent else self._bytes

    def resume(self, journal: Journal) -> None:
        """Start with the updates of an interrupted round, and write further updates to the journal."""
        self.replay(journal)
        self._journal = journal
        self._keep_in_journal(self._known)

    def _write_to_journal(
        self, client: ClientId, batch: UpdateBatch, fixed: bool, update: Update, rate: float
    ) -> str | None:
        """Number a valid update, and write it to the journal, if any; return why it is rejected if this fails."""
        order, self._arrivals = self._arrivals, self._arrivals + 1
        if self._journal is not None:
            try:
                weight = None if update.weight is None else float(update.weight)
                update = update._replace(client=client, weight=weight)
                if update.lr is not None or not self._settings.algorithm.mixes_models:  # which takes any rates
                    update = update._replace(lr=rate if update.lr is None else float(update.lr))
                vector, control = map(self._reader.whole, (batch.vectors[0], batch.controls[0]))
                self._journal.append(self._number, order, update, vector, control, self.newcomers)
            except FedcoreError as error:
                return f"journal: {error}"
        return None

    def _empty_journal(self) -> None:
        self._keep_in_journal(())  # if the round is committed, its journal is outdated even if this fails

    def _keep_in_journal(self, known: Collection[Any]) -> None:
        """Drop the other updates, which a fold has rejected; a resumed round would reject them again."""
        if self._journal is not None:
            try:
                self._journal.retain(known)
            except StoreError as error:
                self._logger.warning("journal: %s", error)

    @ieee
    def start(self, newcomers: NewClients) -> None:
        """Start the round, after the server has made it the open one."""
        try:
            if newcomers:
                self.newcomers = newcomers
            self._sum, settings = self._state.begin(self.newcomers), self._settings
            self._ids = CountedIds(self._state.snapshot.norms.get(IDS))
            self._by_claims = self._weighing.reads_examples
            self._plain = self._reader.plain_updates(may_hold=self._may_hold, may_weigh=self.takes_weights)
            if (most := settings.policy.buffer) is not None and not settings.repeats:  # one update of each client
                full = max(1, settings.policy.min_clients, min(most, len(self._clients)))
                self.attendance.full = full if settings.rules.has_enough(full) else most
        except BaseException:
            self._abort()
            raise

    @cached_property
    def _validator(self) -> Validator:
        settings, remembered = self._settings, self._state.snapshot.norms
        unit = "|x - y|" if settings.averages_models else "|x - y| / (eta K)"
        caps = self._by_claims and "examples" in settings.rules.needs
        examples = settings.rules.window("examples", remembered) if caps else None
        rules = settings.rules.at(self._state.snapshot.ledger)
        return Validator(settings.limits, rules, unit, remembered, examples, self._state.buffers_square)

    def _fold_held(self, *, last: bool = False) -> None:
        self._read_plain()
        held, self._held = self._held, []
        if held or (last and self._undecided):
            self._fold(held, last=last)

    def _counts(self) -> dict[str, int]:
        return {"accepted": len(self._known) + len(self._summed), "rejected": len(self._rejected)}

    def _is_second(self, client: ClientId) -> bool:
        """Whether the round has an update of the client already, and accepts no second one."""
        if self._settings.repeats:
            return False
        if client in self._known:
            self._fold_held()  # may still reject the first one
        return client in self._known

    def _is_copy(self, update: Update, client: ClientId) -> bool:
        """Whether an update with this id counts already; raise RangeError if the round cannot know."""
        if update.update_id is None:
            return False
        id = digest_of_id(client, update.update_id)
        if self._ids.has(id, self._known):
            self._fold_held()  # may still reject the first one
        if self._ids.has(id, self._known):
            return True
        if update.round is None:
            raise RangeError(NO_ROUND)
        if is_integer(update.round, 0, self._ids.first - 1):
            raise RangeError(f"round={update.round}: the server has forgotten the ids of updates of so early a round")
        return False

    def require_valid(self, updates: Iterable[Update]) -> None:
        """Raise for mistakes of the caller, not of a client."""
        algorithm = self._settings.algorithm
        once = algorithm if algorithm.updates_once else self._settings.rules.private
        for update in updates:
            if not isinstance(update, Update):
                raise RangeError(f"updates: must be a list of fedcore.Update, got {type(update).__name__} in it")
            update.require_kind()
            if update.weight is not None:
                if not self.takes_weights:
                    raise RangeError("weight: partial sums weight updates by the method; leave weight out")
                if not algorithm.weighs_claims:
                    raise RangeError(f"weight: {algorithm} does not weight by examples; leave weight out")
                check_number("weight", update.weight, "[0, inf)")
            if check_integer("count", update.count, 1, 2**31) > 1 and once:
                raise RangeError(f"count={update.count}: {once} takes a client once a round; draw without replacement")

    def _require_open(self) -> None:
        if not self.is_open:
            super()._require_open()
        try:
            self._state.require_open_round()
        except FedcoreError:
            self._abort()
            raise

    @ieee
    def _add_one(self, updates: list[Update]) -> list[Reply]:
        """Add an update of any form."""
        self._require_open()
        [update] = updates
        before = len(self._rejected)
        with span("read", self._state):
            client, found = self._read(update)
        if found is None:
            return [ALREADY]
        batch: UpdateBatch | None = None
        if isinstance(found, str):
            reason: str | None = found
        else:
            batch, fixed = found[:2]
            reason = self._write_to_journal(client, *found) or self._settle_examples(batch)
        self._bytes += self._reader.bytes_of(update, batch)
        if batch is None or reason is not None:
            self._rejected.append((client, str(reason)))
            self._keep_in_journal(self._known)
            return [Reply("rejected", str(reason))]
        if update.update_id is not None:
            self._ids.note(digest_of_id(client, update.update_id), self._keys_of(batch, self._arrivals - 1)[0])
        self._hold(batch, is_safe=self._may_hold or update.keep is True or fixed)
        self._keep_in_journal(self._known)
        return self._replies(self._keys_of(batch), [client], before)

    def _replies(self, keys: Sequence[Any], clients: Sequence[ClientId], before: int) -> list[Reply]:
        """Return the replies to updates that were just held or folded; ``before`` is the number of rejections then."""
        reply = HELD if self._held or self._undecided or self._plain else ACCEPTED
        known = [key in self._known for key in keys]
        if all(known):
            return [reply] * len(known)
        reasons = self._rejected.since(before)
        return [
            reply if is_known else Reply("rejected", reasons.get(client, ""))
            for is_known, client in zip(known, clients, strict=True)
        ]

    def _hold(self, batch: UpdateBatch, *, is_safe: bool) -> None:
        """Hold a batch of one update, or fold it now if the caller may change its memory."""
        if self._keeps_vectors:
            self._own(batch, is_safe=is_safe)
        self._read_plain()
        self._known.update(self._keys_of(batch, self._arrivals - 1))
        self._held.append(batch)
        if not (is_safe or self._keeps_vectors) or sum(map(len, self._held)) >= self._batch_size:
            self._fold_held()

    def _own(self, batch: UpdateBatch, *, is_safe: bool) -> None:
        """Replace vectors that the caller may change by copies, since the round keeps them until its end."""
        device = self._settings.device
        if not is_safe or isinstance(device, FileMemory):
            batch.vectors = [immutable_copy(y, device) for y in batch.vectors]
            batch.controls = [immutable_copy(control, device) for control in batch.controls]

    def _keys_of(self, batch: UpdateBatch, first: int | None = None) -> list[Any]:
        """Return the entries of ``_known`` for a batch, after numbering its updates from ``first`` on."""
        if not self._settings.repeats:
            return batch.clients
        if first is not None:
            batch.orders = np.arange(first, first + len(batch))
        return list(zip(batch.orders.tolist(), batch.clients, strict=True))

    def _read(self, update: Update) -> tuple[ClientId, ReadUpdate | str | None]:
        """Return the client, and the update, the reason of a rejection, or None for a copy of an update that counts."""
        client = self._clients.check(update.client)
        try:
            if self._is_copy(update, client):
                return client, None
        except RangeError as error:
            return client, rejection_reason(error)
        if client in self._summed:  # not an error, which would abort the round: an edge may list a client by mistake
            return client, IN_PARTIAL
        if self._is_second(client):
            return client, SECOND
        self._reader.require_form(update)
        try:
            return client, self._reader.read(update, client)
        except (AlgorithmError, ClusterError, DeviceError):  # the server's own rate, weights or device; a lost shard
            raise
        except FedcoreError as error:
            return client, rejection_reason(error)

    def _settle_examples(self, batch: UpdateBatch) -> str | None:
        """Return why updates without examples are rejected; the first update with examples rejects all before it."""
        if not self._by_claims or not len(batch):
            return None
        have = NO_COUNT not in batch.sources.tolist()
        if have != self._has_examples:
            self._fold_held()  # may reject those that were held
        if not (self._known or self._summed):
            self._has_examples = have
        if have == self._has_examples:
            return None
        if self._has_examples:
            return NO_EXAMPLES
        vectors = [y for y in batch.vectors if y is not None]  # a partial sum has None
        for name in filter(None, map(self._state.first_not_finite, vectors)):
            return f"{NOT_FINITE}, in {name}"  # an invalid update must not displace others
        self._has_examples = True
        self._read_plain()
        before = [*self._held, *self._folded, *self._undecided]
        if dropped := [client for part in before for client in part.clients]:
            self._rejected += [(client, NO_EXAMPLES) for client in dropped]
            self._known.difference_update(key for part in before for key in self._keys_of(part))
            self._summed.difference_update(dropped)
            self._held, self._folded, self._undecided = [], [], []
            self.__dict__.pop("_validator", None)
            self.start(self.newcomers)
        return None

    def _add_plain(self, updates: list[Update]) -> list[Reply] | None:
        """Add updates and return the replies, if all are of a usual form; else return None."""
        if self._plain is None or self._journal is not None:
            return None
        reading, found, held = begin("read", self._state), None, len(self._plain)
        examples = ANY_EXAMPLES  # by claims, all updates of a round must have examples, or none
        if self._by_claims:
            examples = int(self._has_examples) if self._known or self._summed else SAME_EXAMPLES
        try:
            found = self._plain.add(updates, self._known, self._summed, examples, self._arrivals)
            if found is None:
                return None
            keys, waits, have, bytes = found
            self._arrivals += len(keys)
            self._bytes += bytes
            if self._by_claims:
                self._has_examples = have
        except BaseException:
            if len(self._plain) > held:  # an interrupt after the native call: the round has not noted these updates
                self._abort()
            raise
        finally:
            if reading:
                reading.end((), counts=found is not None)
        if waits and len(self._plain) + sum(map(len, self._held)) < self._most_plain:
            return [HELD] * len(keys)
        before = len(self._rejected)
        self._read_plain()
        if self._keeps_vectors and self._held:
            self._own(self._held[-1], is_safe=waits)
        self._fold_held()
        return self._replies(keys, [update.client for update in updates], before)

    def _add_new(self, updates: list[Update]) -> list[Reply] | None:
        """Add updates as ``_add_plain``, if all have ids that are new; else return None."""
        if self._plain is None or self._journal or any(update.update_id is None for update in updates):
            return None
        try:
            clients = [self._clients.check(update.client) for update in updates]
            ids = [digest_of_id(client, one.update_id) for client, one in zip(clients, updates, strict=True)]
        except FedcoreError:
            return None
        keys = list(enumerate(clients, self._arrivals)) if self._settings.repeats else clients
        are_new = len({*keys}) == len({*ids}) == len(keys) and self._known.isdisjoint(keys)
        are_new = are_new and all(is_integer(update.round, self._ids.first) for update in updates)
        if not are_new or any(self._ids.has(id, self._known) for id in ids):
            return None
        try:
            for id, key in zip(ids, keys, strict=True):
                self._ids.note(id, key)
            return self._add_plain([update._replace(update_id=None) for update in updates])
        finally:
            for key in keys:
                if key not in self._known:
                    self._ids.drop(key)

    def _read_plain(self) -> None:
        """Read the held plain updates into a batch."""
        if not self._plain:
            return
        try:
            self._held.append(self._reader.batch_of_columns(self._plain.take()))
        except BaseException:  # an interrupt, say: these updates would be lost
            self._abort()
            raise

    @ieee
    def settle(self) -> None:
        """Fold all updates, and decide on those that wait for a median or for the rest of the cohort."""
        self._fold_held(last=True)
        self._keep_in_journal(self._known)

    @ieee
    def _fold(self, parts: list[UpdateBatch], *, last: bool = False) -> None:
        """Fold the undecided updates and then these; if this fails, the round is aborted."""
        batches = [parts]
        if parts and (upload := self._state.upload) is not None:
            batches = [[portion] for portion in upload.portions(UpdateBatch.joined(parts))]
        for i, some in enumerate(batches, start=1):
            self._fold_batch(some, last=last and i == len(batches))

    def _fold_batch(self, parts: list[UpdateBatch], *, last: bool) -> None:
        """Fold a batch in one pass, and again without the updates that the validator rejects."""
        at_end = "medians" in self._settings.rules.needs and self._keeps_vectors
        waiting = [] if at_end and not last else self._undecided  # the others are only measured again at the end
        try:
            if (upload := self._state.upload) is not None:
                list(map(upload.bring, parts))
            batch = UpdateBatch.joined([*waiting, *parts])
            with span("validate", self._state):
                self._weigh(batch)
            if at_end and self._settings.sorts_updates:
                batch = batch.ordered(self._clients.numbers(batch.clients))
            lengths = self._sum.try_fold(batch)
            if waiting:
                self._undecided = []
            squares = lengths.parameters
            with span("validate"):
                decision = self._validator.decide(lengths, batch.clients, batch.claims, last=last)
                if decision is not None:
                    self._weighing.count_examples(batch, decision.examples)
                    self._weighing.weigh(batch)
                    self._leave_out(batch, decision)
            if decision is None:
                self._sum.accept(batch)
            else:
                batch, squares = self._sum.refold(batch, decision.accepted, decision.factors)
        except BaseException:
            self._abort()
            raise
        if len(batch):
            batch.settle(squares, self._settings, self._number)
            self._folded.append(batch)

    def _leave_out(self, batch: UpdateBatch, decision: Decision) -> None:
        """List rejected updates, and keep undecided updates: copies, or the updates themselves if their memory is
        immutable."""
        keys = self._keys_of(batch) if decision.rejected else []
        for i, reason in sorted(decision.rejected.items()):
            if reason == NOT_FINITE:
                name = self._state.first_not_finite(batch.vectors[i])
                reason += f", in {name}" if name else f", with the weight {batch.weights[i]:g}"
            self._known.discard(keys[i])
            self._ids.drop(keys[i])
            self._rejected.append((batch.clients[i], reason))
        if decision.undecided.any():
            self._undecided.append(undecided := batch.chosen(decision.undecided))
            self._own(undecided, is_safe=self._may_hold or self._keeps_vectors)

    @ieee
    def finish(self) -> Report:
        """Take the server's step and close the round.

        If all updates were rejected, the logger "fedcore.server" gets a warning.

        Raises:
            RoundError: the round is closed, or has fewer accepted clients than ``RoundPolicy.min_clients``; then it
                stays open.
            TooFewUpdatesError: a robust rule needs more updates; the round stays open.
            DivergedError: the rates would make x infinite or NaN; the round is rolled back. An update that could cause
                this was rejected before.
            RangeError: the sum of the weights is too small for the sums (see ``Update.weight``); the round is rolled
                back.
        """
        state: Any = getattr(self, "_state", None)  # a closed round has no state
        with span("round", state):
            report, most_steps = self._finish()
        # Outside the lock, so that a log handler may read the round.
        if self._weighing.lowered or most_steps is not None:
            warn_if_capped(report.round, self._weighing.lowered, most_steps, self._logger)
        state.waiting.log(report.waiting_for, state, self._logger)
        self._announce(report)
        return report

    @one_call
    def _finish(self) -> tuple[Report, int | None]:
        began = time.perf_counter()
        self._require_open()
        self._require_enough()
        try:
            result, norms = self._total()
        except BaseException as error:
            if not isinstance(error, (RoundError, TooFewUpdatesError)):
                self._abort()  # the sums may be incomplete
            raise
        [batch] = self._folded
        try:
            with uninterrupted() if self._state.defers_signals else nullcontext():
                if self._is_ending:
                    raise RoundError("round: a signal handler aborted it before it was finished")
                rejected = tuple(self._rejected.listed)
                ids = self._ids.after(self._number, self._settings.policy.max_staleness, self._known)
                prepared, found = self._state.take_step(self, result, batch, norms | ids, rejected)
                spent, seen = self._seconds + time.perf_counter() - began, (batch.clients, rejected)
                own: dict[str, Any] = {"rejected": rejected, "seconds": spent, "bytes": self._bytes}
                own |= {"closed": self.attendance.reason(*seen), "missing": self.attendance.missing(*seen)}
                self.report = report_of(self._settings, prepared, batch, found, **own)
        except LowWeightsError:
            self._empty_journal()
            raise
        finally:
            if self.is_open:
                self._abort()
            else:
                self._release()
        if self._journal is not None:
            self._empty_journal()
        return self.report, prepared.most_steps

    def _total(self) -> tuple[Any, dict[str, Any]]:
        """Return the sums of all updates, which are then one batch, and the norms that rules remember."""
        if (at_once := self._total_at_once()) is not None:
            return at_once, {}
        self.settle()
        self._require_enough()
        batch = UpdateBatch.cohort(self._folded, self._settings, self._clients)
        now, has_noise = self._state.snapshot, len(batch) > 0 and self._summed.issuperset(batch.clients)
        result = self._sum.total(batch, self._settings.rules, now.ledger, now.center, has_noise=has_noise)
        batch.drop()
        self._folded = [batch]
        return result, self._validator.remembered()

    def _total_at_once(self) -> Any:
        """Return the sums if all updates are still held and need only one pass; else None."""
        state, holds_all = self._state, not (self._held or self._undecided or self._folded or self._summed)
        if not (self._settings.sums_at_once and holds_all and self._plain and state.upload is None):
            return None
        self._read_plain()
        vectors, k = (batch := self._held[0]).vectors, len(self._known)
        is_flat = vectors and list not in map(type, vectors)  # tensors are measured one by one
        if not is_flat or k < self.attendance.policy.min_clients or state.newcomers.population is not None:
            return None
        self._weigh(batch)
        if (result := self._sum.total_at_once(batch)) is not None:
            self._held, self._folded = [], [batch]
        return result

    def _weigh(self, batch: UpdateBatch) -> None:
        if self._settings.algorithm.weighs_claims:
            self._weighing.count_known_examples(batch)
        self._weighing.weigh(batch)

    def _abort(self) -> None:
        if self.is_open:
            self.is_open, self._plain = False, None
            self._held.clear()
            self._undecided.clear()
            self._state.abandon()
            self._release()

    def _release(self) -> None:
        """Drop the server's state, so that a closed round does not keep a store open."""
        self._weighing.close()
        self._plain = None
        del self._state, self._reader
        for name in ("_partials", "_sum", "_validator"):  # a round that failed to begin has none
            self.__dict__.pop(name, None)


RoundT = TypeVar("RoundT")


class RoundLock:
    """The last round that was opened, and locks for the calls that open the next one and that push updates."""

    def __init__(self) -> None:
        self._opening, self.pushing = Lock(), RLock()
        # A weak reference, so that a dropped round does not stay open.
        self._last: Callable[[], Any] = lambda: None

    def __deepcopy__(self, memo: dict[int, object]) -> "RoundLock":
        """Return new locks; a copy of a server has no open round, unless it is asynchronous."""
        return RoundLock()

    def reopen(self, opened: Round) -> None:
        """Make a copy of an open round the open round."""
        self._last = ref(opened)

    @property
    def opened(self) -> Any:
        """The open round, or None."""
        last = self._last()
        return last if last is not None and last.is_open else None

    def open(self, round: int, make: Callable[[], RoundT]) -> RoundT:
        """Make and return the open round, or raise RoundError if a round is open or being opened."""
        if self._opening.locked():
            raise RoundError(f"round {round}: another call is opening it already")
        with self._opening:
            self.require_none(round)
            opened = make()
            self._last = ref(opened)
        return opened

    def require_none(self, round: int) -> None:
        """Raise RoundError if a round is open."""
        if self.opened is not None:
            raise RoundError(f"round: round {round} is open already; finish or abort it")
