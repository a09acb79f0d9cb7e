"""One round: updates come in one at a time, are folded into the sums, and are forgotten."""

import math
import time
from dataclasses import replace
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.algorithms.rates import rate_at
from fedcore.errors import DuplicateUpdateError, FedcoreError, RangeError, RoundError, UnknownNameError
from fedcore.server.report import RoundReport
from fedcore.server.state import Settings, State
from fedcore.server.sums import Entry
from fedcore.server.uninterrupted import uninterrupted
from fedcore.server.update import KINDS, Kind, Update, is_immutable, is_integer, read_counters, read_lr, read_vector
from fedcore.store import ClientId

EMPTY = np.empty(0, np.float32)


class Round:
    """An open round of a server; get it from ``Server.open_round``, and use it as a context manager.

    Leaving the block by an exception, or ``abort()``, leaves the server as it was before ``open_round``. Leaving it
    normally finishes the round if nobody did. Ctrl-C while the round's changes are made waits until they are. Several
    threads may add at once; they take turns.

    Attributes:
        report: the RoundReport once the round is finished, else None.
        is_open: whether updates can still come in.
    """

    def __init__(self, settings: Settings, state: State, *, fold: int, may_hold: bool) -> None:
        self.report: RoundReport | None = None
        self.is_open = True
        self._settings, self._state, self._fold_at, self._may_hold = settings, state, fold, may_hold
        self._lr = rate_at(settings.lr, state.round_number)
        self._turn = Lock()
        self._held: list[Entry] = []
        self._heard: list[Entry] = []  # without their y
        self._squares: list[float] = []  # |h_i|^2, parallel to _heard
        self._known: set[ClientId] = set()  # held or heard
        self._refused: list[tuple[ClientId, str]] = []
        self._bytes = 0
        self._seconds = 0.0
        state.begin()

    def __enter__(self) -> "Round":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()
        elif self.is_open:
            self.finish()

    def add(
        self,
        client: ClientId,
        y: Any,
        *,
        steps: int,
        examples: int = 1,
        lr: float | None = None,
        count: int = 1,
        round: int | None = None,
        kind: Kind = "model",
        keep: bool = False,
    ) -> None:
        """Fold one client's update in; the arguments are those of ``Update``.

        What a client sent (y, steps, examples, lr, round) is refused into the report if it is wrong, and the round
        goes on. A client that was refused may try again.

        Raises:
            RoundError: the round is closed.
            UnknownClientError: no such client is registered.
            DuplicateUpdateError: this round has an update of the client already.
            UnknownNameError: there is no such kind.
            RangeError: ``count`` is not an integer >= 1, or not 1 where the method keeps a row per client.

        Cost: what ``kernels.accumulate`` or ``kernels.exchange`` costs for one row, or 1/fold of a pass over ``fold``
            rows where updates are held.
        """
        self.add_update(Update(client, y, steps, examples, lr, count, round, kind, keep))

    def add_update(self, update: Update) -> None:
        """Fold one client's update in: ``add`` for an Update."""
        with self._turn:
            began = time.perf_counter()
            self._require_open()
            client = self._check_caller(update)
            try:
                entry, ours = self._check(update, client)
            except FedcoreError as error:
                self._refused.append((client, str(error)))
                self._bytes += getattr(update.y, "nbytes", 0)
            else:
                self._bytes += entry.y.nbytes
                self._known.add(client)
                self._held.append(entry)
                holdable = self._may_hold or update.keep or ours or is_immutable(entry.y)
                if not holdable or len(self._held) >= self._fold_at:
                    self._fold()
            self._seconds += time.perf_counter() - began

    def finish(self) -> RoundReport:
        """Take the server's step and close the round.

        Raises:
            RoundError: the round is closed.
            DivergedError: x would become infinite or NaN; the server stays as it was before the round.
        """
        with self._turn:
            began = time.perf_counter()
            self._require_open()
            self._fold()
            number, weight = self._state.round_number, self._state.sums.weight
            try:
                with uninterrupted():
                    gamma, v_square = self._state.commit(self._heard)
                    self.is_open = False
                    self.report = self._make_report(number, gamma, self._diversity(weight, v_square))
            finally:
                if self.is_open:
                    self._abort()
            self.report = replace(self.report, seconds=self._seconds + time.perf_counter() - began)
            return self.report

    def abort(self) -> None:
        """Close the round and leave the server as it was before ``open_round``; a closed round stays as it is."""
        with self._turn:
            if self.is_open:
                self._abort()

    def _abort(self) -> None:
        self.is_open = False
        self._held.clear()
        self._state.store.discard()

    def _require_open(self) -> None:
        if not self.is_open:
            raise RoundError("round: expected an open one, got one that is finished or aborted")

    def _check_caller(self, update: Update) -> ClientId:
        """The client's id; raises for what is the caller's mistake, not the client's."""
        client = self._state.store.registry.check(update.client)
        if client in self._known:
            self._fold()  # if the first one is held and turns out to be no update, this one is not the second
            if client in self._known:
                number = self._state.round_number
                raise DuplicateUpdateError(f"client: {client!r} has an update in round {number} already")
        if update.kind not in KINDS:
            raise UnknownNameError.of("kind", update.kind, KINDS)
        most = 1 if self._settings.algorithm.keeps_rows else 2**31
        if not is_integer(update.count, 1, most):
            due = f"an integer in 1..{most}" if most > 1 else "1, since the method keeps a row per client"
            raise RangeError(f"count: expected {due}, got {update.count!r}")
        return client

    def _check(self, update: Update, client: ClientId) -> tuple[Entry, bool]:
        """The update as the fold takes it, and whether its y was made here.

        Raises:
            FedcoreError: what the client sent cannot be believed.
        """
        settings = self._settings
        y, ours = read_vector(update, settings.layout)
        steps, count = int(update.steps) if isinstance(update.steps, np.integer) else update.steps, int(update.count)
        distance = read_lr(update, self._lr, settings.limits, self._state.round_number) * steps
        # h in units of x where models are averaged, else in units of a gradient.
        scale = 1.0 if settings.averages_models else 1 / distance
        if not 0 < scale < math.inf:
            raise RangeError(f"lr: expected a rate whose inverse is finite, got {update.lr!r}")
        entry = Entry(
            client,
            y,
            is_model=update.kind == "model",
            has_buffers=update.kind != "gradient",
            scale=-distance * scale if update.kind == "gradient" else scale,
            weight=float(int(update.examples) * count if settings.algorithm.weights == "examples" else count),
            steps=steps * count,
            distance=distance,
            counters=read_counters(update, settings.layout),
        )
        return entry, ours

    def _fold(self) -> None:
        """Fold what is held; what the sums cannot hold is refused. If it fails, the round is over."""
        if not self._held:
            return
        held, self._held = self._held, []
        try:
            squares = self._state.sums.fold(self._state.x, held)
        except BaseException:
            self._abort()
            raise
        for entry, square in zip(held, squares.tolist(), strict=True):
            entry.y = EMPTY
            if math.isfinite(square):
                self._heard.append(entry)
                self._squares.append(square)
            else:
                self._known.discard(entry.client)
                why = "y: expected finite numbers, got a NaN, an infinity, or an update past float32's range"
                self._refused.append((entry.client, why))

    def _make_report(self, number: int, gamma: float, diversity: float | None) -> RoundReport:
        return RoundReport(
            round=number,
            heard=tuple(entry.client for entry in self._heard),
            refused=tuple(self._refused),
            steps=sum(entry.steps for entry in self._heard),
            norms=self._norms(),
            diversity=diversity,
            gamma=gamma,
            bytes=self._bytes,
        )

    def _norms(self) -> npt.NDArray[np.float64]:
        """|h_i| as a gradient, whatever the units that were folded."""
        norms = np.sqrt(np.array(self._squares, np.float64))
        return norms / [entry.distance for entry in self._heard] if self._settings.averages_models else norms

    def _diversity(self, weight: float, v_square: float) -> float | None:
        """sum (w_i / W) |h_i|^2 / |v|^2, where v is the cohort's plain mean of h."""
        if self._settings.algorithm.adds != "h" or v_square == 0:
            return None
        mean = sum(entry.weight * square for entry, square in zip(self._heard, self._squares, strict=True)) / weight
        return mean / v_square
