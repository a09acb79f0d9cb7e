"""A client's update as a round's fold takes it, or why it cannot be believed."""

from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcore.aggregation import COUNTED, NO_COUNT, WEIGHTED, Counters, Replies
from fedcore.algorithms import Claims
from fedcore.clients import ClientId
from fedcore.errors import DtypeError, RangeError
from fedcore.memory import freeze
from fedcore.native import core
from fedcore.server.audit import digest_of_numbers
from fedcore.server.buffers import settle_counters
from fedcore.server.claims import SentRates, check_claims, check_distance
from fedcore.server.rounded_model import as_sent
from fedcore.server.settings import Settings
from fedcore.server.state import State
from fedcore.server.update import Update, as_vector, read_counters, read_vector
from fedcore.server.weighing import Weights, weight_of
from fedcore.typing import F32, F64, Bools

Columns: TypeAlias = tuple[list[ClientId], list[Any], F64, F64, F64]

NO_COUNTERS: Counters = {}


class UpdateReader:
    """Reads the updates of a server's open round, without folding any of them in; weights are ``Server``'s."""

    def __init__(self, settings: Settings, state: State, weights: Weights | None = None) -> None:
        self._settings, self._state, self._weights = settings, state, weights
        self._rates = SentRates(settings.lr, settings.limits)
        self._starts: dict[int, F32] = {}
        self._lr = self._rates.sent(state.snapshot.round_number)

    def read(self, update: Update, client: ClientId) -> tuple[Replies, bool]:
        """The update as a table of one reply, and whether nobody will change its vectors.

        Raises:
            FedcoreError: what the client sent cannot be believed.
        """
        settings, number = self._settings, self._state.snapshot.round_number
        kind = update.sent[0]
        y, fixed = self._read_vector(update)
        update = check_claims(update, settings.asked, range(min(self._state.snapshot.past, default=number), number + 1))
        if self._weights is not None and update.weight is None:
            update = update._replace(weight=weight_of(self._weights, update, client))
        started = number if update.round is None else update.round
        if started != number and (last := self._state.snapshot.starts.get(client, -1)) >= started:
            due = f"expected one after {last}, where the client's last counted reply started"
            raise RangeError(f"round: {due}, got {started}: a reply counts once")
        distance = check_distance(self._rates.read(update, started), update.steps, update.lr)
        # h in units of x where models are averaged, else in units of a gradient.
        scale = 1.0 if settings.averages_models else 1 / distance
        algorithm = settings.algorithm
        of_then = (
            algorithm.needs_plain_steps or algorithm.second_vector is not None or algorithm.direction.from_row != 0
        )
        if started != number and of_then:
            raise RangeError(f"round: expected {number}, since the controls of {started} are gone, got {started}")
        if kind != "gradient":
            self._state.buffers.check(y, self._start_of(started) if kind == "delta" else None)
        counters = settle_counters(settings.layout, self._read_counters(update), self._state.snapshot.counters, kind)
        control = self._read_control(update.control)
        if self._state.upload is not None:  # the fold comes later, when another stream may be the library's current one
            core.await_arrays([*(y if isinstance(y, list) else [y]), *([] if control is None else [control])])
        fixed = fixed or self._state.lent.lent(y)
        size, source = _size_of(update)
        reply = Replies(
            clients=[client],
            vectors=[y],
            bases=[self._start_of(started) if kind == "model" else None],
            scales=np.array([-distance * scale if kind == "gradient" else scale]),
            claims=Claims(_column(update.steps), _column(size), _column(update.count)),
            eta_steps=np.array([distance]),
            has_buffers=np.array([kind != "gradient"]),
            counters=[counters],
            controls=[control],
            sources=np.array([source], np.int8),
            starts=np.array([started]),
            digests=[digest_of_numbers(y) if settings.audit else None],
            factors=np.ones(1),
        )
        return reply, fixed and (control is None or core.are_immutable([control]))

    def read_all(self, updates: list[Update]) -> Replies | None:
        """The updates as a table, if ``read_columns`` reads them; else None."""
        settings, read = self._settings, self.read_columns(updates)
        if read is None:
            return None
        clients, ys, steps, examples, distances = read
        k, number = len(clients), self._state.snapshot.round_number
        ones, sources, has_buffers, factors, zeros = usual(k)
        if not core.column_range(examples)[0] >= 0:  # as a NaN is not, which stands for none
            missing = np.isnan(examples)
            examples, sources = np.where(missing, 1.0, examples), (~missing).astype(np.int8)
        return Replies(
            clients=clients,
            vectors=ys,
            bases=[self._start_of(number)] * k,
            scales=ones if settings.averages_models else 1 / distances,
            claims=Claims(steps, examples, ones, None, None, clients),
            eta_steps=distances,
            has_buffers=has_buffers,
            counters=[NO_COUNTERS] * k,
            controls=[None] * k,
            sources=sources,
            starts=zeros + number,
            digests=[None] * k,
            factors=factors,
        )

    def read_columns(self, updates: list[Update]) -> Columns | None:
        """Read updates into columns, if all are flat float32 models of different clients; else None.

        Returns:
            The clients, their ys, steps, examples (NaN for none) and eta_i K_i.
        """
        settings, limits = self._settings, self._settings.asked
        if settings.algorithm.second_vector is not None or settings.layout.outside or not updates:
            return None
        if self._weights is not None or settings.audit:
            return None
        index, of_steps, of_lr = self._state.store.registry.index, limits.steps, (limits.own_rates, limits.lr)
        read: Columns | None = core.read_plain_updates(
            updates, Update, index, settings.layout.n, self._lr, of_steps, limits.examples, *of_lr
        )
        return None if read is None or not self._state.buffers.allow(read[1]) else read

    def _start_of(self, round: int) -> Any:
        """The model of that round as it was sent."""
        if round not in self._starts:
            now = self._state.snapshot
            start = now.sent if round == now.round_number else now.past[round]
            self._starts[round] = as_sent(self._settings.layout, start)
        return self._starts[round]

    def _read_vector(self, update: Update) -> tuple[Any, bool]:
        """The vector that the update sent, as ``read_vector`` gives it."""
        # A quantised row cannot be cut at any element, for its elements share scales.
        apart = not self._settings.algorithm.keeps_rows or self._state.store.codec == "f32"
        return read_vector(update, self._settings.layout, apart=apart, device=self._settings.device)

    def _read_counters(self, update: Update) -> Counters:
        return read_counters(update, self._settings.layout)

    def _read_control(self, control: Any) -> Any:
        if self._settings.algorithm.second_vector is None:
            return None  # what a method does not ask for is not read
        n = self._settings.layout.n_parameters
        vector = as_vector("control", control, n, device=self._settings.device)
        if vector is None:
            got = "None" if control is None else type(control).__name__
            raise DtypeError(f"control: expected float32[{n}], the client's second vector, got {got}")
        return vector


@lru_cache(maxsize=8)
def usual(k: int) -> tuple[F64, npt.NDArray[np.int8], Bools, F64, npt.NDArray[np.int64]]:
    """The counts, sources, buffers and factors of k replies that are what nearly all are, and zeros. Read-only."""
    columns = np.ones(k), np.full(k, COUNTED, np.int8), np.ones(k, np.bool_), np.ones(k), np.zeros(k, np.int64)
    for column in columns:
        freeze(column)
    return columns


def _size_of(update: Update) -> tuple[float, int]:
    """The examples that an update counts with, unless a limit lowers them, and where they are from."""
    if update.weight is not None:
        return float(update.weight), WEIGHTED
    return (1.0, NO_COUNT) if update.examples is None else (update.examples, COUNTED)


def _column(number: Any) -> npt.NDArray[np.float64]:
    return np.array([number], np.float64)
