"""The coordinator of shards: it sends each call to all shards and answers their questions. It holds no vectors."""

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from operator import itemgetter
from threading import RLock
from typing import Any, Self, cast

import numpy as np

from fedcore import kernels
from fedcore.arrays import F32, into
from fedcore.cluster.manifest import ShardInfo
from fedcore.cluster.placement import Answer, LocalThreads, Lost, Placement, Referring, ShardLostError
from fedcore.cluster.shard import AbandonedError, Question, Raised, Returned, ShardState
from fedcore.errors import CheckpointError, ClusterError, StoreError
from fedcore.profiling import span
from fedcore.runtime import uninterrupted
from fedcore.server.folder import Transactions, common_transaction
from fedcore.server.requests import concatenate
from fedcore.server.update import SentSlices, digest_of_numbers
from fedcore.store import Durability
from fedcore.store.registry import ClientId

LOGGER = logging.getLogger("fedcore.cluster")
TICK = 0.25
"""Seconds between two checks of signals and timeouts."""
HELD = 1.0
"""Seconds for which a signal waits for the end of a call. Most calls are shorter, so no handler runs within them."""
LATE = 10.0
"""Seconds until the log names the shards that have not answered."""
LATE_AGAIN = 60.0
"""Seconds until the log names them again."""
PATIENCE = 10.0
"""Timeout in seconds for locking a folder whose process is being killed."""
GRACE = 2.0
"""Seconds within which shards must end an aborted call before they are killed."""
MOST_TRIES = 4
"""Attempts to open all shards if each attempt loses one. Ray may not know yet that a machine is lost."""


class CallAbortedError(Exception):
    """A call to all shards was aborted: a shard was lost, or the call failed when shards may have committed already.

    Attributes:
        error: the error to raise if the change did not happen.
        reason: the cause of the error, as text.
        result: the result of a shard whose call has returned, or None.
        interrupt: an error of a signal handler, to raise after recovery, or None.
    """

    def __init__(
        self, error: BaseException, reason: str, result: Returned | None, interrupt: BaseException | None = None
    ) -> None:
        super().__init__(str(error))
        self.error, self.reason, self.result, self.interrupt = error, reason, result, interrupt


