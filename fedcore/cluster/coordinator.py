"""The coordinator: it sends each call to all shards and answers their questions. It never has a vector."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, wraps
from threading import RLock
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

import numpy as np

from fedcore import kernels
from fedcore.arrays import F32, copy_into
from fedcore.cluster.manifest import Range, ShardInfo
from fedcore.cluster.placement import Answer, Lost, Placement, Referring, ShardLostError
from fedcore.cluster.shard import AbandonedError, Question, Raised, Returned, ShardState, concatenate
from fedcore.errors import CheckpointError, ClusterError, StoreError
from fedcore.interrupts import uninterrupted
from fedcore.profiling import span
from fedcore.server.folder import Transactions
from fedcore.server.update import SentSlices
from fedcore.store import Durability
from fedcore.store.registry import ClientId

LOGGER = logging.getLogger("fedcore.cluster")
TICK = 0.25
"""Seconds between two checks of signals and clocks."""
HELD = 1.0
"""Seconds for which a signal waits for the end of a call. Most calls are shorter, and no handler runs within them."""
LATE = 10.0
"""Seconds until the log names the shards that have not answered."""
LATE_AGAIN = 60.0
"""Seconds until the log names them again."""
PATIENCE = 10.0
"""Seconds to wait for a folder whose process is being killed."""
GRACE = 2.0
"""Seconds that shards have to leave an aborted call before they are ended."""
MOST_TRIES = 4
"""Attempts to open all shards if one is lost each time: Ray may not know yet that a machine is lost."""

P = ParamSpec("P")
R = TypeVar("R")


class CallAbortedError(Exception):
    """A call of all shards was aborted after some may have committed, or since a shard was lost.

    Attributes:
        error: the error to raise if the change did not happen.
        reason: what happened, without advice.
        result: of a shard whose call has returned; None if there is none.
        interrupt: the error of a signal's handler, to raise after recovery; None if there is none.
    """

    def __init__(
        self, error: BaseException, reason: str, result: Returned | None, interrupt: BaseException | None = None
    ) -> None:
        super().__init__(str(error))
        self.error, self.reason, self.result, self.interrupt = error, reason, result, interrupt


class Exchange:
    """One call of a method of all shards: the messages, the answers to questions, and a wait that can be aborted.

    A signal's handler runs after the call. If the call takes longer than HELD, the handler runs during the wait. Its
    exception aborts the call if no shard may have committed; after that, a second one does.

    Args:
        signals: those that are held back meanwhile.

    Attributes:
        may_have_committed: whether a shard may have committed.
        interrupts: exceptions of signals' handlers.
    """

    def __init__(self, placement: Placement, shards: int, name: str, signals: uninterrupted) -> None:
        self._placement, self._shards, self._name, self._signals = placement, shards, name, signals
        self._replies: dict[int, Answer] = {}
        self.may_have_committed = False
        self.interrupts: list[BaseException] = []

    def call(self, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call the method; return the result of each shard.

        Raises:
            CallAbortedError: a shard is lost, or some may have changed.
            BaseException: an error of a shard or of a signal's handler; no shard has changed.
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
        """Read the results of references, with the errors of ``call``."""
        cast(Referring, self._placement).read(references)
        self._wait()
        return self._results()

    def abandon(self, signals: uninterrupted, seconds: float) -> bool:
        """End the call in every shard; return whether each has left it within so many seconds, and none is lost.

        A second exception of a signal's handler ends the wait.
        """
        until = time.monotonic() + seconds
        self._abandon_questions()
        if self._placement.waiting:
            self._replies |= self._placement.wait(TICK)
            self._abandon_questions()
        if waiting := list(self._placement.waiting):
            LOGGER.warning("%s: the call was aborted, but shards %s are still in it", self._name, waiting)
        while self._placement.waiting:
            if len(self.interrupts) > 1 or time.monotonic() > until:
                return False
            self._replies |= self._placement.wait(TICK)
            self._abandon_questions()
            self.interrupts += signals.obeyed()
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
            raise ClusterError(f"{self._name}: a signal's handler closed the shards within the call")

    def _run_handlers(self) -> None:
        """Run signals' handlers; raise the first exception, or after a commit has begun only a second one."""
        before = len(self.interrupts)
        self.interrupts += self._signals.obeyed()
        if not self.may_have_committed and self.interrupts:
            raise self.interrupts[0]
        if len(self.interrupts) > 1:
            first = self.interrupts[0]
            raise CallAbortedError(first, "it was interrupted twice", self._first_result(), first)
        if len(self.interrupts) > before:
            LOGGER.warning(
                "%s: the interrupt waits until all shards have committed; a second one ends the shards %s",
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
        """The answer to each question, and whether the shards may commit now."""
        names = {one.name for one in questions.values()}
        if len(questions) < self._shards or len(names) > 1:
            return {k: AbandonedError("another shard has failed") for k in questions}, False
        (name,) = names
        answer = ANSWERS[name]([one.value for one in questions.values()])
        return dict.fromkeys(questions, answer), name == "ready"

    def _first_result(self) -> Returned | None:
        replies = sorted(self._replies.items())
        return next((reply for _, reply in replies if isinstance(reply, Returned)), None)

    def _results(self) -> list[Any]:
        replies = [reply for _, reply in sorted(self._replies.items())]
        raised = [reply.error for reply in replies if isinstance(reply, Raised)]
        errors = [error for error in raised if not isinstance(error, AbandonedError)]
        if lost := self.lost:
            reason = f"the shards {list(lost)} were lost: {next(iter(lost.values()))}"
            unchanged = ShardLostError(f"{self._name}: {reason}; nothing has changed; call it again")
            raise CallAbortedError(errors[0] if errors else unchanged, reason, self._first_result())
        if raised:
            error = errors[0] if errors else ClusterError(f"{self._name}: the shards asked different questions")
            if self.may_have_committed:
                raise CallAbortedError(error, str(error), self._first_result())
            raise error
        return [reply.value for reply in replies if isinstance(reply, Returned)]


def _add(values: Sequence[Sequence[Any]]) -> list[Any]:
    """The squared lengths of several sums: each from its blocks, in the order of the shards."""
    return [kernels.sum_of_partials(np.concatenate(partials)) for partials in zip(*values, strict=True)]


def _merge(values: Sequence[Sequence[str | None]]) -> list[str | None]:
    """The reasons to reject each update: those of claims are the same in all shards, and buffers precede counters."""
    return [next((reason for reason in reversed(reasons) if reason), None) for reasons in zip(*values, strict=True)]


ANSWERS: dict[str, Any] = {"add": _add, "refusals": _merge, "agree": all, "ready": lambda values: None}
"""The questions of shards, and the answer to each from the parts of all shards."""


def serialized(call: Callable[Concatenate["Coordinator", P], R]) -> Callable[Concatenate["Coordinator", P], R]:
    """Let one thread at a time call the shards, from its first message to their last answer."""

    @wraps(call)
    def calling(self: "Coordinator", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            return call(self, *args, **kwargs)

    return calling


class Coordinator:
    """Calls all shards together, answers their questions, and recovers them after a failure.

    A change has happened once the last shard's transaction is durable; there is no other record of it. Shards that are
    one transaction ahead roll it back.

    Args:
        placement: where the shards run.
        shards: their descriptions.
        durability: of their stores.
        given: the objects that ``Server.load`` was given again.
        check_manifest: raises an error if the manifest names other shards by now.

    Attributes:
        state: the numbers that all shards have alike.
        openings: how often the shards were opened, or were found to be inconsistent: what one opening gave is of no use
            in the next.
        settings: as the first shard's folder has them; None for a new server.
        is_inconsistent: whether shards may be in different states; the next call recovers them.
    """

    def __init__(
        self,
        placement: Placement,
        shards: Sequence[ShardInfo],
        durability: Durability,
        given: Mapping[str, Any],
        check_manifest: Callable[[], None],
    ) -> None:
        self.placement, self._shards, self._durability, self._given = placement, shards, durability, given
        self._check_manifest = check_manifest
        self.state, self.openings = ShardState(0, 0), 0
        self.settings: dict[str, Any] | None = None
        self.is_inconsistent, self._is_calling = False, False
        self._failure: str | None = None
        self._unfinished: Exchange | None = None  # an aborted call that shards may still be in
        self.lock = RLock()

    def __len__(self) -> int:
        """The number of shards."""
        return len(self._shards)

    @serialized
    def call(self, name: str, *shared: Any, each: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Call a method of all shards that is no transaction; return the result of each.

        Args:
            shared: arguments of every shard.
            each: further arguments of each shard.

        Raises:
            ClusterError: a shard is lost; all are opened again, and nothing has changed.
            Exception: an error of a shard.
        """
        self._require_shards()
        try:
            return self._call(name, shared, each)
        except CallAbortedError as aborted:
            self._recover_from(aborted)
            raise aborted.error from None

    @serialized
    def change(self, name: str, *shared: Any, each: Sequence[tuple[Any, ...]] | None = None, rounds: int = 0) -> Any:
        """Call a method of all shards that is one transaction of each; return the result of the first.

        Args:
            rounds: how many rounds it finishes.

        Raises:
            ClusterError: a shard is lost, and the change did not happen; or it happened, and its result is lost.
            Exception: an error of a shard; the change did not happen.
        """
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
                    f"{name}: it happened, and all shards are at one transaction, but its report is lost: "
                    f"{aborted.reason}"
                ) from None
            return aborted.result.value
        return results[0] if results else None

    @serialized
    def fetch(self, name: str, *arguments: Any) -> list[Any]:
        """The results of a method of each shard that asks and changes nothing, or references to them.

        Raises:
            ClusterError: the shards are closed.
            Exception: an error of a shard, here or where the reference is read.
        """
        if not self.placement.has_references:
            return self.call(name, *arguments)
        self._require_shards()
        with uninterrupted():  # which takes no time
            return cast(Referring, self.placement).fetch(name, *arguments)

    @serialized
    def read(self, fetched: Sequence[Any], opening: int) -> list[Any]:
        """The results that ``fetch`` returned, in this process.

        Args:
            opening: the value of ``openings`` at that time.

        Raises:
            ClusterError: a shard is lost; all are opened again, unless they were since, and nothing has changed.
            Exception: an error of a shard.
        """
        if not self.placement.has_references:
            return list(fetched)
        self._require_no_call()
        try:
            with uninterrupted() as signals:
                self._is_calling = True
                try:
                    return Exchange(self.placement, len(fetched), "fetch", signals).read(fetched)
                finally:
                    self._is_calling = False
        except CallAbortedError as aborted:
            if opening != self.openings:
                raise ClusterError("broadcast: its vectors were lost with a shard; make a new broadcast") from None
            self._mark_inconsistent()
            self._recover()
            raise aborted.error from None

    @serialized
    def make(self, *shared: Any, each: Sequence[tuple[Any, ...]]) -> None:
        """Make the shards of a new server: all of them, or none."""
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

    @serialized
    def open(self) -> None:
        """Open the shards' folders at one transaction: shards that are ahead roll one back.

        Each locks its folder before it reads it. If it is interrupted, it may be called again; if a shard is lost, it
        is repeated.

        Raises:
            CheckpointError: the shards are further apart than one transaction, or do not belong together.
            LockedError: another process has one.
            ClusterError: a shard is lost each time.
        """
        for left in reversed(range(MOST_TRIES)):
            try:
                self._open_once()
                return
            except ShardLostError as error:
                if not left:
                    raise
                LOGGER.info("a shard was lost while all were opened; they are opened again: %s", error)

    def _open_once(self) -> None:
        try:
            self.placement.make(self._shards)
            held = self._open_folders()
            to = common_transaction(held, self._shards)
            if ahead := [info.shard for one, info in zip(held, self._shards, strict=True) if one.last > to]:
                LOGGER.info("transaction %d never happened: shards %s of %d roll it back", to + 1, ahead, len(held))
            saved = self._call("resume", (to, self._given), None)
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
        """Lock the folders and read their transactions; check the manifest before any folder is changed."""
        try:
            held: list[Transactions] = self._call("open_folder", (self._durability, PATIENCE), None)
        except StoreError:
            self._check_manifest()  # its error says why a folder is missing
            raise
        self._check_manifest()
        return held

    @serialized
    def drop(self) -> None:
        """End the shards."""
        self._unfinished = None
        self.placement.drop()
        self._failure = self._failure or "the server is closed"

    def _require_shards(self) -> None:
        """Recover the shards if they are inconsistent; raise an error if that fails, or within another call."""
        self._require_no_call()
        if self.is_inconsistent and self._failure is None:
            self._recover()
        if self._failure is not None:
            raise ClusterError(f"server: it has no shards: {self._failure}")

    def _require_no_call(self) -> None:
        if self._is_calling:
            raise ClusterError("server: a signal's handler called it within another call; call it after that one")

    def _call(
        self, name: str, shared: Sequence[Any], each: Sequence[tuple[Any, ...]] | None, after: ShardState | None = None
    ) -> list[Any]:
        """Call all shards; ``after`` is the state once they have returned."""
        arguments = [(*shared, *own) for own in (each or [()] * len(self))]
        try:
            with uninterrupted() as signals:
                exchange = Exchange(self.placement, len(self), name, signals)
                try:
                    self._is_calling = True
                    with span("gather"):
                        results = exchange.call(arguments)
                    self.state = after or self.state
                except BaseException as error:
                    raise self._abort(exchange, signals, error) from None
                finally:
                    self._is_calling = False
                if exchange.interrupts:
                    raise exchange.interrupts[0]
        except CallAbortedError:
            raise
        except BaseException:
            if self.is_inconsistent and self._unfinished is None:
                self.placement.drop()
            raise
        return results

    def _abort(self, exchange: Exchange, signals: uninterrupted, error: BaseException) -> BaseException:
        """End a failed call in all shards, or mark them as inconsistent; return the error to raise."""
        if exchange.may_have_committed:
            if not isinstance(error, CallAbortedError):
                error = CallAbortedError(error, str(error), None)
            exchange.interrupts += signals.obeyed()
            error.interrupt = next(iter(exchange.interrupts), error.interrupt)
        if isinstance(error, CallAbortedError):
            self._mark_inconsistent()
        elif self._failure is None:
            exchange.interrupts = exchange.interrupts or [error]  # the next one ends the wait
            if not exchange.abandon(signals, GRACE):
                self._mark_inconsistent(None if exchange.lost else exchange)
        return error

    def _mark_inconsistent(self, unfinished: Exchange | None = None) -> None:
        """Mark the shards: they must be opened again or, in memory, leave the unfinished call."""
        self.is_inconsistent = True
        self.openings += 1
        if any(info.folder is None for info in self._shards):
            self._unfinished = unfinished
            if unfinished is None:
                self._failure = self._failure or "a shard failed, and its state was only in memory"

    def _finish(self, unfinished: Exchange) -> None:
        """Wait until all shards have left an aborted call."""
        with uninterrupted() as signals:
            self._is_calling = True
            try:
                unfinished.abandon(signals, math.inf)
            finally:
                self._is_calling = False
            if not self.placement.waiting:
                self._unfinished, self.is_inconsistent = None, False
                if unfinished.lost:
                    self._mark_inconsistent()
            if len(unfinished.interrupts) > 1:
                raise unfinished.interrupts.pop()

    def _recover_from(self, aborted: CallAbortedError) -> None:
        """Recover; then raise the exception of a signal's handler, if there is one."""
        try:
            self._recover()
        finally:
            if aborted.interrupt is not None:
                raise aborted.interrupt

    def _recover(self) -> None:
        """Open all shards again, or wait for them. If it is interrupted, the next call does it."""
        if self._unfinished is not None:
            self._finish(self._unfinished)
            return
        if self._failure is not None:
            self.placement.drop()
            return
        try:
            self.open()
        except Exception as error:
            self._failure = f"they could not be opened again: {error}; call Server.load once they can be"
            raise


def shared_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that all shards have alike."""
    return {name: value for name, value in settings.items() if name not in ("layout", "nonnegative")}


def common_transaction(held: Sequence[Transactions], shards: Sequence[ShardInfo]) -> int:
    """The transaction that all shards can have: the least of their last ones.

    Raises:
        CheckpointError: one is more than a transaction ahead, or cannot roll back.
    """
    to = min(one.last for one in held)
    for one, info in zip(held, shards, strict=True):
        if one.last != to and one.before != to:
            before = "nothing" if one.before is None else one.before
            raise CheckpointError(
                f"{info.folder}: it holds transaction {one.last} and {before} before it, but another shard is at "
                f"transaction {to}; one of them belongs to another run or an older copy"
            )
    return to


class GatheredVectors:
    """The ``SentVectors`` of shards. A whole vector is put together when it is asked for.

    Args:
        x, x_prev: of each shard, from ``Coordinator.fetch``.
        offset: the slices of a client's offset.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        ranges: Sequence[Range],
        x: Sequence[Any],
        x_prev: Sequence[Any] | None,
        offset: Callable[[ClientId], Sequence[Any]],
    ) -> None:
        self._coordinator, self._opening = coordinator, coordinator.openings
        self._sent = SentSlices(ranges, x, x_prev, offset)

    @cached_property
    def x(self) -> F32:
        """See ``SentVectors``. Cost: 4 n bytes, read and written."""
        return self._gather(self._sent.x)

    @cached_property
    def x_prev(self) -> F32 | None:
        """See ``SentVectors``."""
        return None if self._sent.x_prev is None else self._gather(self._sent.x_prev)

    @property
    def slices(self) -> SentSlices | None:
        """See ``SentVectors``; None if other processes cannot read slices."""
        return self._sent if self._coordinator.placement.has_references else None

    def offset(self, client: ClientId, out: Any) -> Any:
        """See ``SentVectors``."""
        offset = self._gather(self._sent.offset(client))
        if out is None:
            return offset
        copy_into(out, offset)
        return out

    def on_host(self) -> Self:
        """See ``SentVectors``: shards are on CPUs."""
        return self

    def facts(self) -> dict[str, Any]:
        """See ``SentVectors``."""
        return {"n": self._sent.ranges[-1][1], "shards": len(self._sent.ranges)}

    def _gather(self, slices: Sequence[Any]) -> F32:
        vector: F32 = concatenate(self._coordinator.read(slices, self._opening))
        return vector
