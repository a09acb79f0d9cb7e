"""One round: updates come in one at a time, are folded into the sums, and are forgotten."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from threading import Lock, RLock
from typing import Any

from fedcore.aggregation import NO_COUNT, Lengths, Replies, combined_square
from fedcore.arguments import reason_of
from fedcore.clients import ClientId
from fedcore.errors import FedcoreError, RoundError, StoreError
from fedcore.float_mode import ieee
from fedcore.interrupts import uninterrupted
from fedcore.server.audit import record
from fedcore.server.call_guard import one_call
from fedcore.server.diagnostics import Diagnosis, staleness
from fedcore.server.judge import NOT_FINITE, Judge, Verdict
from fedcore.server.made_report import report_of
from fedcore.server.newcomers import Coming
from fedcore.server.partial import Partial
from fedcore.server.partial_reader import Partials
from fedcore.server.report import OnReport, RoundReport, tell, warn_if_lowered, warn_if_unheard
from fedcore.server.round_face import SECOND, RoundFace
from fedcore.server.settings import Settings
from fedcore.server.state import State
from fedcore.server.update import Update, bytes_of, first_not_finite, lasting
from fedcore.server.update_reader import UpdateReader
from fedcore.server.weighing import Weighing, Weights
from fedcore.typing import F32, Bools

LOGGER = logging.getLogger("fedcore.server")
NO_EXAMPLES = "examples: expected a number, as other clients of the round gave one, got None"
IN_PARTIAL = (
    "client: expected one update a round, got one of a client that an edge's partial sum has counted already: "
    "add_partial(clients=) holds an edge to its own clients"
)


class Round(RoundFace):
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
        fold: int,
        may_hold: bool,
        on_report: OnReport | None = None,
        logger: logging.Logger = LOGGER,
        reader: type[UpdateReader] = UpdateReader,
        weights: Weights | None = None,
    ) -> None:
        self.report: RoundReport | None = None
        self.is_open = True
        self._on_report = on_report
        self._settings, self._state, self._fold_at, self._may_hold = settings, state, fold, may_hold
        self._logger = logger
        self._reader, self._weighing = reader(settings, state, weights), Weighing(settings, state)
        self._partials = Partials(settings, state, self._weighing)
        self._turn, self._inside, self._is_ending = RLock(), Lock(), False
        self._held: list[Replies] = []
        self._undecided: Replies | None = None
        self._folded: list[Replies] = []
        self._known: set[ClientId] = set()  # held or heard
        self._summed: set[ClientId] = set()  # of partial sums
        self._refused: list[tuple[ClientId, str]] = []
        self._has_examples = False  # whether a reply of the round has a number of examples, or a weight
        self._most_steps: int | None = None
        self._bytes, self._seconds = 0, 0.0

    @ieee
    def begin(self, newcomers: Coming) -> None:
        """Begin a round for ``Server.open_round``, once it is the only one; or begin its sums again."""
        self._newcomers = newcomers if isinstance(newcomers, Mapping) else list(newcomers)
        try:
            self._aggregator = self._state.begin(self._newcomers)
            settings = self._settings
            unit = "|x - y|" if settings.averages_models else "|x - y| / (eta K)"
            self._by_claims = settings.algorithm.weighs_claims and not self._state.population.is_sized
            limits, heard, ratio = settings.limits, self._state.snapshot.norms, settings.limits.examples_ratio
            capped = self._by_claims and ratio is not None
            examples = self._state.claimed.of("examples", ratio, heard) if capped else None
            buffers, whole = self._state.snapshot.x[settings.layout.n_parameters :], self._state.whole
            self._judge = Judge(limits, unit, heard, examples, lambda: combined_square(whole, [buffers], [1.0]))
        except BaseException:
            self._abort()
            raise

    @property
    def refused(self) -> tuple[tuple[ClientId, str], ...]:
        """The clients whose updates were refused so far, with the reasons."""
        return tuple(self._refused)

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
            "heard": len(self._known) + len(self._summed),
            "refused": len(self._refused),
        }

    def _require_open(self) -> None:
        super()._require_open()
        try:
            self._state.store.require_files()
        except StoreError:
            self._abort()
            raise

    def add_update(self, update: Update) -> bool:
        """Fold one client's update in: ``add`` for an Update."""
        return self.add_together([update])[0]

    @ieee
    @one_call
    def add_together(self, updates: Sequence[Update]) -> list[bool]:
        """Fold the updates of some clients in, each client's once: in one pass where they may be held.

        Returns:
            Which of them are accepted, as far as is known.
        """
        began = time.perf_counter()
        self._require_open()
        read = [self._read(update) for update in updates]
        reasons = self._state.whole.refusals([reason for _, _, _, reason in read])
        at_once = False
        taken = []
        for update, (client, reply, fixed, _), reason in zip(updates, read, reasons, strict=True):
            if reply is not None and reason is None:
                reason = self._settle_examples(reply)
            taken.append(reply is not None and reason is None)
            if reply is None or reason is not None:
                self._refused.append((client, str(reason)))
                self._bytes += bytes_of(update.sent[1])
                continue
            self._bytes += reply.bytes
            self._known.add(client)
            self._held.append(reply)
            at_once |= not (self._may_hold or update.keep or fixed)
        if at_once or len(self._held) >= self._fold_at:
            self._fold_held()
        self._seconds += time.perf_counter() - began
        return [new and client in self._known for new, (client, *_) in zip(taken, read, strict=True)]

    def _settle_examples(self, replies: Replies) -> str | None:
        """The reason why replies without examples do not count; those of the round go if these ones have examples."""
        if not self._by_claims or (replies.sources != NO_COUNT).all() == self._has_examples:
            return None
        if self._has_examples:
            return NO_EXAMPLES
        layout, sent = self._settings.layout, [y for y in replies.vectors if y is not None]  # None: a partial sum's
        name = next((found for y in sent if (found := first_not_finite(y, layout))), None)
        if not self._state.whole.agree(name is None):  # it does not count, and takes no other's place
            return NOT_FINITE if name is None else f"{NOT_FINITE}, in {name}"
        self._has_examples = True
        before = [*self._held, *self._folded, *([self._undecided] if self._undecided is not None else [])]
        if dropped := [client for part in before for client in part.clients]:
            self._refused += [(client, NO_EXAMPLES) for client in dropped]
            self._known.difference_update(dropped)
            self._summed.difference_update(dropped)
            self._held, self._folded, self._undecided = [], [], None
            self.begin(self._newcomers)
        return None

    def _read(self, update: Update) -> tuple[ClientId, Replies | None, bool, str | None]:
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
    def add_partial(
        self, partial: Partial | bytes, sender: ClientId, clients: Iterable[ClientId] | None = None
    ) -> None:
        """Take in a partial sum of ``Round.partial``, with the bits of adding each of its updates here.

        It counts as a whole, or is refused into the report with a reason, under the sender's name. What judges an
        update by others (``max_norm_ratio``, ``max_examples_ratio``) is where its updates are whole: its round's.
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
            self._refused.append((sender, joined))
            return
        replies, refused = joined
        self._refused += refused
        if len(replies):
            self._summed.update(replies.clients)
            self._folded.append(replies)

    @ieee
    @one_call
    def partial(self) -> Partial:
        """Close the round without a step: its sum and its clients' claims, for ``add_partial`` of another server.

        Raises:
            RoundError: the round is closed.
            RangeError: as for ``add_partial``.

        Cost: reads and writes 16 n bytes.
        """
        self._require_open()
        self._partials.require()
        self._fold_held(last=True)
        partial = self._partials.collect(self._aggregator, self._folded, tuple(self._refused), self._bytes)
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
        >>> server = Server("FedAvg", np.zeros(2, np.float32), clients=2, lr=0.1)
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
    def refuse(self, client: ClientId, reason: str) -> None:
        """Report a client's reply as refused that never became an update, because its bytes could not be read.

        Raises:
            RoundError: the round is closed.
        """
        self._require_open()
        self._refused.append((client, reason))

    @ieee
    def add_all(self, updates: list[Update]) -> None:
        """Fold a cohort's updates in, in one pass where they can be held: ``add_update`` for each of them."""
        if not self._add_plain(updates):
            for update in updates:
                self.add_update(update)

    @one_call
    def _add_plain(self, updates: list[Update]) -> bool:
        """Fold the updates if all are what nearly all are; whether they are."""
        began = time.perf_counter()
        self._require_open()
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
    def finish(self) -> RoundReport:
        """Take the server's step and close the round.

        A round that heard nobody and refused somebody is a warning of the logger "fedcore.server".

        Raises:
            RoundError: the round is closed.
            DivergedError: x would become infinite or NaN, by the rates: a reply that could do it alone is refused. The
                server stays as it was before the round.
        """
        waiting, store = self._state.waiting if self.is_open else None, self._state.store if self.is_open else None
        report = self._finish()
        warn_if_unheard(report, self._logger)  # outside of the turn: a handler may look at the round
        warn_if_lowered(report.round, self._weighing.lowered, self._most_steps, self._logger)
        if waiting is not None and store is not None:
            waiting.tell(report.awaited, store, self._logger)
        tell(self._on_report, report, self._logger)
        return report

    @one_call
    def _finish(self) -> RoundReport:
        began = time.perf_counter()
        self._require_open()
        self._seconds -= began
        self._fold_held(last=True)
        heard = Replies.joined(self._folded)
        if self._settings.is_exact:  # what else is made of the cohort has no order either
            heard = heard.ordered(self._state.store.registry.numbers(heard.clients))
        try:
            with uninterrupted():
                if self._is_ending:
                    raise RoundError("round: expected to finish it, got abort() from a signal's handler meanwhile")
                prepared = self._state.prepare(self._aggregator.result(), heard, self._judge.heard())
                offset = self._state.shared_offset()
                seen = Diagnosis(self._settings, self._state.store, prepared, heard, offset, self._state.whole)
                found = seen.measure()
                stale = staleness(prepared)
                document = None
                if self._settings.audit:
                    document = record(self._settings, prepared, heard, self._refused)
                self._state.accept(prepared.after, document)
                self.is_open = False
                seconds = self._seconds + time.perf_counter()
                self._most_steps = prepared.most_steps
                spent = tuple(self._refused), seconds, self._bytes
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

    def _fold(self, parts: list[Replies], *, last: bool = False) -> None:
        """Fold some replies, those that are still undecided first; if it fails, the round is over."""
        if (upload := self._state.upload) is None or not parts:
            self._fold_together(parts, last=last)
            return
        portions = upload.portions(Replies.joined(parts))
        for place, portion in enumerate(portions, start=1):
            try:
                upload.bring(portion)
            except BaseException:
                self._abort()
                raise
            self._fold_together([portion], last=last and place == len(portions))

    def _fold_together(self, parts: list[Replies], *, last: bool) -> None:
        """Fold some replies in one pass."""
        replies = Replies.joined([*([] if self._undecided is None else [self._undecided]), *parts])
        verdict: Verdict | None = None

        def judge(lengths: Lengths) -> Bools | None:
            nonlocal verdict
            verdict = self._judge.judge(lengths, replies.claims.examples, last=last)
            if verdict is None:
                return None
            self._weighing.count_examples(replies, verdict.examples)
            replies.clip(verdict.factors)
            self._weighing.weigh(replies)
            return verdict.accepted

        try:
            if self._settings.algorithm.weighs_claims:
                self._weighing.count_known_examples(replies)
            self._weighing.weigh(replies)
            squares = self._aggregator.fold(replies, judge)
        except BaseException:
            self._abort()
            raise
        self._undecided = None
        if verdict is not None:
            self._leave_out(replies, verdict)
            replies, squares = replies.chosen(verdict.accepted), squares[verdict.accepted]
        if len(replies):
            replies.count(squares)
            self._folded.append(replies)

    def _leave_out(self, replies: Replies, verdict: Verdict) -> None:
        """Refuse what does not count, and keep what is undecided: a copy, unless nobody can change it."""
        for i, reason in sorted(verdict.refused.items()):
            if reason == NOT_FINITE and (name := first_not_finite(replies.vectors[i], self._settings.layout)):
                reason = f"{reason}, in {name}"
            self._known.discard(replies.clients[i])
            self._refused.append((replies.clients[i], reason))
        if verdict.undecided.any():
            self._undecided = replies.chosen(verdict.undecided)
            if not self._may_hold:
                self._undecided.vectors = [lasting(y) for y in self._undecided.vectors]
                self._undecided.controls = [lasting(control) for control in self._undecided.controls]
