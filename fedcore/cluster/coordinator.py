"""The coordinator of a cluster's shards: it sees lengths and decisions, and never a vector."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from threading import RLock
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from fedcore import kernels
from fedcore.cluster.placement import Answer, Lost, Placement, ShardLostError
from fedcore.cluster.shard import Known, Place
from fedcore.cluster.strand import Asks, LeftAloneError, Raised, Returned
from fedcore.errors import CheckpointError, ClusterError, StoreError
from fedcore.interrupts import uninterrupted
from fedcore.server.transactions import Transactions
from fedcore.store import Durability

P = ParamSpec("P")
R = TypeVar("R")
LOGGER = logging.getLogger("fedcore.cluster")
PATIENCE = 10.0
"""Seconds that a folder is waited for whose process is being killed."""
MOST_TRIES = 4
"""Times that shards are opened, if one is lost each time: a machine that is gone may not be known to be yet."""


class BrokenOffError(Exception):
    """A call of all shards was broken off when some may have changed already, or with a shard that is lost.

    Attributes:
        error: what the caller is to hear, if the change did not happen.
        why: the same without what follows from that.
        found: what a shard returned that was through; None if none was.
    """

    def __init__(self, error: BaseException, why: str, found: Returned | None) -> None:
        super().__init__(str(error))
        self.error, self.why, self.found = error, why, found


def alone(call: Callable[Concatenate["Coordinator", P], R]) -> Callable[Concatenate["Coordinator", P], R]:
    """Have one thread at a time call the shards, from its first message to their last answer."""

    @wraps(call)
    def calling(self: "Coordinator", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.turn:
            return call(self, *args, **kwargs)

    return calling


class Coordinator:
    """Calls all shards at once, answers what they ask each other, and brings them together after a failure.

    A change happened when the last shard's transaction is durable: nothing else is written of it anywhere. Shards that
    are a transaction ahead take it back.

    Args:
        places: the shards'.
        durability: of their stores.
        still: raises where these are no longer the cluster's shards, which they may cease to be while nobody has them.
        given: what the caller said of a server's own code, for shards that come back.

    Attributes:
        known: the numbers that all shards have alike.
        openings: how often the shards' folders were opened.
        settings: as the folders have them, once they are opened.
        turn: of the thread that calls them.
    """

    def __init__(
        self,
        placement: Placement,
        places: Sequence[Place],
        durability: Durability,
        given: Mapping[str, Any],
        still: Callable[[], None],
    ) -> None:
        self._still = still
        self.placement, self._places, self._durability, self._given = placement, places, durability, given
        self.known, self.openings = Known(0, 0), 0
        self.settings: dict[str, Any] | None = None
        self._broken: str | None = None
        self.turn = RLock()

    def __len__(self) -> int:
        """The number of shards."""
        return len(self._places)

    @alone
    def call(self, name: str, *shared: Any, each: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Call a method of all shards that changes nothing that counts; returns what each does.

        Args:
            shared: arguments that all are given.
            each: further ones of each.

        Raises:
            ClusterError: a shard is lost; all are opened again, and were changed by nothing.
            Exception: what a shard raised.
        """
        try:
            return self._call(name, shared, each)
        except BrokenOffError as broken:
            self._come_together()
            raise broken.error from None

    @alone
    def change(self, name: str, *shared: Any, each: Sequence[tuple[Any, ...]] | None = None, rounds: int = 0) -> Any:
        """Call a method of all shards that is one transaction of each; returns what the first does.

        Args:
            rounds: how many rounds are finished by it.

        Raises:
            ClusterError: a shard is lost, and it never happened; or it did, and nobody knows what it returned.
            Exception: what a shard raised: it never happened.
        """
        due = Known(self.known.round_number + rounds, self.known.transactions + 1)
        try:
            found = self._call(name, shared, each)
        except BrokenOffError as broken:
            self._come_together()
            if self.known != due:
                raise broken.error from None
            if broken.found is None:
                raise ClusterError(
                    f"{name}: expected a shard to report, got none: it happened, and all shards are together again, "
                    f"but what is known of it is their state alone: {broken.why}"
                ) from None
            return broken.found.value
        self.known = due
        return found[0] if found else None

    @alone
    def fetch(self, name: str, *arguments: Any) -> list[Any]:
        """The results of a method of each shard that asks nothing and changes nothing, or references to them.

        Raises:
            ClusterError: there are no shards any more.
            Exception: what a shard raised, here or where the reference is read.
        """
        self._require_shards()
        with uninterrupted():
            return self.placement.fetch(name, *arguments)

    @alone
    def read(self, fetched: Sequence[Any], opening: int) -> list[Any]:
        """The results that ``fetch`` gave, here.

        Args:
            opening: what ``openings`` was then.

        Raises:
            ClusterError: a shard is lost; all are opened again, unless they were since, and were changed by nothing.
            Exception: what a shard raised.
        """
        try:
            with uninterrupted():
                return self._results("fetch", self.placement.read(fetched), False)
        except BrokenOffError as broken:
            if opening != self.openings:
                raise ClusterError(
                    "broadcast: expected one whose vectors are still there, got one from before a shard was lost: "
                    "ask for another"
                ) from None
            self._come_together()
            raise broken.error from None

    @alone
    def make(self, *shared: Any, each: Sequence[tuple[Any, ...]]) -> None:
        """Make the shards of a new server; if one cannot be made, none is."""
        self.placement.make(self._places)
        try:
            self._call("make", shared, each)
        except BaseException as error:
            with suppress(Exception):  # one that is lost cannot delete anything
                self._call("unmake", (), None)
            self.placement.drop()
            raise (error.error if isinstance(error, BrokenOffError) else error) from None

    @alone
    def open(self) -> None:
        """Open the shards' folders, at one transaction: those that are ahead take one back.

        Each locks its folder before it is looked at. It may be interrupted at any point, and be done again; where a
        shard is lost meanwhile, it is.

        Raises:
            CheckpointError: they are further apart than one transaction, or are not each other's.
            LockedError: another process has one.
            ClusterError: a shard is lost, again and again.
        """
        for left in reversed(range(MOST_TRIES)):
            try:
                self._open_once()
                return
            except ShardLostError as error:
                if not left:
                    raise
                LOGGER.info("a shard is lost while all are opened, which is done again: %s", error)

    def _open_once(self) -> None:
        try:
            self.placement.make(self._places)
            held = self._looked()
            to = least(held, self._places)
            if ahead := [place.shard for one, place in zip(held, self._places, strict=True) if one.last > to]:
                LOGGER.info("transaction %d never happened: shards %s of %d take it back", to + 1, ahead, len(held))
            found = self._call("go_on", (to, self._given), None)
            known = set(self._call("known", (), None))
        except BaseException as error:
            self.placement.drop()
            raise (error.error if isinstance(error, BrokenOffError) else error) from None
        if len(known) != 1 or any(common(settings) != common(found[0]) for settings in found):
            self.placement.drop()
            raise CheckpointError("shards: expected one server's, got ones of different rounds or settings")
        self.settings, (self.known,) = found[0], known
        self.openings += 1

    def _looked(self) -> list[Transactions]:
        """Lock the folders and look at them; whether they are the cluster's is asked before any is changed."""
        try:
            held: list[Transactions] = self._call("look", (self._durability, PATIENCE), None)
        except StoreError:
            self._still()  # which says why one is not there
            raise
        self._still()
        return held

    @alone
    def drop(self) -> None:
        """End the shards."""
        self.placement.drop()
        self._broken = self._broken or "it is closed"

    def _require_shards(self) -> None:
        if self._broken is not None:
            raise ClusterError(f"server: expected one with all its shards, got none of them: {self._broken}")

    def _call(self, name: str, shared: Sequence[Any], each: Sequence[tuple[Any, ...]] | None) -> list[Any]:
        self._require_shards()
        arguments = [(*shared, *own) for own in (each or [()] * len(self))]
        with uninterrupted():
            replies = self.placement.call(name, arguments)
            may_differ = False
            while asking := {k: reply for k, reply in enumerate(replies) if isinstance(reply, Asks)}:
                answers, ready = self._answers(asking)
                may_differ |= ready
                for k, reply in self.placement.answer(answers).items():
                    replies[k] = reply
            return self._results(name, replies, may_differ)

    def _answers(self, asking: Mapping[int, Asks]) -> tuple[dict[int, Any], bool]:
        """The answer to each that asks, and whether they may commit now."""
        questions = {one.what for one in asking.values()}
        if len(asking) < len(self) or len(questions) > 1:
            return {k: LeftAloneError("another shard has failed") for k in asking}, False
        (what,) = questions
        answer = ANSWERS[what]([asking[k].told for k in sorted(asking)])
        return dict.fromkeys(asking, answer), what == "ready"

    def _results(self, name: str, replies: Sequence[Answer], may_differ: bool) -> list[Any]:
        raised = [reply.error for reply in replies if isinstance(reply, Raised)]
        lost = [k for k, reply in enumerate(replies) if isinstance(reply, Lost)]
        errors = [error for error in raised if not isinstance(error, LeftAloneError)]
        through = next((reply for reply in replies if isinstance(reply, Returned)), None)
        if lost:
            first = replies[lost[0]]
            why = f"expected an answer of every shard, got none of {lost}, which ended: {first.error}"  # type: ignore[union-attr]
            unchanged = ShardLostError(f"{name}: {why}; nothing has changed, and it may be done again")
            raise BrokenOffError(errors[0] if errors else unchanged, why, through)
        if raised:
            error = errors[0] if errors else ClusterError(f"{name}: expected shards that ask alike, got others")
            if may_differ:
                raise BrokenOffError(error, str(error), through)
            raise error
        return [reply.value for reply in replies if isinstance(reply, Returned)]

    def _come_together(self) -> None:
        """Open all shards again after a failure in which some may have changed."""
        if any(place.folder is None for place in self._places):
            self.drop()
            self._broken = "a shard failed whose state was in memory alone"
            return
        try:
            self.open()
        except BaseException as error:
            self._broken = f"they could not be opened again: {error}; Server.load does it, once they can be"
            raise


