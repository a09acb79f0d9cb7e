"""An open round of a cluster: updates are cut, go to the shards some at a time, and are forgotten."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Lock, RLock
from typing import Any

from fedcore.clients import ClientId, Registry
from fedcore.cluster.coordinator import Coordinator
from fedcore.cluster.ranges import Range
from fedcore.cluster.sent import Said
from fedcore.cluster.shard import Finished
from fedcore.errors import ClusterError, FedcoreError, RangeError
from fedcore.memory import empty
from fedcore.native import core
from fedcore.server.call_guard import one_call
from fedcore.server.report import OnReport, RoundReport, tell
from fedcore.server.round import LOGGER
from fedcore.server.round_face import SECOND, RoundFace
from fedcore.server.settings import Settings
from fedcore.server.slices import Slices
from fedcore.server.update import Kind, Update, as_vector, bytes_of, read_counters, read_vector
from fedcore.typing import F32


class Round(RoundFace):
    """An open round of a ``fedcore.cluster.Server``; get it from ``open_round``, and use it as a context manager.

    It is ``fedcore.Round`` in all that it does. ``add`` cuts a vector that is here, and sends the slices to the shards;
    ``Slices`` in a vector's place, as engines and ``add_slices`` give them, are sent on, and never come here. A model
    by names is put together first, so that its length is that of a flat vector to the last bit.

    Attributes:
        report: the RoundReport once the round is finished, else None.
        is_open: whether updates can still come in.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        settings: Settings,
        ranges: Sequence[Range],
        registry: Registry,
        *,
        fold: int,
        may_hold: bool,
        over: Callable[[], None],
        on_report: OnReport | None = None,
    ) -> None:
        self.report: RoundReport | None = None
        self.is_open = True
        self._coordinator, self._settings, self._ranges, self._registry = coordinator, settings, ranges, registry
        self._fold_at, self._may_hold, self._over = fold, may_hold, over
        self._on_report = on_report
        self._number, self._opening = coordinator.known.round_number, coordinator.openings
        self._turn, self._inside, self._is_ending = RLock(), Lock(), False
        self._held: list[tuple[Said, list[list[Any]]]] = []
        self._known: set[ClientId] = set()
        self._refused: list[tuple[ClientId, str]] = []
        self._bytes, self._seconds = 0, 0.0

    def _facts(self) -> dict[str, Any]:
        if not self.is_open:
            return {"is_open": False, "report": self.report}
        heard, refused = len(self._known), len(self._refused)
        return {"round": self._number, "is_open": True, "heard": heard, "refused": refused, "shards": len(self._ranges)}

    def _require_open(self) -> None:
        super()._require_open()
        if self._coordinator.openings != self._opening:
            self._abort()
            raise ClusterError(
                "round: expected one whose shards are all there, got one in which a shard was lost: it never happened, "
                "and may be begun again"
            )

    def buffer(self) -> F32:
        """A vector for one client's y, float32[n] of undefined content: see ``fedcore.Round.buffer``."""
        self._require_open()
        return empty(self._settings.layout.n)

    @one_call
    def add_update(self, update: Update) -> bool:
        """Fold one client's update in: ``add`` for an Update."""
        began = time.perf_counter()
        self._require_open()
        client = self._check(update, self._registry)
        if self._is_second(client):
            self._refused.append((client, SECOND))
            return False
        kind, y = update.sent
        for name, vector in ((kind, y), ("control", update.control)):
            if isinstance(vector, Slices):
                vector.require(name, len(self._ranges))
        said = Said(update._replace(client=client, model=None, delta=None, gradient=None, control=None), kind)
        slices: list[list[Any]] = [[] for _ in self._ranges]
        said, fixed = self._take(said, update, slices)
        if said.refused is None and self._settings.algorithm.second_vector is not None:
            said, frozen = self._take_control(said, update.control, slices)
            fixed = fixed and frozen
        self._hold(said, slices, lasts=self._may_hold or update.keep or fixed)
        self._seconds += time.perf_counter() - began
        return client in self._known

    def add_slices(
        self,
        client: ClientId,
        slices: Sequence[Any],
        *,
        steps: int,
        examples: float | None = None,
        lr: float | None = None,
        controls: Sequence[Any] | None = None,
        count: int = 1,
        round: int | None = None,
        kind: Kind = "model",
        digests: Sequence[str] | None = None,
        weight: float | None = None,
    ) -> bool:
        """Fold one client's update in, of which each shard is given its slice: ``add`` of ``Slices``.

        Args:
            slices: of the vector, for each of ``Server.ranges``: arrays float32[stop - start], or up to ``end`` of a
                gradient; or references to such (``ray.ObjectRef``), which go to the shards without coming here. Nobody
                changes them until the round is finished.
            controls: of the second vector, up to each ``end``, where the method asks for one.
            kind: what the vector is: "model", "delta" or "gradient".
            digests: ``fedcore.cluster.digest_of`` each slice, as the client made them; then slices of two vectors are
                refused.

        Raises:
            RangeError: they are not as many as there are shards.
            Exception: as ``add``.
        """
        control = None if controls is None else Slices(controls)
        vector: Any = {kind: Slices(slices, digests)}
        vector |= {"keep": True, "weight": weight}
        return self.add_update(Update(client, None, steps, examples, lr, control, count, round)._replace(**vector))

    def add_partial(self, *_: Any, **__: Any) -> None:
        """Refuse a partial sum: only a server of one piece takes those in.

        Raises:
            RangeError: always.
        """
        raise RangeError("add_partial: expected a fedcore.Server, which takes in an edge's sum, got one in shards")

    @one_call
    def refuse(self, client: ClientId, reason: str) -> None:
        """Report a client's reply as refused that never became an update, because its bytes could not be read.

        Raises:
            RoundError: the round is closed.
        """
        self._require_open()
        self._refused.append((client, reason))

    def finish(self) -> RoundReport:
        """Take the server's step and close the round.

        Raises:
            RoundError: the round is closed.
            DivergedError: x would become infinite or NaN. The server stays as it was before the round.
            ClusterError: a shard was lost, and the round never happened: it may be run again. Or it did, as
                ``Server.round_number`` tells, and no shard is left that knows the report.
            StoreError: a disk is full, say: the round happened nowhere.
        """
        finished, report = self._finish()
        for record in finished.records:
            if LOGGER.isEnabledFor(record.levelno):
                LOGGER.handle(record)
        tell(self._on_report, report, LOGGER)
        return report

    @one_call
    def _finish(self) -> tuple[Finished, RoundReport]:
        began = time.perf_counter()
        self._require_open()
        try:
            self._fold_held()
            finished: Finished = self._coordinator.change("finish", rounds=1)
        except BaseException:
            self._abort()
            raise
        self.is_open = False
        self._over()
        seconds = self._seconds + time.perf_counter() - began
        refused = (*self._refused, *finished.late)
        self.report = replace(finished.report, refused=refused, seconds=seconds, bytes=self._bytes)
        return finished, self.report

    def _abort(self) -> None:
        if self.is_open:
            self.is_open = False
            self._held.clear()
            if self._coordinator.openings == self._opening:  # else no shard knows the round
                with suppress(FedcoreError):  # of a shard that is lost: whoever is next hears of it
                    self._coordinator.call("abort")
            with suppress(FedcoreError):
                self._over()

    def _take(self, said: Said, update: Update, slices: list[list[Any]]) -> tuple[Said, bool]:
        """Take an update's vector in slices, or tell what is wrong with it; and whether nobody can change it."""
        kind, y = update.sent
        if isinstance(y, Slices):
            _append(slices, y.parts)
            return said._replace(digests=y.digests), True
        try:
            vector, fixed = read_vector(update, self._settings.layout, apart=False)
            counters = read_counters(update, self._settings.layout)
        except FedcoreError as error:
            self._bytes += bytes_of(y)
            return said._replace(refused=error), True
        self._cut(vector, kind, slices)
        return said._replace(counters=counters, named=not bytes_of(y)), fixed

    def _cut(self, vector: Any, kind: Kind, slices: list[list[Any]]) -> None:
        put, short = self._coordinator.placement.put, kind == "gradient"
        _append(slices, [put(vector[span.start : span.end if short else span.stop]) for span in self._ranges])

    def _take_control(self, said: Said, control: Any, slices: list[list[Any]]) -> tuple[Said, bool]:
        """Take a second vector, as ``_take`` does."""
        if isinstance(control, Slices):
            _append(slices, control.parts)
            return said._replace(control=True, control_digests=control.digests), True
        p = self._settings.layout.n_parameters
        try:
            vector = as_vector("control", control, p)
        except FedcoreError as error:
            return said._replace(control=error), True
        if vector is None:
            return said, True  # the shards say what was due
        self._cut(vector, "gradient", slices)
        return said._replace(control=True), core.are_immutable([vector])

    def _hold(self, said: Said, slices: list[list[Any]], *, lasts: bool) -> None:
        """Hold an update, and fold what is held if it must be now."""
        self._held.append((said, slices))
        self._known.add(said.update.client)
        if len(self._held) >= self._fold_at or not (lasts or self._coordinator.placement.keeps):
            self._fold_held()

    def _fold_held(self) -> None:
        """Give the shards what is held; whoever is refused may try again."""
        held, self._held = self._held, []
        if not held:
            return
        try:
            said = [one for one, _ in held]
            own = [one._replace(counters=None) for one in said]
            each = []
            for k in range(len(self._ranges)):
                vectors = [vector for _, slices in held for vector in slices[k]]
                each.append((said if k == 0 else own, *vectors))
            refused, sizes = zip(*self._coordinator.call("add", each=each), strict=True)
        except BaseException:
            self._abort()
            raise
        self._bytes += sum(sizes)
        self._refused += refused[0]
        self._known.difference_update(client for client, _ in refused[0])


def _append(slices: Sequence[list[Any]], parts: Sequence[Any]) -> None:
    """Give each shard one slice more."""
    for own, part in zip(slices, parts, strict=True):
        own.append(part)
