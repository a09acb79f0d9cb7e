"""One round of a network: the nodes' models come in one at a time, and are mixed when the round is finished."""

import logging
import math
import time
from dataclasses import replace
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.aggregation.sum import LONGEST
from fedcore.arguments import due_whole, is_whole, reason_of, shown
from fedcore.errors import (
    DivergedError,
    FedcoreError,
    RangeError,
    RoundError,
    UnknownClientError,
)
from fedcore.float_mode import ieee
from fedcore.interrupts import uninterrupted
from fedcore.layout import Layout
from fedcore.memory import empty, zeros
from fedcore.network.mixing import among
from fedcore.network.report import NetworkReport
from fedcore.rates import Rate
from fedcore.representation import Represented
from fedcore.server import Update
from fedcore.server.buffers import settle_counters
from fedcore.server.claims import SentRates, check_claims
from fedcore.server.judge import NOT_FINITE
from fedcore.server.limits import Limits
from fedcore.server.report import OnReport, tell, warn_if_unheard
from fedcore.server.round_face import SECOND
from fedcore.server.rounded_model import as_sent
from fedcore.server.update import bytes_of, first_not_finite, in_float32, read_counters, read_vector
from fedcore.topology.topology import second_eigenvalue
from fedcore.typing import F32, F64

LOGGER = logging.getLogger("fedcore.network")


class Models:
    """The state of a network between rounds: the models, room for the next ones, the counters, the round's number."""

    def __init__(
        self, models: list[F32], counters: dict[str, npt.NDArray[np.integer[Any]]], round_number: int = 0
    ) -> None:
        self.models = models
        self.spares: list[F32 | None] = [None] * len(models)
        self.counters = counters
        self.round_number = round_number

    def spare(self, node: int) -> F32:
        """Room for the node's next model."""
        room = self.spares[node]
        if room is None:
            room = self.spares[node] = empty(len(self.models[node]))
        return room


