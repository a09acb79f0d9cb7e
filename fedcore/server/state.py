"""What a server knows between rounds, and how a finished round changes it: all at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.algorithms import Algorithm, Cohort
from fedcore.algorithms.rates import Rate, rate_at
from fedcore.errors import DivergedError
from fedcore.layout import Layout
from fedcore.server.sums import Entry, Precision, Sums
from fedcore.server.update import Limits
from fedcore.store import ClientStore, History

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Settings:
    """What stays the same over a server's rounds."""

    algorithm: Algorithm
    layout: Layout
    lr: Rate
    server_lr: Rate | None
    fold: int
    accumulate: Precision
    limits: Limits

    @property
    def averages_models(self) -> bool:
        """Whether the step is the plain average of the clients' models: h is x - y, and gamma 1."""
        return self.server_lr is None and self.algorithm.averages_models


class State:
    """x, the running total T, the rows and the history they refer to, the counters, and the round's number."""

    def __init__(self, settings: Settings, x: F32, store: ClientStore, counters: dict[str, Any]) -> None:
        p = settings.layout.n_parameters
        x.flags.writeable = False
        self.x = x
        self.store = store
        self.history = History()
        self.counters = counters
        self.round_number = 0
        self.sums = Sums(settings.algorithm, settings.layout, store, self.history, settings.accumulate)
        self._settings = settings
        self._total = np.zeros(p, np.float64) if settings.algorithm.keeps_total else None
        self._spare_total = None if self._total is None else np.empty_like(self._total)
        self._v = np.empty(settings.layout.n, np.float32)
        self._gamma = 0.0  # the last one, for a round without clients

    def begin(self) -> None:
        """Forget what a round before has left that was never finished."""
        self.sums.clear()
        self.store.discard()

    def cohort(self, heard: Sequence[Entry]) -> Cohort:
        """The cohort in the papers' symbols."""
        rows = len(self.store)
        if self._settings.algorithm.keeps_rows:
            rows += sum(self.store.row(entry.client) is None for entry in heard)
        return Cohort(S=len(heard), N=len(self.store.registry), W=self.sums.weight, rows=rows)

    def commit(self, heard: Sequence[Entry]) -> tuple[float, float]:
        """Take the round's step with the cohort's sums, and make everything that the round changed count.

        Returns:
            gamma (0 where x stays), and |v|^2 (0 where there is no v).

        Raises:
            DivergedError: x would become infinite or NaN; nothing was changed.
        """
        algorithm = self._settings.algorithm
        cohort = self.cohort(heard)
        gamma, square = self._step_length(heard), 0.0
        moves = algorithm.moves(cohort)
        if heard or moves:
            v, x, square = self._step(cohort, gamma if moves else 0.0)
            self._total, self._spare_total = self._spare_total, self._total
            if moves:
                x.flags.writeable = False
                self.x = x
                self._gamma = gamma
                self._count(heard)
            if algorithm.keeps_history:
                self._turn_history(v, heard)
            self.store.commit(self.round_number)
        self.round_number += 1
        return (gamma if moves else 0.0), square

    def _step_length(self, heard: Sequence[Entry]) -> float:
        """gamma: the server's rate; or 1 where models are averaged; or the cohort's mean of eta_i K_i."""
        if self._settings.server_lr is not None:
            return rate_at(self._settings.server_lr, self.round_number)
        if self._settings.averages_models:
            return 1.0
        return sum(entry.distance for entry in heard) / len(heard) if heard else self._gamma

    def _step(self, cohort: Cohort, gamma: float) -> tuple[F32, F32, float]:
        """v, the next x, and |v|^2; the next total is left in the spare."""
        p = self._settings.layout.n_parameters
        step = self._settings.algorithm.step(cohort)
        x = np.empty_like(self.x)  # never in place: a client may still train on the x of this round
        v = np.empty(p, np.float32) if self._settings.algorithm.keeps_history else self._v[:p]
        v_square, x_square = kernels.server_step(
            self.sums.parameters,
            self._total,
            self.x[:p],
            from_sum=step.from_sum,
            from_total=step.from_total,
            keep_sum=step.keep_sum,
            keep_v=step.keep_v,
            gamma=gamma,
            v=v,
            total_out=self._spare_total,
            x_out=x[:p],
        )
        if p < len(x):
            mean = 1 / self.sums.buffer_weight if self.sums.buffer_weight > 0 else 0.0
            _, square = kernels.server_step(
                self.sums.buffers,
                None,
                self.x[p:],
                from_sum=mean,
                gamma=1.0,
                v=self._v[p:],
                total_out=None,
                x_out=x[p:],
            )
            x_square += square
        if not np.isfinite(x_square):
            raise DivergedError(
                f"round {self.round_number}: the step gamma = {gamma:g} along v, |v| = {v_square**0.5:g}, would make "
                "x infinite or NaN; x stays, lower the rates"
            )
        return v, x, v_square

    def _count(self, heard: Sequence[Entry]) -> None:
        """A counter becomes the largest that is known, in its own integer type."""
        for entry in heard:
            for name, counter in entry.counters.items():
                self.counters[name] = np.asarray(np.maximum(self.counters[name], counter))

    def _turn_history(self, v: F32, heard: Sequence[Entry]) -> None:
        """The cohort's rows now refer to this round's v, and to none before."""
        for entry in heard:
            before = self.store.round_of(entry.client)
            if before is not None:
                self.history.release(before)
        if heard:
            self.history.keep(self.round_number, v, references=len(heard))
