"""One round: updates come in one at a time, are folded into the sums, and are forgotten."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore.errors import DuplicateUpdateError, FedcoreError, RangeError, RoundError, UnknownNameError
from fedcore.layout import Layout
from fedcore.server.report import RoundReport
from fedcore.server.state import Settings, State
from fedcore.server.sums import Entry
from fedcore.server.update import KINDS, Kind, Update, check_numbers, is_integer, read_vector
from fedcore.store import ClientId

EMPTY = np.empty(0, np.float32)


class Round:
    """An open round of a server; get it from ``Server.open_round``, and use it as a context manager.

    Leaving the block by an exception, or ``abort()``, leaves the server as it was before ``open_round``. Leaving it
    normally finishes the round if nobody did.

    Attributes:
        report: the RoundReport once the round is finished, else None.
    """

    def __init__(self, settings: Settings, state: State, on_close: Callable[[], None]) -> None:
        self.report: RoundReport | None = None
        self._settings, self._state, self._on_close = settings, state, on_close
        self._lr = settings.lr(state.round_number)
        self._open = True
        self._held: list[Entry] = []
        self._heard: list[Entry] = []  # without their y
        self._squares: list[float] = []  # |h_i|^2, parallel to _heard
        self._known: set[ClientId] = set()  # held or heard
        self._refused: list[tuple[ClientId, str]] = []
        self._bytes = 0
        self._seconds = 0.0
        state.sums.clear()

    def __enter__(self) -> "Round":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()
        elif self._open:
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
        began = time.perf_counter()
        if not self._open:
            raise RoundError("round: expected an open one, got one that is finished or aborted")
        client = self._state.store.registry.check(update.client)
        self._check_caller(update, client)
        try:
            y, may_hold = read_vector(update, self._settings.layout)
            self._held.append(self._entry(replace(update, client=client), y))
        except FedcoreError as error:
            self._refused.append((client, str(error)))
        else:
            self._known.add(client)
            self._bytes += y.nbytes
            if not may_hold or len(self._held) >= self._settings.fold:
                self._fold()
        self._seconds += time.perf_counter() - began

    def finish(self) -> RoundReport:
        """Take the server's step and close the round.

        Raises:
            RoundError: the round is closed.
            DivergedError: x would become infinite or NaN; the server stays as it was before the round.
        """
        began = time.perf_counter()
        if not self._open:
            raise RoundError("round: expected an open one, got one that is finished or aborted")
        try:
            self._fold()
            weight = self._state.sums.weight
            gamma, v_square = self._state.commit(self._heard)
        except BaseException:
            self.abort()
            raise
        self._close()
        self.report = RoundReport(
            round=self._state.round_number - 1,
            heard=tuple(entry.client for entry in self._heard),
            refused=tuple(self._refused),
            steps=sum(entry.steps for entry in self._heard),
            norms=self._norms(),
            diversity=self._diversity(weight, v_square),
            gamma=gamma,
            seconds=self._seconds + time.perf_counter() - began,
            bytes=self._bytes,
        )
        return self.report

    def abort(self) -> None:
        """Close the round and leave the server as it was before ``open_round``; a closed round stays as it is."""
        if self._open:
            self._state.store.discard()
            self._close()

    def _close(self) -> None:
        self._open = False
        self._held.clear()
        self._on_close()

    def _check_caller(self, update: Update, client: ClientId) -> None:
        """Raise for what is the caller's mistake, not the client's."""
        if client in self._known:
            raise DuplicateUpdateError(f"client: {client!r} has an update in round {self._state.round_number} already")
        if update.kind not in KINDS:
            raise UnknownNameError.of("kind", update.kind, KINDS)
        most = 1 if self._settings.algorithm.keeps_rows else 2**31
        if not is_integer(update.count, 1, most):
            due = f"an integer in 1..{most}" if most > 1 else "1, since the method keeps a row per client"
            raise RangeError(f"count: expected {due}, got {update.count!r}")

    def _entry(self, update: Update, y: npt.NDArray[np.float32]) -> Entry:
        """The update as the fold takes it.

        Raises:
            FedcoreError: one of the client's numbers cannot be believed.
        """
        check_numbers(
            update,
            round=self._state.round_number,
            max_steps=self._settings.max_steps,
            max_examples=self._settings.max_examples,
        )
        distance = (self._lr if update.lr is None else float(update.lr)) * update.steps
        # h in units of x where models are averaged, else in units of a gradient.
        scale = 1.0 if self._settings.averages_models else 1 / distance
        weight = update.examples if self._settings.algorithm.weights == "examples" else 1
        return Entry(
            client=update.client,
            y=y,
            is_model=update.kind == "model",
            has_buffers=update.kind != "gradient",
            scale=-distance * scale if update.kind == "gradient" else scale,
            weight=float(weight * update.count),
            steps=int(update.steps) * int(update.count),
            distance=distance,
            counters=read_counters(self._settings.layout, update.y),
        )

    def _fold(self) -> None:
        """Fold what is held; what turns out not to be finite is refused."""
        held, self._held = self._held, []
        if not held:
            return
        squares = self._state.sums.fold(self._state.x, held)
        for entry, square in zip(held, squares.tolist(), strict=True):
            if np.isfinite(square):
                self._heard.append(replace(entry, y=EMPTY))
                self._squares.append(square)
            else:
                self._known.discard(entry.client)
                self._refused.append((entry.client, "y: expected finite numbers, got a NaN or an infinity"))

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


def read_counters(layout: Layout, y: Any) -> dict[str, npt.NDArray[np.integer[Any]]]:
    """The integer counters of an update; none from a flat vector, which has no room for them."""
    flat = isinstance(y, bytes | bytearray | memoryview) or hasattr(y, "__dlpack__")
    return {} if flat else layout.read_counters(y)