class NetworkRound(Represented):
    """An open round of a network; get it from ``Network.open_round``, and use it as a context manager.

    Leaving the block by an exception, or ``abort()``, leaves the network as it was before ``open_round``. Leaving it
    normally finishes the round if nobody did. Several threads may add at once; they take turns.

    Attributes:
        report: the NetworkReport once the round is finished, else None.
        is_open: whether updates can still come in.
    """

    def __init__(
        self,
        layout: Layout,
        state: Models,
        W: F64,
        zeta: float,
        q: F64,
        lr: Rate,
        limits: Limits,
        on_report: OnReport | None,
    ) -> None:
        self.report: NetworkReport | None = None
        self.is_open = True
        self._layout, self._state, self._W, self._zeta, self._q = layout, state, W, zeta, q
        self._shares = np.ones(len(q)) if (q == q[0]).all() else q * len(q)  # p q_j
        self._limits, self._rates, self._on_report = limits, SentRates(lr, limits), on_report
        self._rates.sent(state.round_number)  # refuses one that has run out
        self._turn = Lock()
        self._sum: F32 = zeros(layout.n_parameters)  # of q_j (x_j - y_j)
        self._spare_sum: F32 = empty(layout.n_parameters)
        self._heard: dict[int, tuple[float, int, float]] = {}  # |x_j - y_j|^2, K_j, eta_j K_j
        self._counters: list[dict[str, npt.NDArray[np.integer[Any]]]] = []
        self._refused: list[tuple[int, str]] = []
        self._bytes = 0
        self._seconds = 0.0

    def _facts(self) -> dict[str, Any]:
        if not self.is_open:
            return {"is_open": False, "report": self.report}
        return {
            "round": self._state.round_number,
            "is_open": True,
            "heard": len(self._heard),
            "refused": len(self._refused),
        }

    def __enter__(self) -> "NetworkRound":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()
        elif self.is_open:
            self.finish()

    def add(
        self,
        node: int,
        model: Any = None,
        *,
        steps: int,
        lr: float | None = None,
        round: int | None = None,
        delta: Any = None,
        gradient: Any = None,
    ) -> bool:
        """Take one node's model after its local steps in; the arguments are those of ``Update``.

        What a node sent (the vector, steps, lr, round) is rejected into the report if it is wrong, and the round goes
        on; so is a second update of a node. A node that was rejected may try again. A difference or a gradient is
        measured from the node's own model.

        Returns:
            Whether the update is accepted.

        Raises:
            RoundError: the round is closed.
            UnknownClientError: there is no such node.
            RangeError: more than one of model, delta and gradient is given.
        """
        return self.add_update(Update(node, model, steps, lr=lr, round=round, delta=delta, gradient=gradient))

    @ieee
    def add_update(self, update: Update) -> bool:
        """Take one node's model in: ``add`` for an Update, whose count must be 1; its examples say nothing here.

        Raises:
            RangeError: ``count`` is not 1.
        """
        with self._turn:
            began = time.perf_counter()
            self._require_open()
            node = self._check_caller(update)
            try:
                if known := node in self._heard:
                    raise RangeError(SECOND)
                self._bytes += self._take(update, node)
            except FedcoreError as error:
                self._refused.append((node, reason_of(error)))
                self._bytes += bytes_of(update.sent[1])
            self._seconds += time.perf_counter() - began
            return not known and node in self._heard

    @ieee
    def finish(self) -> NetworkReport:
        """Mix the models of the nodes heard, and close the round.

        A round that heard nobody and refused somebody is a warning of the logger "fedcore.network".

        Raises:
            RoundError: the round is closed.
            DivergedError: a model would become infinite; the network stays as it was before the round.
        """
        with self._turn:
            began = time.perf_counter()
            self._require_open()
            self.is_open = False  # whatever happens
            heard = sorted(self._heard)
            left = self._W if len(heard) == len(self._W) else among(self._W, heard)
            mixed = [self._state.spare(node) for node in heard]
            diversity = self._diversity()  # before its sum becomes scratch
            kernels.mix(mixed, left)
            models = list(self._state.models)
            for node, model in zip(heard, mixed, strict=True):
                models[node] = model
            report = NetworkReport(
                round=self._state.round_number,
                heard=tuple(self._heard),
                refused=tuple(self._refused),
                steps=sum(steps for _, steps, _ in self._heard.values()),
                norms=np.array([math.sqrt(square) / distance for square, _, distance in self._heard.values()]),
                diversity=diversity,
                bytes=self._bytes,
                zeta=self._zeta_among(left),
                consensus=self._consensus(models),
            )
            with uninterrupted():
                for node in heard:
                    self._state.spares[node] = self._state.models[node]
                self._state.models = models
                self._count()
                self._state.round_number += 1
                self.report = replace(report, seconds=self._seconds + time.perf_counter() - began)
            report = self.report
        warn_if_unheard(report, LOGGER)
        tell(self._on_report, report, LOGGER)
        return report

    def abort(self) -> None:
        """Close the round and leave the network as it was before ``open_round``; a closed round stays as it is."""
        with self._turn:
            self.is_open = False

    def _require_open(self) -> None:
        if not self.is_open:
            raise RoundError("round: expected an open one, got one that is finished or aborted")

    def _check_caller(self, update: Update) -> int:
        """The node; raises for what is the caller's mistake, not the node's."""
        p = len(self._W)
        if not is_whole(update.client, 0, p - 1):
            raise UnknownClientError(f"node: expected {due_whole(0, p - 1)}, got {shown(update.client)}")
        node = int(update.client)
        update.check_one()
        if not is_whole(update.count, 1, 1):
            raise RangeError(f"count: expected 1, since every node is one, got {update.count!r}")
        return node

    def _take(self, update: Update, node: int) -> int:
        """Stage the node's model, p q_j of the way to what it sent, and add its step to the sum.

        Returns:
            the bytes that came.

        Raises:
            FedcoreError: what the node sent cannot be believed.
        """
        kind, y = update.sent[0], in_float32(read_vector(update, self._layout, apart=False)[0])
        number = self._state.round_number
        update = check_claims(update, self._limits, range(number, number + 1))
        distance = self._rates.read(update, number) * int(update.steps)
        sent = read_counters(update, self._layout)
        counters = settle_counters(self._layout, sent, self._state.counters, kind)
        x, staged, p = self._state.models[node], self._state.spare(node), self._layout.n_parameters
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found below
            if kind == "model":
                np.copyto(staged, y)
            elif kind == "delta":
                kernels.combine([as_sent(self._layout, x), y], [1.0, 1.0], staged)
            else:
                kernels.combine([as_sent(self._layout, x)[:p], y], [1.0, -distance], staged[:p])
                staged[p:] = x[p:]
        (square,) = kernels.accumulate(
            self._sum, [x[:p]], [staged[:p]], np.ones(1), self._q[node : node + 1], out=self._spare_sum
        )
        if not math.sqrt(square) < LONGEST or not kernels.all_finite([staged[p:]])[0]:
            name = first_not_finite(staged, self._layout)
            raise RangeError(f"{NOT_FINITE}, in {name}" if name else NOT_FINITE)
        if (share := self._shares[node]) != 1:
            kernels.combine([staged[:p], x[:p]], [share, 1 - share], staged[:p])
        self._sum, self._spare_sum = self._spare_sum, self._sum
        self._heard[node] = (float(square), int(update.steps), distance)
        self._counters.append(counters)
        return y.nbytes

    def _diversity(self) -> float | None:
        """sum (q_j / Q) |h_j|^2 / |sum (q_j / Q) h_j|^2 over the nodes heard, Q the sum of their q."""
        weight = sum(float(self._q[node]) for node in self._heard)
        (square,) = kernels.squared_norms([self._sum])
        if square == 0:
            return None
        return sum(float(self._q[node]) * heard[0] for node, heard in self._heard.items()) * weight / float(square)

    def _zeta_among(self, left: F64) -> float:
        if len(left) == len(self._W):
            return self._zeta
        return second_eigenvalue(left) if len(left) else 1.0

    def _consensus(self, models: list[F32]) -> float:
        """The distance of the models from their mean, as the root of the mean square.

        Raises:
            DivergedError: one of them is not finite.
        """
        p = self._layout.n_parameters
        parameters = [model[:p] for model in models]
        weights = np.full(len(models), 1 / len(models))
        mean = kernels.weighted_sum(parameters, weights.astype(np.float32), self._sum, accumulate="float64")
        squares = kernels.accumulate(
            None, [mean] * len(models), parameters, np.ones(len(models)), weights, out=self._spare_sum
        )
        total, number = float(squares @ weights), self._state.round_number
        if not math.isfinite(total):
            raise DivergedError(f"round {number}: mixing would make a model infinite; lower the rates")
        for model in models if self._layout.narrow else ():
            if not kernels.all_finite([sent := as_sent(self._layout, model)])[0]:
                name = first_not_finite(sent, self._layout)
                raise DivergedError(f"round {number}: mixing would make {name} infinite in its dtype; lower the rates")
        return math.sqrt(total)

    def _count(self) -> None:
        """A counter becomes the largest that is known, in its own integer type."""
        for counters in self._counters:
            for name, counter in counters.items():
                self._state.counters[name] = np.asarray(np.maximum(self._state.counters[name], counter))
