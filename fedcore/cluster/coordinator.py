"""The coordinator of a cluster's shards: it sees lengths and decisions, and never a vector."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from threading import RLock
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from fedcore.cluster.exchange import BrokenOffError, Exchange
from fedcore.cluster.placement import Placement, Referring, ShardLostError
from fedcore.cluster.shard import Known, Place
from fedcore.errors import CheckpointError, ClusterError, StoreError
from fedcore.interrupts import uninterrupted
from fedcore.server.transactions import Transactions
from fedcore.store import Durability

P = ParamSpec("P")
R = TypeVar("R")
LOGGER = logging.getLogger("fedcore.cluster")
PATIENCE = 10.0
"""Seconds that a folder is waited for whose process is being killed."""
GRACE = 2.0
"""Seconds for which shards may go on with a call that is broken off, before they are ended."""
MOST_TRIES = 4
"""Times that shards are opened, if one is lost each time: a machine that is gone may not be known to be yet."""


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
        openings: how often the shards' folders were opened, or marked as apart.
        is_apart: whether the shards were ended, differ, or are still in a call: the next call brings them together.
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
        self.is_apart, self._is_calling = False, False
        self._broken: str | None = None
        self._left: Exchange | None = None  # the call that shards may still be in, though it was broken off
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
        self._require_shards()
        try:
            return self._call(name, shared, each)
        except BrokenOffError as broken:
            self._recover(broken)
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
        self._require_shards()
        due = Known(self.known.round_number + rounds, self.known.transactions + 1)
        try:
            found = self._call(name, shared, each, due)
        except BrokenOffError as broken:
            self._recover(broken)
            if self.known != due:
                raise broken.error from None
            if broken.found is None:
                raise ClusterError(
                    f"{name}: expected a shard to report, got none: it happened, and all shards are together again, "
                    f"but what is known of it is their state alone: {broken.why}"
                ) from None
            return broken.found.value
        return found[0] if found else None

    @alone
    def fetch(self, name: str, *arguments: Any) -> list[Any]:
        """The results of a method of each shard that asks nothing and changes nothing, or references to them.

        Raises:
            ClusterError: there are no shards any more.
            Exception: what a shard raised, here or where the reference is read.
        """
        if not self.placement.refers:
            return self.call(name, *arguments)
        self._require_shards()
        with uninterrupted():  # which takes no time
            return cast(Referring, self.placement).fetch(name, *arguments)

    @alone
    def read(self, fetched: Sequence[Any], opening: int) -> list[Any]:
        """The results that ``fetch`` gave, here.

        Args:
            opening: what ``openings`` was then.

        Raises:
            ClusterError: a shard is lost; all are opened again, unless they were since, and were changed by nothing.
            Exception: what a shard raised.
        """
        if not self.placement.refers:
            return list(fetched)
        self._require_no_call()
        try:
            with uninterrupted() as signals:
                self._is_calling = True
                try:
                    return Exchange(self.placement, len(fetched), "fetch", signals).read(fetched)
                finally:
                    self._is_calling = False
        except BrokenOffError as broken:
            if opening != self.openings:
                raise ClusterError(
                    "broadcast: expected one whose vectors are still there, got one from before a shard was lost: "
                    "ask for another"
                ) from None
            self._part()
            self._come_together()
            raise broken.error from None

    @alone
    def make(self, *shared: Any, each: Sequence[tuple[Any, ...]]) -> None:
        """Make the shards of a new server; if one cannot be made, none is."""
        try:
            self.placement.make(self._places)
            try:
                self._call("make", shared, each)
            except BaseException:
                if self._left is None:
                    with suppress(Exception):  # one that is lost cannot delete anything
                        self._call("unmake", (), None)
                raise
        except BaseException as error:
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
        self.is_apart = False

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
        self._left = None
        self.placement.drop()
        self._broken = self._broken or "it is closed"

    def _require_shards(self) -> None:
        """Bring the shards together if they are apart; raise where that cannot be, or within another call."""
        self._require_no_call()
        if self.is_apart and self._broken is None:
            self._come_together()
        if self._broken is not None:
            raise ClusterError(f"server: expected one with all its shards, got none of them: {self._broken}")

    def _require_no_call(self) -> None:
        if self._is_calling:
            raise ClusterError(
                "server: expected one call at a time, got one from within another, as a signal's handler makes it: "
                "make it when that is over"
            )

    def _call(
        self, name: str, shared: Sequence[Any], each: Sequence[tuple[Any, ...]] | None, due: Known | None = None
    ) -> list[Any]:
        """Call all shards; ``due`` is known once they have returned."""
        arguments = [(*shared, *own) for own in (each or [()] * len(self))]
        try:
            with uninterrupted() as signals:
                exchange = Exchange(self.placement, len(self), name, signals)
                try:
                    self._is_calling = True
                    found = exchange.call(arguments)
                    self.known = due or self.known
                except BaseException as error:
                    raise self._broken_off(exchange, signals, error) from None
                finally:
                    self._is_calling = False
                if exchange.stops:
                    raise exchange.stops[0]
        except BrokenOffError:
            raise
        except BaseException:
            if self.is_apart and self._left is None:
                self.placement.drop()
            raise
        return found

    def _broken_off(self, exchange: Exchange, signals: uninterrupted, error: BaseException) -> BaseException:
        """Have all shards leave a call that has failed, or mark them as apart; return what is to be raised."""
        if exchange.may_differ:
            if not isinstance(error, BrokenOffError):
                error = BrokenOffError(error, str(error), None)
            exchange.stops += signals.obeyed()
            error.stop = next(iter(exchange.stops), error.stop)
        if isinstance(error, BrokenOffError):
            self._part()
        elif self._broken is None:
            exchange.stops = exchange.stops or [error]  # the next one ends the wait
            if not exchange.leave(signals, GRACE):
                self._part(None if exchange.lost else exchange)
        return error

    def _part(self, left: Exchange | None = None) -> None:
        """Mark the shards as apart: to be opened again, or, without folders, to leave the call that they are in."""
        self.is_apart = True
        self.openings += 1
        if any(place.folder is None for place in self._places):
            self._left = left
            if left is None:
                self._broken = self._broken or "a shard failed whose state was in memory alone"

    def _settle(self, left: Exchange) -> None:
        """Wait until all shards have left a call that was broken off."""
        with uninterrupted() as signals:
            self._is_calling = True
            try:
                left.leave(signals, math.inf)
            finally:
                self._is_calling = False
            if not self.placement.waiting:
                self._left, self.is_apart = None, False
                if left.lost:
                    self._part()
            if len(left.stops) > 1:
                raise left.stops.pop()

    def _recover(self, broken: BrokenOffError) -> None:
        """Open all shards again; then raise what a signal's handler has raised."""
        try:
            self._come_together()
        finally:
            if broken.stop is not None:
                raise broken.stop

    def _come_together(self) -> None:
        """Open all shards again, after a failure in which some may have changed, or wait for them.

        If it is interrupted, the next call does it.
        """
        if self._left is not None:
            self._settle(self._left)
            return
        if self._broken is not None:
            self.placement.drop()
            return
        try:
            self.open()
        except Exception as error:
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
