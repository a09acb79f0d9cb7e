"""An open round: updates come in one at a time, are folded into the sums, and are not kept."""

import logging
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import wraps
from threading import Lock, RLock
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar
from weakref import ref

import numpy as np

from fedcore.arguments import due_whole, is_whole, real, reason_of
from fedcore.arrays import F32, ieee
from fedcore.errors import FedcoreError, RangeError, RoundError, StoreError, UnknownNameError
from fedcore.interrupts import uninterrupted
from fedcore.native import core
from fedcore.options import Callback, Settings, require_weighing
from fedcore.profiling import span
from fedcore.representation import Represented
from fedcore.server.aggregation import NO_COUNT, Result, UpdateBatch, combined_square
from fedcore.server.partial import PartialSum, PartialSums
from fedcore.server.report import (
    Diagnosis,
    Report,
    diversity_of,
    record,
    report_of,
    staleness,
    tell,
    warn_if_lowered,
    warn_if_unheard,
)
from fedcore.server.state import NewClients, State
from fedcore.server.step import Snapshot
from fedcore.server.update import KINDS, Kind, Update, bytes_of, first_not_finite, lasting
from fedcore.server.validation import (
    NOT_FINITE,
    Decision,
    PlainColumns,
    UpdateReader,
    Validator,
    Weighing,
    usual,
)
from fedcore.store.registry import ClientId, Registry

# The face of an open round, whoever folds what comes into it.


SECOND = "update: expected one a round, got a second one: the first one counts"


class Round(Represented):
    """An open round, as a context manager, and the checks of what its caller says."""

    report: Report | None
    is_open: bool
    _settings: Settings
    _known: set[ClientId]
    _turn: Any  # these three as ``call_guard`` has them
    _inside: Any
    _is_ending: bool

    @abstractmethod
    def add_batch(self, updates: Sequence[Update]) -> list[bool]:
        """Add the updates of some clients; return which of them are accepted, as far as is known."""

    @abstractmethod
    def add_partial_sum(
        self, partial: PartialSum | bytes, sender: ClientId, clients: Iterable[ClientId] | None = None
    ) -> None:
        """Add a partial sum of an edge."""

    @abstractmethod
    def partial_sum(self) -> PartialSum:
        """Close the round without a step, and return its sum."""

    @abstractmethod
    def buffer(self) -> F32:
        """A vector for one client's y, float32[n] of undefined content."""

    @abstractmethod
    def reject(self, client: ClientId, reason: str) -> None:
        """Report an update as rejected that could not be read."""

    @property
    @abstractmethod
    def rejected(self) -> tuple[tuple[ClientId, str], ...]:
        """The clients whose updates were rejected so far, with the reasons."""

    @abstractmethod
    def begin(self, newcomers: NewClients) -> None:
        """Begin the round, once it is the only one."""

    @abstractmethod
    def finish(self) -> Report:
        """Take the server's step and close the round."""

    @abstractmethod
    def _abort(self) -> None:
        """Close the round, whose turn it is."""

    @abstractmethod
    def _fold_held(self) -> None:
        """Fold what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()
        elif self.is_open:
            self.finish()

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
    ) -> bool:
        """Add one client's update; the arguments are those of ``Update``.

        An update with invalid content (value, steps, examples, lr, control, round) is rejected into the report, and the
        round goes on; the client may send another one. A second update of a client is rejected, and so is one of a
        client that is part of an edge's partial sum.

        Returns:
            Whether the update is accepted. One that the round holds, to fold it with others, can still be rejected when
            it is folded: ``report.rejected`` is final.

        Raises:
            RoundError: the round is closed.
            UnknownClientError: the client is not registered.
            UnknownNameError: ``kind`` is unknown.
            RangeError: ``count`` is not an integer >= 1, or not 1 where the method takes a
                client once a round; or ``weight`` is not a number >= 0, or the method does not weigh by examples.

        Cost: that of ``kernels.accumulate`` or ``kernels.exchange`` for one row, or 1 / batch_size of a pass over
            ``batch_size`` rows where updates are held.
        """
        sent = value, steps, examples, lr, control, count, round, kind, keep, weight
        return self.add_batch([Update(client, *sent)])[0]

    def abort(self) -> None:
        """Close the round and leave the server as it was before ``open_round``; a closed round stays as it is.

        The handler of a signal may call it too: in the middle of ``add`` the round is aborted when that is done.
        """
        with self._turn:
            if self._inside.locked():
                self._is_ending = True
            else:
                self._abort()

    def _require_open(self) -> None:
        if not self.is_open:
            raise RoundError("round: expected an open one, got one that is finished or aborted")

    def _is_second(self, client: ClientId) -> bool:
        """Tell whether the round has an update of the client."""
        if client in self._known:
            self._fold_held()  # if the first one is held and turns out to be no update, this one is not the second
        return client in self._known

    def _check(self, update: Update, registry: Registry) -> ClientId:
        """The client's id; raises for what is the caller's mistake, not the client's."""
        client = registry.check(update.client)
        if update.kind not in KINDS:
            raise UnknownNameError.of("kind", update.kind, KINDS)
        if update.weight is not None:
            require_weighing(self._settings.algorithm, "weight")
            real("weight", update.weight, "[0, inf)")
        most = 1 if self._settings.algorithm.hears_once else 2**31
        if not is_whole(update.count, 1, most):
            due = due_whole(1, most) if most > 1 else "1, since the method hears a client once a round"
            raise RangeError(f"count: expected {due}, got {update.count!r}")
        return client