class Exchange:
    """One call of a method on all shards. It sends messages, answers the shards' questions, and can be aborted.

    Signal handlers run after the call or, if the call takes longer than ``HELD`` seconds, during it. Their first
    exception aborts the call. If a shard may have committed already, only a second exception aborts the call.

    ``interrupts`` lists the exceptions of signal handlers, ``answers`` has a function for each question.
    """

    def __init__(self, placement: Placement, shards: int, name: str, signals: uninterrupted) -> None:
        self._placement, self._shards, self._name, self._signals = placement, shards, name, signals
        self.answers: Mapping[str, Any] = ANSWERS
        self._replies: dict[int, Answer] = {}
        self.may_have_committed = False
        self.interrupts: list[BaseException] = []

    def call(self, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call the method; return the result of each shard.

        Raise a CallAbortedError if a shard is lost, or if the call fails when some shards may have committed already.
        After any other error no shard has changed.
        """
        self._placement.begin(self._name, arguments)
        self._wait()
        while questions := self._questions():
            answers, is_commit = self._answers(questions)
            self.may_have_committed |= is_commit
            self._answer(answers)
            self._wait()
        return self._results()

    def read(self, references: Sequence[Any]) -> list[Any]:
        """Fetch the results that the references name, one per shard. Errors: see ``call``."""
        cast(Referring, self._placement).read(references)
        self._wait()
        return self._results()

    def abandon(self, signals: uninterrupted, seconds: float) -> bool:
        """Abort the call in every shard. Return whether no shard is lost and all end the call within ``seconds``.

        A second exception of a signal handler ends the wait.
        """
        until = time.monotonic() + seconds
        self._abandon_questions()
        if self._placement.waiting:
            self._replies |= self._placement.wait(TICK)
            self._abandon_questions()
        if waiting := list(self._placement.waiting):
            LOGGER.warning("%s: the call was aborted, but shards %s have not ended it yet", self._name, waiting)
        while self._placement.waiting:
            if len(self.interrupts) > 1 or time.monotonic() > until:
                return False
            self._replies |= self._placement.wait(TICK)
            self._abandon_questions()
            self.interrupts += signals.run_handlers()
        return not self.lost

    @property
    def lost(self) -> dict[int, Exception]:
        """The errors of the lost shards, by number."""
        return {k: reply.error for k, reply in sorted(self._replies.items()) if isinstance(reply, Lost)}

    def _wait(self) -> None:
        """Wait until every shard asks a question or ends the call."""
        began = time.monotonic()
        late = began + LATE
        while self._placement.waiting:
            self._replies |= self._placement.wait(TICK)
            now, waiting = time.monotonic(), list(self._placement.waiting)
            if waiting and now > late:
                late = now + LATE_AGAIN
                LOGGER.warning("%s: shards %s have not answered for %.0f s", self._name, waiting, now - began)
            if waiting and now > began + HELD:
                self._run_handlers()
        if len(self._replies) < self._shards:
            raise ClusterError(f"{self._name}: a signal handler closed the shards during the call")

    def _run_handlers(self) -> None:
        """Run signal handlers and raise their first exception; after a possible commit, raise only a second one."""
        before = len(self.interrupts)
        self.interrupts += self._signals.run_handlers()
        if not self.may_have_committed and self.interrupts:
            raise self.interrupts[0]
        if len(self.interrupts) > 1:
            first = self.interrupts[0]
            raise CallAbortedError(first, "the call was interrupted twice", self._first_result(), first)
        if len(self.interrupts) > before:
            LOGGER.warning(
                "%s: the interrupt takes effect once all shards have committed; a second interrupt ends shards %s now",
                self._name,
                list(self._placement.waiting),
            )

    def _abandon_questions(self) -> None:
        self._answer({k: AbandonedError("the call was aborted") for k in self._questions()})

    def _questions(self) -> dict[int, Question]:
        return {k: reply for k, reply in sorted(self._replies.items()) if isinstance(reply, Question)}

    def _answer(self, answers: Mapping[int, Any]) -> None:
        for k in answers:
            del self._replies[k]
        self._placement.answer(answers)

    def _answers(self, questions: Mapping[int, Question]) -> tuple[dict[int, Any], bool]:
        """Return the answer to each question, and whether the shards may commit now."""
        names = {one.name for one in questions.values()}
        if len(questions) < self._shards or len(names) > 1:
            return {k: AbandonedError("another shard has failed") for k in questions}, False
        (name,) = names
        answer = self.answers[name]([one.value for one in questions.values()])
        return dict.fromkeys(questions, answer), name == "ready"

    def _first_result(self) -> Returned | None:
        replies = sorted(self._replies.items())
        return next((reply for _, reply in replies if isinstance(reply, Returned)), None)

    def _results(self) -> list[Any]:
        replies = [reply for _, reply in sorted(self._replies.items())]
        raised = [reply.error for reply in replies if isinstance(reply, Raised)]
        errors = [error for error in raised if not isinstance(error, AbandonedError)]
        if lost := self.lost:
            reason = f"shards {list(lost)} were lost: {next(iter(lost.values()))}"
            unchanged = ShardLostError(f"{self._name}: {reason}; nothing has changed; call it again")
            raise CallAbortedError(errors[0] if errors else unchanged, reason, self._first_result())
        if raised:
            error = (
                errors[0] if errors else ClusterError(f"{self._name}: the shards are at different steps of the call")
            )
            if self.may_have_committed:
                raise CallAbortedError(error, str(error), self._first_result())
            raise error
        return [reply.value for reply in replies if isinstance(reply, Returned)]


def _add(values: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the squared lengths of several sums, each from its blocks in the order of the shards."""
    return [kernels.sum_of_partials(np.concatenate(partials)) for partials in zip(*values, strict=True)]


ANSWERS: dict[str, Any] = {"add": _add, "first": itemgetter(0), "agree": all, "ready": any}
"""The questions of shards by name, beside digests. Each function computes the answer from the values of all shards."""


class Coordinator:
    """An object that calls all shards, answers their questions, and recovers them after a failure.

    A change is complete once the last shard's transaction is durable; no other record exists. Shards that are one
    transaction ahead roll it back.

    Args:
        given: the caller's objects, as ``Settings.from_state`` takes them; shards may not find them by name.
        check_manifest: a function that raises an error if the manifest now names other shards.
        joined: a function that returns the vector of the shards' slices.

    Attributes:
        state: the round and transaction numbers, which are the same in all shards.
        lock: lets one thread at a time call the shards, from the first message to the last answer.
        openings: a counter that increases when the shards are opened or become inconsistent. Older results are then
            invalid.
        settings: the settings in the first shard's folder; None for a new server.
        is_inconsistent: whether shards may be in different states; the next call recovers them.
    """

    def __init__(
        self,
        placement: Placement | None,
        shards: Sequence[ShardInfo],
        durability: Durability,
        given: Mapping[str, Any],
        check_manifest: Callable[[], None],
        joined: Callable[[Sequence[Any]], Any] = concatenate,
    ) -> None:
        self.joined, self._check_manifest = joined, check_manifest
        self.placement: Placement = LocalThreads() if placement is None else placement
        self._shards, self._durability, self.given = shards, durability, given
        self.state, self.openings = ShardState(0, 0), 0
        self.settings: dict[str, Any] | None = None
        self.is_inconsistent, self._is_calling = False, False
        self._failure: str | None = None
        self._unfinished: Exchange | None = None  # an aborted call that shards may not have ended yet
        self._lock, self._process = RLock(), os.getpid()

    @property
    def lock(self) -> RLock:
        """See the class; raise ClusterError in a forked process, which has no threads of shards."""
        if self._process != os.getpid():
            raise ClusterError(f"server: its shards run in the parent process {self._process}; call it there")
        return self._lock

    def __len__(self) -> int:
        return len(self._shards)

    def call(self, name: str, *shared: Any, each: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Call a method on all shards that is not a transaction; return the result of each.

        ``shared`` are arguments for all shards; ``each`` has more arguments for each shard. Raise a ClusterError if a
        shard is lost; then all are opened again, and nothing has changed.
        """
        with self.lock:
            self._require_shards()
            try:
                return self._call(name, shared, each)
            except CallAbortedError as aborted:
                self._recover_from(aborted)
                raise aborted.error from None

    def change(self, name: str, *shared: Any, each: Sequence[tuple[Any, ...]] | None = None, rounds: int = 0) -> Any:
        """Call a method on all shards that is one transaction in each; return the first shard's result.

        The method finishes ``rounds`` rounds. Raise a ClusterError if a shard is lost: either the change did not
        happen, or it happened and its result is lost. After an error of a shard the change did not happen.
        """
        with self.lock:
            self._require_shards()
            after = ShardState(self.state.round_number + rounds, self.state.transactions + 1)
            try:
                results = self._call(name, shared, each, after)
            except CallAbortedError as aborted:
                self._recover_from(aborted)
                if self.state != after:
                    raise aborted.error from None
                if aborted.result is None:
                    raise ClusterError(
                        f"{name}: the change is complete in all shards, but its result was lost: {aborted.reason}"
                    ) from None
                return aborted.result.value
            return results[0] if results else None

    def fetch(self, name: str, *arguments: Any) -> list[Any]:
        """Call a read-only method without questions on each shard; return the results, or references to them.

        Errors of a shard are raised here or when the reference is read.
        """
        with self.lock:
            if not self.placement.has_references:
                return self.call(name, *arguments)
            self._require_shards()
            with uninterrupted():  # the call returns at once
                return cast(Referring, self.placement).fetch(name, *arguments)

    def read(self, fetched: Sequence[Any], opening: int) -> list[Any]:
        """Return the results of ``fetch`` in this process; ``opening`` is the value of ``openings`` at that time."""
        with self.lock:
            if not self.placement.has_references:
                return list(fetched)
            self._require_no_call()
            try:
                with self._calling() as signals:
                    return Exchange(self.placement, len(fetched), "fetch", signals).read(fetched)
            except CallAbortedError as aborted:
                if opening != self.openings:
                    raise ClusterError("broadcast: its vectors were lost with a shard; make a new broadcast") from None
                self._mark_inconsistent()
                self._recover()
                raise aborted.error from None

    def make(self, *shared: Any, each: Sequence[tuple[Any, ...]]) -> None:
        """Create the shards of a new server: all of them, or none."""
        with self.lock:
            try:
                self.placement.make(self._shards)
                try:
                    self._call("make", shared, each)
                except BaseException:
                    if self._unfinished is None:
                        with suppress(Exception):  # a lost shard cannot delete anything
                            self._call("unmake", (), None)
                    raise
            except BaseException as error:
                self.placement.drop()
                raise (error.error if isinstance(error, CallAbortedError) else error) from None

    def open(self) -> None:
        """Open the shards' folders at one transaction: shards that are ahead roll one back.

        Each shard locks its folder before it reads it. The call can be repeated after an interrupt. It repeats itself
        if a shard is lost. Raise a CheckpointError if shards are further apart than one transaction, or do not belong
        together.
        """
        with self.lock:
            for left in reversed(range(MOST_TRIES)):
                try:
                    self._open_once()
                    return
                except ShardLostError as error:
                    if not left:
                        raise
                    LOGGER.info("a shard was lost while the shards were opened; opening all again: %s", error)

    def _open_once(self) -> None:
        try:
            self.placement.make(self._shards)
            held = self._open_folders()
            to = common_transaction(held, [info.folder for info in self._shards])
            if ahead := [info.shard for one, info in zip(held, self._shards, strict=True) if one.last > to]:
                LOGGER.info("rolling back unfinished transaction %d in shards %s (of %d)", to + 1, ahead, len(held))
            saved = self._call("resume", (to, self.given), None)
            states = set(self._call("shard_state", (), None))
        except BaseException as error:
            self.placement.drop()
            raise (error.error if isinstance(error, CallAbortedError) else error) from None
        if len(states) != 1 or any(shared_settings(settings) != shared_settings(saved[0]) for settings in saved):
            self.placement.drop()
            raise CheckpointError("shards: their rounds or settings differ; they do not belong to one server")
        self.settings, (self.state,) = saved[0], states
        self.openings += 1
        self.is_inconsistent = False

    def _open_folders(self) -> list[Transactions]:
        """Lock the folders and return their transactions. Check the manifest before any folder is changed."""
        try:
            held: list[Transactions] = self._call("open_folder", (self._durability, PATIENCE), None)
        except StoreError:
            self._check_manifest()  # its error explains why a folder is missing
            raise
        self._check_manifest()
        return held

    def drop(self) -> None:
        """End the shards; a forked process leaves them to its parent."""
        if self._process != os.getpid():
            return
        with self.lock:
            self._unfinished = None
            self.placement.drop()
            self._failure = self._failure or "the server is closed"

    def _require_shards(self) -> None:
        """Recover inconsistent shards. Raise an error if that fails, or during another call."""
        self._require_no_call()
        if self.is_inconsistent and self._failure is None:
            self._recover()
        if self._failure is not None:
            raise ClusterError(f"server: the shards are not available: {self._failure}")

    def _require_no_call(self) -> None:
        if self._is_calling:
            raise ClusterError(
                "server: a signal handler called the server during another call; wait until that call has returned"
            )

    @contextmanager
    def _calling(self) -> Iterator[uninterrupted]:
        """Let signal handlers wait, and reject their calls."""
        with uninterrupted() as signals:
            self._is_calling = True
            try:
                yield signals
            finally:
                self._is_calling = False

    def _call(
        self, name: str, shared: Sequence[Any], each: Sequence[tuple[Any, ...]] | None, after: ShardState | None = None
    ) -> list[Any]:
        """Call all shards; ``after`` is their state once they have returned."""
        arguments = [(*shared, *own) for own in (each or [()] * len(self))]
        try:
            with self._calling() as signals:
                exchange = Exchange(self.placement, len(self), name, signals)
                exchange.answers = {**ANSWERS, "digests": self._digests}
                try:
                    with span("gather"):
                        results = exchange.call(arguments)
                    self.state = after or self.state
                except BaseException as error:
                    raise self._abort(exchange, signals, error) from None
                if exchange.interrupts:
                    raise exchange.interrupts[0]
        except CallAbortedError:
            raise
        except BaseException:
            if self.is_inconsistent and self._unfinished is None:
                self.placement.drop()
            raise
        return results

    def _digests(self, values: Sequence[Sequence[Any]]) -> list[str]:
        """Return the digests of several vectors, each from its slices in the order of the shards."""
        return [digest_of_numbers(self.joined(slices)) for slices in zip(*values, strict=True)]

    def _abort(self, exchange: Exchange, signals: uninterrupted, error: BaseException) -> BaseException:
        """Abort a failed call in all shards, or mark them as inconsistent; return the error to raise."""
        if exchange.may_have_committed:
            if not isinstance(error, CallAbortedError):
                error = CallAbortedError(error, str(error), None)
            exchange.interrupts += signals.run_handlers()
            error.interrupt = next(iter(exchange.interrupts), error.interrupt)
        if isinstance(error, CallAbortedError):
            self._mark_inconsistent()
        elif self._failure is None:
            exchange.interrupts = exchange.interrupts or [error]  # the next interrupt ends the wait
            if not exchange.abandon(signals, GRACE):
                self._mark_inconsistent(None if exchange.lost else exchange)
        return error

    def _mark_inconsistent(self, unfinished: Exchange | None = None) -> None:
        """Mark the shards as inconsistent. They must be opened again or, in memory, end the unfinished call."""
        self.is_inconsistent = True
        self.openings += 1
        if any(info.folder is None for info in self._shards):
            self._unfinished = unfinished
            if unfinished is None:
                self._failure = self._failure or "a shard failed, and its state was only in memory"

    def _finish(self, unfinished: Exchange) -> None:
        """Wait until all shards have ended an aborted call."""
        with self._calling() as signals:
            unfinished.abandon(signals, math.inf)
            if not self.placement.waiting:
                self._unfinished, self.is_inconsistent = None, False
                if unfinished.lost:
                    self._mark_inconsistent()
            if len(unfinished.interrupts) > 1:
                raise unfinished.interrupts.pop()

    def _recover_from(self, aborted: CallAbortedError) -> None:
        """Recover the shards; then raise the exception of a signal handler, if one occurred."""
        try:
            self._recover()
        finally:
            if aborted.interrupt is not None:
                raise aborted.interrupt

    def _recover(self) -> None:
        """Open all shards again, or wait for them. After an interrupt, the next call repeats this."""
        if self._unfinished is not None:
            self._finish(self._unfinished)
            return
        if self._failure is not None:
            self.placement.drop()
            return
        try:
            self.open()
        except Exception as error:
            self._failure = f"opening them again failed: {error}; fix the cause, then call Server.load"
            raise


def shared_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are the same in all shards."""
    return {name: value for name, value in settings.items() if name not in ("layout", "nonnegative")}


class GatheredVectors:
    """The ``SentVectors`` of shards. A vector is gathered when it is first used.

    Args:
        slices: ``sent``, or None if other processes cannot read slices.
        starts: see ``SentVectors``.
    """

    def __init__(self, coordinator: Coordinator, sent: SentSlices, slices: SentSlices | None, starts: Any) -> None:
        self._coordinator, self._opening = coordinator, coordinator.openings
        self._sent, self.slices, self.starts = sent, slices, starts

    @cached_property
    def x(self) -> F32:
        """The model that clients receive; see ``SentVectors``. Cost: reads and writes 4 n bytes."""
        return self._gather(self._sent.x)

    @cached_property
    def x_prev(self) -> F32 | None:
        """See ``SentVectors``."""
        return None if self._sent.x_prev is None else self._gather(self._sent.x_prev)

    def offset(self, client: ClientId, out: Any) -> Any:
        """See ``SentVectors``."""
        return into(self._gather(self._sent.offset(client)), out)

    def on_host(self) -> Self:
        """Return this object, since shards are on CPUs; see ``SentVectors``."""
        return self

    def facts(self) -> dict[str, Any]:
        """See ``SentVectors``."""
        return {"n": self._sent.ranges[-1][1], "shards": len(self._sent.ranges)}

    def _gather(self, slices: Sequence[Any]) -> F32:
        vector: F32 = self._coordinator.joined(self._coordinator.read(slices, self._opening))
        return vector
