"""One call of all shards: the messages, the answers to what they ask each other, and a wait that can be broken off."""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from fedcore import kernels
from fedcore.cluster.placement import Answer, Lost, Placement, Referring, ShardLostError
from fedcore.cluster.strand import Asks, LeftAloneError, Raised, Returned
from fedcore.errors import ClusterError
from fedcore.interrupts import uninterrupted

LOGGER = logging.getLogger("fedcore.cluster")
TICK = 0.25
"""Seconds between two looks at signals and clocks."""
HELD = 1.0
"""Seconds for which a signal waits for a call to end: most calls are over by then, and no handler runs within them."""
LATE = 10.0
"""Seconds until the log names the shards that have not answered."""
LATE_AGAIN = 60.0
"""Seconds until it names them again."""


class BrokenOffError(Exception):
    """A call of all shards was broken off when some may have changed already, or with a shard that is lost.

    Attributes:
        error: what to raise if the change did not happen.
        why: the same without what follows from that.
        found: the result of a shard whose call is over; None if there is none.
        stop: the error of a signal's handler, to raise once the shards are together again; None if there is none.
    """

    def __init__(
        self, error: BaseException, why: str, found: Returned | None, stop: BaseException | None = None
    ) -> None:
        super().__init__(str(error))
        self.error, self.why, self.found, self.stop = error, why, found, stop


class Exchange:
    """One call of a method of all shards.

    A signal's handler runs once the call is over. If the call takes longer than HELD, it runs during the wait; what it
    raises breaks the call off, as long as no shard may have committed. From then on it takes two such signals.

    Args:
        signals: those that are held back meanwhile.

    Attributes:
        may_differ: whether a shard may have committed.
        stops: what handlers of signals have raised.
    """

    def __init__(self, placement: Placement, shards: int, name: str, signals: uninterrupted) -> None:
        self._placement, self._shards, self._name, self._signals = placement, shards, name, signals
        self._replies: dict[int, Answer] = {}
        self.may_differ = False
        self.stops: list[BaseException] = []

    def call(self, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call the method; return the result of each shard.

        Raises:
            BrokenOffError: a shard is lost, or some may have changed.
            BaseException: what a shard or a signal's handler raised, where none has changed.
        """
        self._placement.begin(self._name, arguments)
        self._wait()
        while asking := self._asking():
            answers, ready = self._answers(asking)
            self.may_differ |= ready
            self._answer(answers)
            self._wait()
        return self._results()

    def read(self, fetched: Sequence[Any]) -> list[Any]:
        """Read the results that ``fetch`` gave references to, as ``call`` does."""
        cast(Referring, self._placement).read(fetched)
        self._wait()
        return self._results()

    def leave(self, signals: uninterrupted, seconds: float) -> bool:
        """Have every shard give the call up; return whether each has within so many seconds, and is there.

        A second error of a signal's handler ends the wait.
        """
        until = time.monotonic() + seconds
        self._leave_alone()
        if self._placement.waiting:
            self._replies |= self._placement.wait(TICK)
            self._leave_alone()
        if waiting := list(self._placement.waiting):
            LOGGER.warning("%s: it is broken off, but shards %s are still in it", self._name, waiting)
        while self._placement.waiting:
            if len(self.stops) > 1 or time.monotonic() > until:
                return False
            self._replies |= self._placement.wait(TICK)
            self._leave_alone()
            self.stops += signals.obeyed()
        return not self.lost

    @property
    def lost(self) -> dict[int, Exception]:
        """The errors of the shards that are lost, by their numbers."""
        return {k: reply.error for k, reply in sorted(self._replies.items()) if isinstance(reply, Lost)}

    def _wait(self) -> None:
        """Wait until every shard asks something or is through."""
        began = time.monotonic()
        late = began + LATE
        while self._placement.waiting:
            self._replies |= self._placement.wait(TICK)
            now, waiting = time.monotonic(), list(self._placement.waiting)
            if waiting and now > late:
                late = now + LATE_AGAIN
                LOGGER.warning("%s: shards %s have not answered for %.0f s", self._name, waiting, now - began)
            if waiting and now > began + HELD:
                self._stop()
        if len(self._replies) < self._shards:
            raise ClusterError(
                f"{self._name}: expected shards until it is over, got a signal's handler that closed them"
            )

    def _stop(self) -> None:
        """Obey signals; raise what their handlers raise, but after a commit's beginning only for the second time."""
        before = len(self.stops)
        self.stops += self._signals.obeyed()
        if not self.may_differ and self.stops:
            raise self.stops[0]
        if len(self.stops) > 1:
            raise BrokenOffError(self.stops[0], "it was interrupted twice", self._through(), self.stops[0])
        if len(self.stops) > before:
            LOGGER.warning(
                "%s: the interrupt waits until all shards have committed; a second one ends the shards %s",
                self._name,
                list(self._placement.waiting),
            )

    def _leave_alone(self) -> None:
        self._answer({k: LeftAloneError("the call is broken off") for k in self._asking()})

    def _asking(self) -> dict[int, Asks]:
        return {k: reply for k, reply in sorted(self._replies.items()) if isinstance(reply, Asks)}

    def _answer(self, answers: Mapping[int, Any]) -> None:
        for k in answers:
            del self._replies[k]
        self._placement.answer(answers)

    def _answers(self, asking: Mapping[int, Asks]) -> tuple[dict[int, Any], bool]:
        """The answer to each that asks, and whether they may commit now."""
        questions = {one.what for one in asking.values()}
        if len(asking) < self._shards or len(questions) > 1:
            return {k: LeftAloneError("another shard has failed") for k in asking}, False
        (what,) = questions
        answer = ANSWERS[what]([one.told for one in asking.values()])
        return dict.fromkeys(asking, answer), what == "ready"

    def _through(self) -> Returned | None:
        """The result of the first shard that is through."""
        replies = sorted(self._replies.items())
        return next((reply for _, reply in replies if isinstance(reply, Returned)), None)

    def _results(self) -> list[Any]:
        replies = [reply for _, reply in sorted(self._replies.items())]
        raised = [reply.error for reply in replies if isinstance(reply, Raised)]
        errors = [error for error in raised if not isinstance(error, LeftAloneError)]
        if lost := self.lost:
            first = next(iter(lost.values()))
            why = f"expected an answer of every shard, got none of {list(lost)}, which ended: {first}"
            unchanged = ShardLostError(f"{self._name}: {why}; nothing has changed, and it may be done again")
            raise BrokenOffError(errors[0] if errors else unchanged, why, self._through())
        if raised:
            error = errors[0] if errors else ClusterError(f"{self._name}: expected shards that ask alike, got others")
            if self.may_differ:
                raise BrokenOffError(error, str(error), self._through())
            raise error
        return [reply.value for reply in replies if isinstance(reply, Returned)]


def _added(told: Sequence[Sequence[Any]]) -> list[Any]:
    """The squared lengths of several sums: each from its blocks, shard by shard."""
    return [kernels.sum_of_partials(np.concatenate(partials)) for partials in zip(*told, strict=True)]


def _merged(told: Sequence[Sequence[str | None]]) -> list[str | None]:
    """The reasons of each update: what a client says wrongly is wrong everywhere, and buffers come before counters."""
    return [next((reason for reason in reversed(reasons) if reason), None) for reasons in zip(*told, strict=True)]


ANSWERS: dict[str, Any] = {"add": _added, "refusals": _merged, "agree": all, "ready": lambda told: None}
"""What shards ask, and the answer, of what all of them know."""