# One call at a time into an open round.


P = ParamSpec("P")
R = TypeVar("R")


class GuardedCalls(Protocol):
    """An object whose calls take turns.

    Attributes:
        _turn: whose turn it is; the same thread's too, within a call.
        _inside: held while a call is at work. Both are let go by Python itself, at whatever line an exception comes.
        _is_ending: whether ``abort`` came from within a call, which obeys when it is done.
    """

    _turn: Any  # RLock and Lock, which are functions to the type checker
    _inside: Any
    _is_ending: bool

    def _abort(self) -> None: ...


T = TypeVar("T", bound=GuardedCalls)


def one_call(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """A method that waits for other threads, and refuses to run within a call of its own thread.

    Only the handler of a signal comes upon a call of its own thread: it cannot wait for it.
    """

    @wraps(method)
    def called(self: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._turn:
            if self._inside.locked():
                raise RoundError(
                    "round: expected one call at a time, got one from within another, as a signal's handler makes it: "
                    "abort() alone may be called there"
                )
            try:
                with self._inside:
                    return method(self, *args, **kwargs)
            finally:
                if self._is_ending:
                    self._abort()

    return called


# One round: updates come in one at a time, are folded into the sums, and are forgotten.


LOGGER = logging.getLogger("fedcore.server")
NO_EXAMPLES = "examples: expected a number, as other clients of the round gave one, got None"
IN_PARTIAL = (
    "client: expected one update a round, got one of a client that an edge's partial sum has counted already: "
    "add_partial_sum(clients=) holds an edge to its own clients"
)


class LocalRound(Round):
    """An open round of a server; get it from ``Server.open_round``, and use it as a context manager.

    Leaving the block by an exception, or ``abort()``, leaves the server as it was before ``open_round``. Leaving it
    normally finishes the round if nobody did. Signals that come while the round's changes are made wait until they are.
    Several threads may add at once; they take turns.

    Attributes:
        report: the RoundReport once the round is finished, else None.
        is_open: whether updates can still come in.
    """

    def __init__(
        self,
        settings: Settings,
        state: State,
        *,
        batch_size: int,
        may_hold: bool,
        callbacks: Sequence[Callback] = (),
        logger: logging.Logger = LOGGER,
        reader: type[UpdateReader] = UpdateReader,
    ) -> None:
        self.report: Report | None = None
        self.is_open = True
        self._callbacks = callbacks
        self._settings, self._state, self._batch_size, self._may_hold = settings, state, batch_size, may_hold
        self._logger = logger
        self._reader, self._weighing = reader(settings, state), Weighing(settings, state)
        self._partials = PartialSums(settings, state, self._weighing)
        self._turn, self._inside, self._is_ending = RLock(), Lock(), False
        self._held: list[UpdateBatch] = []
        self._undecided: UpdateBatch | None = None
        self._folded: list[UpdateBatch] = []
        self._known: set[ClientId] = set()  # held or heard
        self._summed: set[ClientId] = set()  # of partial sums
        self._rejected: list[tuple[ClientId, str]] = []
        self._has_examples = False  # whether a reply of the round has a number of examples, or a weight
        self._most_steps: int | None = None
        self._bytes, self._seconds = 0, 0.0

    @ieee
    def begin(self, newcomers: NewClients) -> None:
        """Begin a round for ``Server.open_round``, once it is the only one; or begin its sums again."""
        self._newcomers = newcomers if isinstance(newcomers, Mapping) else list(newcomers)
        try:
            self._aggregator = self._state.begin(self._newcomers)
            settings, remembered = self._settings, self._state.snapshot.norms
            unit = "|x - y|" if settings.averages_models else "|x - y| / (eta K)"
            self._by_claims = settings.algorithm.weighs_claims and not self._state.population.is_sized
            ratio = settings.rules.examples_ratio if self._by_claims else None
            examples = None if ratio is None else self._state.claimed.of("examples", ratio, remembered)
            buffers, reducer = self._state.snapshot.x[settings.layout.n_parameters :], self._state.reducer
            self._validator = Validator(
                *(settings.limits, settings.rules, unit, remembered, examples),
                lambda: combined_square(reducer, [buffers], [1.0]),
            )
        except BaseException:
            self._abort()
            raise

    @property
    def rejected(self) -> tuple[tuple[ClientId, str], ...]:
        """The clients whose updates were refused so far, with the reasons."""
        return tuple(self._rejected)

    @property
    def received(self) -> int:
        """The bytes that the clients sent so far."""
        return self._bytes

    def _facts(self) -> dict[str, Any]:
        if not self.is_open:
            return {"is_open": False, "report": self.report}
        return {
            "round": self._state.snapshot.round_number,
            "is_open": True,
            "accepted": len(self._known) + len(self._summed),
            "rejected": len(self._rejected),
        }

    def _require_open(self) -> None:
        super()._require_open()
        try:
            self._state.store.require_files()
        except StoreError:
            self._abort()
            raise

    @ieee
    def add_batch(self, updates: Sequence[Update]) -> list[bool]:
        """Add the updates of some clients, in one pass where they can be held.

        Returns:
            Which of them are accepted, as far as is known; ``report.rejected`` is final.

        Raises:
            RoundError, UnknownClientError, RangeError: as ``add``.
        """
        if len(updates) > 1 and self._add_plain(list(updates)):
            return [update.client in self._known for update in updates]
        return [self.add_together([update])[0] for update in updates]

    @ieee
    @one_call
    def add_together(self, updates: Sequence[Update]) -> list[bool]:
        """Add updates of different clients: in one pass if they can be held."""
        began = time.perf_counter()
        self._require_open()
        with span("read", self._state):
            read = [self._read(update) for update in updates]
        reasons = self._state.reducer.refusals([reason for _, _, _, reason in read])
        at_once = False
        taken = []
        for update, (client, reply, fixed, _), reason in zip(updates, read, reasons, strict=True):
            if reply is not None and reason is None:
                reason = self._settle_examples(reply)
            taken.append(reply is not None and reason is None)
            if reply is None or reason is not None:
                self._rejected.append((client, str(reason)))
                self._bytes += bytes_of(update.value)
                continue
            self._bytes += reply.bytes
            self._known.add(client)
            self._held.append(reply)
            at_once |= not (self._may_hold or update.keep or fixed)
        if at_once or len(self._held) >= self._batch_size:
            self._fold_held()
        self._seconds += time.perf_counter() - began
        return [new and client in self._known for new, (client, *_) in zip(taken, read, strict=True)]

    def _settle_examples(self, replies: UpdateBatch) -> str | None:
        """The reason why replies without examples do not count; those of the round go if these ones have examples."""
        if not self._by_claims or (replies.sources != NO_COUNT).all() == self._has_examples:
            return None
        if self._has_examples:
            return NO_EXAMPLES
        layout, sent = self._settings.layout, [y for y in replies.vectors if y is not None]  # None: a partial sum's
        name = next((found for y in sent if (found := first_not_finite(y, layout))), None)
        if not self._state.reducer.agree(name is None):  # it does not count, and takes no other's place
            return NOT_FINITE if name is None else f"{NOT_FINITE}, in {name}"
        self._has_examples = True
        before = [*self._held, *self._folded, *([self._undecided] if self._undecided is not None else [])]
        if dropped := [client for part in before for client in part.clients]:
            self._rejected += [(client, NO_EXAMPLES) for client in dropped]
            self._known.difference_update(dropped)
            self._summed.difference_update(dropped)
            self._held, self._folded, self._undecided = [], [], None
            self.begin(self._newcomers)
        return None

    def _read(self, update: Update) -> tuple[ClientId, UpdateBatch | None, bool, str | None]:
        """An update's client, the reply that it is, whether nobody can change that; or why it is none."""
        client = self._check(update, self._state.store.registry)
        if client in self._summed:  # no error, which would end the round: an edge may lie about who is in its sum
            return client, None, False, IN_PARTIAL
        if self._is_second(client):
            return client, None, False, SECOND
        try:
            return (client, *self._reader.read(update, client), None)
        except FedcoreError as error:
            return client, None, False, reason_of(error)

    @ieee
    @one_call
    def add_partial_sum(
        self, partial: PartialSum | bytes, sender: ClientId, clients: Iterable[ClientId] | None = None
    ) -> None:
        """Take in a partial sum of ``Round.partial_sum``, with the bits of adding each of its updates here.

        It counts as a whole, or is refused into the report with a reason, under the sender's name. What judges an
        update by others (``RejectLong``, ``CapExamples``) is where its updates are whole: its round's.
        A client of it that also replies here, later, is refused into the report.

        Args:
            clients: the edge's own clients; a sum or a refusal of any other registered client is refused. None lets
                the edge speak for every client.

        Raises:
            RoundError: the round is closed.
            RangeError: the server's sums are not exact, or its method does more than to add h.
            UnknownClientError: one of ``clients`` is not registered.
        """
        self._require_open()
        self._partials.require()
        own = None if clients is None else {self._state.store.registry.check(client) for client in clients}
        self._fold_held()
        joined = self._partials.join(self._aggregator, partial, own, self._known | self._summed, self._settle_examples)
        if isinstance(joined, str):
            self._rejected.append((sender, joined))
            return
        replies, refused = joined
        self._rejected += refused
        if len(replies):
            self._summed.update(replies.clients)
            self._folded.append(replies)

    @ieee
    @one_call
    def partial_sum(self) -> PartialSum:
        """Close the round without a step: its sum and its clients' claims, for ``add_partial_sum`` of another server.

        Raises:
            RoundError: the round is closed.
            RangeError: as for ``add_partial_sum``.

        Cost: reads and writes 16 n bytes.
        """
        self._require_open()
        self._partials.require()
        self._fold_held(last=True)
        partial = self._partials.collect(self._aggregator, self._folded, tuple(self._rejected), self._bytes)
        self._abort()
        return partial

    def buffer(self) -> F32:
        """A vector of the server's own for one client's y, float32[n] of undefined content, on the server's device.

        What receives or trains writes into it (``socket.recv_into``, ``out=``, a ``copy_`` to ``torch.from_numpy`` of
        it), and ``add`` is given the vector itself or a view of it. Then the round holds it, as what comes with
        ``keep``, and folds several in one pass: nothing is copied. Ask for one for each client, and write to none that
        was given to ``add``. Its memory is lent again when the round has folded it and the caller has let it go.

        Raises:
            RoundError: the round is closed.

        Cost: 4 n bytes for each that is out at a time: up to ``fold`` in the round, and what the caller has.

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
        return self._state.lent.take()

    @one_call
    def reject(self, client: ClientId, reason: str) -> None:
        """Report a client's reply as refused that never became an update, because its bytes could not be read.

        Raises:
            RoundError: the round is closed.
        """
        self._require_open()
        self._rejected.append((client, reason))

    @one_call
    def _add_plain(self, updates: list[Update]) -> bool:
        """Fold the updates if all are what nearly all are; whether they are."""
        began = time.perf_counter()
        self._require_open()
        with span("read", self._state):
            batch = self._reader.read_all(updates) if not self._held else None
        if batch is None or not (self._known | self._summed).isdisjoint(batch.clients):
            return False
        if self._by_claims:  # as those before, all with examples or all without; else one by one
            have = bool(batch.sources.all())  # NO_COUNT is 0
            if not have and batch.sources.any():
                return False
            if (self._known or self._summed) and have != self._has_examples:
                return False
            self._has_examples = have
        self._known.update(batch.clients)
        self._bytes += batch.vectors[0].nbytes * len(batch)
        self._fold([batch])
        self._seconds += time.perf_counter() - began
        return True

    @ieee
    def finish(self) -> Report:
        """Take the server's step and close the round.

        A round that heard nobody and refused somebody is a warning of the logger "fedcore.server".

        Raises:
            RoundError: the round is closed.
            DivergedError: x would become infinite or NaN, by the rates: a reply that could do it alone is refused. The
                server stays as it was before the round.
        """
        waiting, store = self._state.waiting if self.is_open else None, self._state.store if self.is_open else None
        with span("round", getattr(self, "_state", None)):  # a closed round has none
            report = self._finish()
        warn_if_unheard(report, self._logger)  # outside of the turn: a handler may look at the round
        warn_if_lowered(report.round, self._weighing.lowered, self._most_steps, self._logger)
        if waiting is not None and store is not None:
            waiting.log(report.waiting_for, store, self._logger)
        tell(self._callbacks, report, self._logger)
        return report

    @one_call
    def _finish(self) -> Report:
        began = time.perf_counter()
        self._require_open()
        self._seconds -= began
        self._fold_held(last=True)
        heard = UpdateBatch.joined(self._folded)
        if self._settings.is_exact:  # what else is made of the cohort has no order either
            heard = heard.ordered(self._state.store.registry.numbers(heard.clients))
        try:
            with uninterrupted():
                if self._is_ending:
                    raise RoundError("round: expected to finish it, got abort() from a signal's handler meanwhile")
                prepared = self._state.prepare(self._aggregator.result(), heard, self._validator.remembered())
                offset = self._state.shared_offset()
                seen = Diagnosis(self._settings, self._state.store, prepared, heard, offset, self._state.reducer)
                found = seen.measure()
                stale = staleness(prepared)
                document = None
                if self._settings.audit:
                    document = record(self._settings, prepared, heard, self._rejected)
                self._state.accept(prepared.after, document)
                self.is_open = False
                seconds = self._seconds + time.perf_counter()
                self._most_steps = prepared.most_steps
                spent = tuple(self._rejected), seconds, self._bytes
                self.report = report_of(self._settings, prepared, heard, found, stale, *spent)
        finally:
            if self.is_open:
                self._abort()
            else:
                self._let_go()  # a round that is over keeps no store open
                del self._aggregator
        return self.report

    def _abort(self) -> None:
        if self.is_open:
            self.is_open = False
            self._held.clear()
            self._undecided = None
            self._state.abandon()
            self._let_go()
            with suppress(AttributeError):  # there is none yet where the round could not begin
                del self._aggregator

    def _let_go(self) -> None:
        self._weighing.close()
        del self._state, self._reader, self._partials

    def _fold_held(self, *, last: bool = False) -> None:
        held, self._held = self._held, []
        if held or (last and self._undecided is not None):
            self._fold(held, last=last)

    def _fold(self, parts: list[UpdateBatch], *, last: bool = False) -> None:
        """Fold some replies, those that are still undecided first; if it fails, the round is over."""
        if (upload := self._state.upload) is None or not parts:
            self._fold_together(parts, last=last)
            return
        portions = upload.portions(UpdateBatch.joined(parts))
        for place, portion in enumerate(portions, start=1):
            try:
                upload.bring(portion)
            except BaseException:
                self._abort()
                raise
            self._fold_together([portion], last=last and place == len(portions))

    def _fold_together(self, parts: list[UpdateBatch], *, last: bool) -> None:
        """Fold a batch in one pass, and once more without the updates that the validator rejects."""
        batch = UpdateBatch.joined([*([] if self._undecided is None else [self._undecided]), *parts])
        try:
            with span("validate", self._state):
                if self._settings.algorithm.weighs_claims:
                    self._weighing.count_known_examples(batch)
                self._weighing.weigh(batch)
            lengths = self._aggregator.try_fold(batch)
            self._undecided, squares = None, lengths.parameters
            with span("validate"):
                decision = self._validator.decide(lengths, batch.clients, batch.claims, last=last)
                if decision is not None:
                    self._weighing.count_examples(batch, decision.examples)
                    batch.clip(decision.factors)
                    self._weighing.weigh(batch)
                    self._leave_out(batch, decision)
            if decision is None:
                self._aggregator.accept(batch)
            else:
                batch = self._aggregator.refold(batch, decision.accepted)
                squares = squares[decision.accepted]
        except BaseException:
            self._abort()
            raise
        if len(batch):
            batch.count(squares)
            self._folded.append(batch)

    def _leave_out(self, replies: UpdateBatch, decision: Decision) -> None:
        """Report what is rejected, and keep what is undecided: a copy, unless its memory is immutable."""
        for i, reason in sorted(decision.rejected.items()):
            if reason == NOT_FINITE and (name := first_not_finite(replies.vectors[i], self._settings.layout)):
                reason = f"{reason}, in {name}"
            self._known.discard(replies.clients[i])
            self._rejected.append((replies.clients[i], reason))
        if decision.undecided.any():
            self._undecided = replies.chosen(decision.undecided)
            if not self._may_hold:
                self._undecided.vectors = [lasting(y) for y in self._undecided.vectors]
                self._undecided.controls = [lasting(control) for control in self._undecided.controls]


# A round in one call, of replies that are what nearly all are: without what a ``Round`` keeps for replies to come.


class WholeRound:
    """A round in one call, as the server's other calls see it meanwhile.

    Attributes:
        is_open: whether it can still be given up.
    """

    __slots__ = ("__weakref__", "is_open")

    def __init__(self) -> None:
        self.is_open = True

    def abort(self) -> None:
        """Give it up, unless it counts already."""
        self.is_open = False


@ieee
def whole_round(
    state: State, updates: list[Update], opened: WholeRound, began: float
) -> tuple[Report, Weighing] | None:
    """The round's report and what it weighed by; or None, with the server as it was, where it takes a ``Round``.

    Args:
        opened: what may be aborted meanwhile.
        began: when the round did, by ``time.perf_counter``.

    Raises:
        RoundError: it was aborted.
        DivergedError: x would become infinite or NaN.
    """
    settings = state.settings
    weighing = Weighing(settings, state)
    try:
        aggregator, reader = state.begin(()), UpdateReader(settings, state)
        if settings.steps_by_mean and not state.population.is_sized:
            report = step_by_mean(state, settings, reader.read_columns(updates), opened, began)
            return None if report is None else (report, weighing)
        replies = reader.read_all(updates)
        if replies is None:
            return None
        if settings.algorithm.weighs_claims:
            if not state.population.is_sized and len(set(replies.sources.tolist())) > 1:
                return None  # some with examples, and some without
            weighing.count_known_examples(replies)
        weighing.weigh(replies)
        sent = replies.vectors[0].nbytes * len(replies)
        lengths = aggregator.try_fold(replies)
        columns = [column for column in lengths if column is not None]
        if not all(core.column_range(column)[1] < math.inf for column in columns):  # false for a NaN too
            return None
        aggregator.accept(replies)
        replies.count(lengths.parameters)
        return finish(state, settings, aggregator.result(), replies, opened, sent, began), weighing
    finally:
        if opened.is_open:
            state.abandon()
        weighing.close()


def step_by_mean(
    state: State, settings: Settings, columns: PlainColumns | None, opened: WholeRound, began: float
) -> Report | None:
    """A round that steps along the mean of the updates and changes nothing but x; None as for ``whole_round``."""
    if columns is None:
        return None
    clients, ys, steps, examples, distances = columns
    ones, _, _, factors, _ = usual(len(ys))
    weights = examples if settings.algorithm.weighs_claims else ones
    if not core.column_range(weights)[0] > 0:  # as a NaN is not, which stands for none
        if not np.isnan(weights).all():
            return None
        weights = ones
    stepped = state.step_by_mean(ys, ones if settings.averages_models else 1 / distances, weights)
    if stepped is None:
        return None
    after, squares, mean_square = stepped
    norms, before = np.sqrt(squares), state.snapshot
    report = Report(
        round=before.round_number,
        accepted=tuple(clients),
        steps=int(core.column_sum(0.0, steps, None)),
        norms=norms / distances if settings.averages_models else norms,
        weights=weights,
        factors=factors,
        diversity=diversity_of(weights, squares, mean_square),
        gamma=after.gamma,
        seconds=time.perf_counter() - began,
        bytes=ys[0].nbytes * len(ys),
        changed=dict(before.changed) or None,
    )
    accept(state, after, opened)
    return report


def finish(
    state: State, settings: Settings, result: Result, heard: UpdateBatch, opened: WholeRound, sent: int, began: float
) -> Report:
    """Take the step and let it count."""
    prepared, offset = state.prepare(result, heard, {}), state.shared_offset()
    found = Diagnosis(settings, state.store, prepared, heard, offset, state.reducer).measure()
    # A store's rows are many steps; without them the round counts by one assignment.
    with uninterrupted() if settings.algorithm.keeps_rows else nullcontext():
        accept(state, prepared.after, opened)
    return report_of(settings, prepared, heard, found, staleness(prepared), (), time.perf_counter() - began, sent)


def accept(state: State, after: Snapshot, opened: WholeRound) -> None:
    """Let the step count."""
    if not opened.is_open:
        raise RoundError("round: expected to finish it, got abort() meanwhile")
    state.accept(after)
    opened.is_open = False


# One round of a server at a time: which one is open, and who opens the next.


RoundT = TypeVar("RoundT", bound=Round | WholeRound)


class RoundLock:
    """The last round that was opened, and the turn of whoever opens the next."""

    def __init__(self) -> None:
        self._opening = Lock()
        # Weak, so that a round that was dropped does not stay open for ever.
        self._last: Callable[[], Round | WholeRound | None] = lambda: None  # came before the first

    def __deepcopy__(self, memo: dict[int, object]) -> "RoundLock":
        """A copy with a turn of its own, since nobody can copy a lock; the last round is the same."""
        copied = RoundLock()
        copied._last = self._last
        return copied

    @property
    def opened(self) -> Round | WholeRound | None:
        """The round that is open, if there is one."""
        last = self._last()
        return last if last is not None and last.is_open else None

    def open(self, round: int, make: Callable[[], RoundT]) -> RoundT:
        """Make a round, which is the open one from then on.

        Args:
            round: its number on the server, for messages.

        Raises:
            RoundError: one is open already, or is just opened: by another thread, or by the call that the handler of a
                signal has come upon, which cannot wait for it.
        """
        if self._opening.locked():
            raise RoundError(f"round {round}: expected one thread to open it, got two at once")
        with self._opening:
            self.require_none(round)
            opened = make()
            self._last = ref(opened)
        return opened

    def require_none(self, round: int) -> None:
        """Refuse to go on while one is open.

        Raises:
            RoundError: one is.
        """
        if self.opened is not None:
            raise RoundError(
                f"round: expected one open at a time, found that round {round} is open already: finish or abort it"
            )
