"""A client's update as a round's fold takes it, or why it cannot be believed."""

from typing import Any

import numpy as np

from fedcore import _core
from fedcore.errors import DtypeError, RangeError
from fedcore.server.batch import Batch, Counters, Reply
from fedcore.server.buffers import check_counters
from fedcore.server.claims import SentRates, check_claims, check_distance
from fedcore.server.settings import Settings
from fedcore.server.state import State
from fedcore.server.update import Update, as_vector, read_counters, read_vector
from fedcore.store import ClientId

NO_COUNTERS: Counters = {}


class Reader:
    """Reads the updates of a server's open round, without folding any of them in."""

    def __init__(self, settings: Settings, state: State) -> None:
        self._settings, self._state = settings, state
        self._rates = SentRates(settings.lr, settings.limits)
        self._lr = self._rates.sent(state.now.round_number)

    def read(self, update: Update, client: ClientId) -> tuple[Reply, bool]:
        """The update as the fold takes it, and whether nobody can change its y.

        Raises:
            FedcoreError: what the client sent cannot be believed.
        """
        settings, number = self._settings, self._state.now.round_number
        # A quantised row cannot be cut at any element, for its elements share scales.
        apart = not settings.algorithm.keeps_rows or self._state.store.codec == "f32"
        y, fixed = read_vector(update, settings.layout, apart=apart)
        check_claims(update, settings.asked, range(min(self._state.now.past, default=number), number + 1))
        started = number if update.round is None else int(update.round)
        distance = check_distance(self._rates.read(update, started), int(update.steps), update.lr)
        # h in units of x where models are averaged, else in units of a gradient.
        scale = 1.0 if settings.averages_models else 1 / distance
        if started != number and (settings.algorithm.needs_plain_steps or settings.algorithm.second):
            raise RangeError(f"round: expected {number}, since the controls of {started} are gone")
        if update.kind != "gradient":
            self._state.buffers.check(y, self._start_of(started) if update.kind == "delta" else None)
        counters = read_counters(update, settings.layout)
        # Where models are averaged, clients need not know how many steps they did.
        most = int(update.steps) if settings.counts_steps else settings.asked.steps
        check_counters(counters, self._state.now.counters, most)
        reply = Reply(
            client,
            y,
            base=self._start_of(started) if update.kind == "model" else None,
            scale=-distance * scale if update.kind == "gradient" else scale,
            distance=distance,
            steps=int(update.steps),
            examples=int(update.examples),
            count=int(update.count),
            has_buffers=update.kind != "gradient",
            counters=counters,
            control=self._read_control(update.control),
        )
        return reply, fixed

    def read_all(self, updates: list[Update]) -> Batch | None:
        """The updates as columns, if all are what nearly all are: flat float32 models, once each; else None."""
        settings, limits = self._settings, self._settings.asked
        if settings.algorithm.second or settings.layout.counters or not updates:
            return None
        read = _core.read_plain_updates(
            updates, Update, settings.layout.n, self._lr, limits.steps, limits.examples, limits.own_rates, limits.lr
        )
        if read is None:
            return None
        clients, ys, steps, examples, distances = read
        k = len(clients)
        if len(set(clients)) != k or not self._state.buffers.allow(ys):
            return None
        self._state.store.registry.numbers(clients)  # raises for one that is not registered
        ones = np.ones(k)
        return Batch(
            clients,
            ys,
            [self._state.now.x] * k,
            ones if settings.averages_models else 1 / distances,
            distances,
            steps,
            examples,
            counts=ones,
            weights=ones,
            has_buffers=ones > 0,
            counters=[NO_COUNTERS] * k,
            controls=[None] * k,
        )

    def _start_of(self, round: int) -> Any:
        return self._state.now.x if round == self._state.now.round_number else self._state.now.past[round]

    def _read_control(self, control: Any) -> Any:
        if not self._settings.algorithm.second:
            return None  # what a method does not ask for is not read
        n = self._settings.layout.n_parameters
        vector = as_vector("control", control, n)
        if vector is None:
            got = "None" if control is None else type(control).__name__
            raise DtypeError(f"control: expected float32[{n}], the client's second vector, got {got}")
        return vector