def common(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the settings that all shards have alike."""
    return {name: value for name, value in settings.items() if name not in ("layout", "nonnegative")}


def least(held: Sequence[Transactions], places: Sequence[Place]) -> int:
    """The transaction at which all shards can be: the least of their last ones.

    Raises:
        CheckpointError: one is more than a transaction ahead, or cannot go back.
    """
    to = min(one.last for one in held)
    for one, place in zip(held, places, strict=True):
        if one.last != to and one.before != to:
            raise CheckpointError(
                f"{place.folder}: expected transaction {to}, as another shard has, or the next and what it replaced, "
                f"got {one.last} and {'nothing' if one.before is None else one.before} before it: one of them is not "
                "of this run, or of an older copy"
            )
    return to


def _added(told: Sequence[Sequence[Any]]) -> list[Any]:
    """The squared lengths of several sums: each from its blocks, shard by shard."""
    return [kernels.sum_of_partials(np.concatenate(partials)) for partials in zip(*told, strict=True)]


def _merged(told: Sequence[Sequence[str | None]]) -> list[str | None]:
    """The reasons of each update: what a client says wrongly is wrong everywhere, and buffers come before counters."""
    return [next((reason for reason in reversed(reasons) if reason), None) for reasons in zip(*told, strict=True)]


ANSWERS: dict[str, Any] = {"add": _added, "refusals": _merged, "agree": all, "ready": lambda told: None}
"""What shards ask, and the answer, of what all of them know."""
