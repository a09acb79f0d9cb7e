"""One round of a network: the nodes' models arrive one at a time, and are mixed at the end."""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.algorithms.rates import Rate
from fedcore.arguments import due_whole, is_whole, reason_of, shown
from fedcore.arrays import F32, F64, empty, ieee, zeros
from fedcore.errors import (
    DivergedError,
    DtypeError,
    FedcoreError,
    RangeError,
    RoundError,
    ShapeError,
    UnknownClientError,
    UnknownNameError,
)
from fedcore.interrupts import uninterrupted
from fedcore.model import Layout
from fedcore.network.topology import Topology, second_eigenvalue
from fedcore.options import Callback, Limits
from fedcore.profiling import span
from fedcore.representation import Represented
from fedcore.server import Report, Update
from fedcore.server.aggregation import LONGEST
from fedcore.server.report import tell, warn_if_unheard
from fedcore.server.round import SECOND
from fedcore.server.update import (
    KINDS,
    Kind,
    as_sent,
    bytes_of,
    first_not_finite,
    in_float32,
    read_counters,
    read_vector,
)
from fedcore.server.validation import NOT_FINITE, SentRates, check_claims, settle_counters

ROUNDING = 1e-6
"""The largest deviation of a float32 matrix from a symmetric and doubly stochastic one."""
DISCONNECTED = 1 - 1e-12
"""The least zeta at which float64 shows no mixing: ten million nodes in a ring are below it."""


def mixing_matrix(W: Any, p: int) -> tuple[F64, float]:
    """Return W as float64[p, p], and its zeta.

    Raises:
        ShapeError, DtypeError: it is not a matrix of p rows.
        RangeError: it is not symmetric, not doubly stochastic, has a negative entry, or does not mix all models.
    """
    if isinstance(W, Topology):
        W = W.W
    if hasattr(W, "toarray"):
        W = W.toarray()
    try:
        given = np.asarray(W)
    except ValueError:  # rows of different lengths
        raise ShapeError(f"W: expected [{p}, {p}], one row a model, got no matrix") from None
    if given.shape != (p, p):
        raise ShapeError(f"W: expected [{p}, {p}], one row a model, got {list(given.shape)}")
    if given.dtype.kind not in "fiu":
        raise DtypeError(f"W: expected float32 or float64, got {given.dtype}")
    matrix = given.astype(np.float64)
    if not (matrix >= 0).all() or not np.isfinite(matrix).all():
        raise RangeError("W: expected finite entries >= 0, got others")
    if np.abs(matrix - matrix.T).max() > ROUNDING:
        raise RangeError("W: expected a symmetric matrix, got one that is not")
    off = np.abs(matrix.sum(axis=1) - 1)
    if off.max() > ROUNDING:
        row = int(off.argmax())
        raise RangeError(f"W: expected rows that add up to 1, got {matrix[row].sum():.9g} in row {row}")
    zeta = second_eigenvalue(matrix)
    if zeta >= DISCONNECTED:
        raise RangeError(f"W: expected a matrix that mixes all models (zeta < 1), got zeta = {zeta:.9g}")
    return matrix, zeta


def among(W: F64, accepted: Sequence[int]) -> F64:
    """Return the matrix among the present nodes: a node keeps the weight of its absent neighbours.

    W'_ij = W_ij for i != j, W'_ii = W_ii + sum of W_ij over the absent nodes. So W' is symmetric, and its rows and
    columns add up to 1 as those of W do: a round with absent nodes keeps the mean of the models, too.

    Args:
        W: float64[p, p], read-only.
        heard: the present nodes, k different rows.

    Returns:
        float64[k, k].

    >>> among(np.full((3, 3), 1 / 3), [0, 2]).round(3).tolist()
    [[0.667, 0.333], [0.333, 0.667]]
    """
    places = np.array(accepted, np.int64)
    away = np.ones(len(W), np.bool_)
    away[places] = False
    left = W[np.ix_(places, places)]
    left[np.diag_indices_from(left)] += W[np.ix_(places, np.flatnonzero(away))].sum(axis=1)
    return left


@dataclass(frozen=True, repr=False)
class NetworkReport(Report):
    """The outcome of one round of a network: a ``Report``, and the distance between the models.

    The fields of ``Report`` are those of the accepted nodes; h_j is measured from node j's own model, and
    diversity weighs it by q_j. There is no server's step, so gamma is 0.

    Attributes:
        zeta: max(|lambda_2|, |lambda_k|) of the matrix that mixed the k accepted nodes; 1 if it has two parts that do
            not mix, or no node was accepted.
        consensus: sqrt((1/p) sum_j |y_j - mean|^2) over the parameters of all models after mixing.
    """

    zeta: float = 1.0
    consensus: float = 0.0


LOGGER = logging.getLogger("fedcore.network")


class Models:
    """The state of a network between rounds: the models, buffers for the next ones, the counters, the round's
    number."""

    def __init__(
        self, models: list[F32], counters: dict[str, npt.NDArray[np.integer[Any]]], round_number: int = 0
    ) -> None:
        self.models = models
        self.spares: list[F32 | None] = [None] * len(models)
        self.counters = counters
        self.round_number = round_number

    def spare(self, node: int) -> F32:
        """A buffer for the node's next model."""
        room = self.spares[node]
        if room is None:
            room = self.spares[node] = empty(len(self.models[node]))
        return room


class NetworkRound(Represented):
    """An open round of a network; get it from ``Network.open_round``, and use it as a context manager.

    An exception in the block, or ``abort()``, leaves the network as it was before ``open_round``. The end of the block
    finishes the round if it is still open. Several threads may add at once; they take turns.

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
        callbacks: Sequence[Callback],
    ) -> None:
        self.report: NetworkReport | None = None
        self.is_open = True
        self._layout, self._state, self._W, self._zeta, self._q = layout, state, W, zeta, q
        self._shares = np.ones(len(q)) if (q == q[0]).all() else q * len(q)  # p q_j
        self._limits, self._rates, self._callbacks = limits, SentRates(lr, limits), callbacks
        self._rates.sent(state.round_number)  # refuses one that has run out
        self._turn = Lock()
        self._sum: F32 = zeros(layout.n_parameters)  # of q_j (x_j - y_j)
        self._spare_sum: F32 = empty(layout.n_parameters)
        self._accepted: dict[int, tuple[float, int, float]] = {}  # |x_j - y_j|^2, K_j, eta_j K_j
        self._counters: list[dict[str, npt.NDArray[np.integer[Any]]]] = []
        self._rejected: list[tuple[int, str]] = []
        self._bytes = 0
        self._seconds = 0.0

    def _facts(self) -> dict[str, Any]:
        if not self.is_open:
            return {"is_open": False, "report": self.report}
        return {
            "round": self._state.round_number,
            "is_open": True,
            "heard": len(self._accepted),
            "refused": len(self._rejected),
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
        value: Any,
        *,
        steps: int,
        kind: Kind = "model",
        lr: float | None = None,
        round: int | None = None,
    ) -> bool:
        """Add one node's model after its local steps; the arguments are those of ``Update``.

        An invalid update (its vector, steps, lr or round) is rejected and listed in the report, and the round goes on;
        so is a second update of a node. A rejected node may try again. A difference or a gradient is measured from the
        node's own model.

        Returns:
            Whether the update is accepted.

        Raises:
            RoundError: the round is closed.
            UnknownClientError: there is no such node.
            UnknownNameError: ``kind`` is unknown.
        """
        return self.add_batch([Update(node, value, steps, lr=lr, round=round, kind=kind)])[0]

    def add_batch(self, updates: Sequence[Update]) -> list[bool]:
        """Add the models of some nodes; return which of them are accepted. Their ``examples`` have no effect.

        Raises:
            RangeError: a ``count`` is not 1.
        """
        return [self._add(update) for update in updates]

    @ieee
    def _add(self, update: Update) -> bool:
        with self._turn:
            began = time.perf_counter()
            self._require_open()
            node = self._check_caller(update)
            try:
                if known := node in self._accepted:
                    raise RangeError(SECOND)
                self._bytes += self._take(update, node)
            except FedcoreError as error:
                self._rejected.append((node, reason_of(error)))
                self._bytes += bytes_of(update.value)
            self._seconds += time.perf_counter() - began
            return not known and node in self._accepted

    @ieee
    def finish(self) -> NetworkReport:
        """Mix the models of the accepted nodes, and close the round.

        A round with rejected and without accepted nodes is a warning of the logger "fedcore.network".

        Raises:
            RoundError: the round is closed.
            DivergedError: a model would become infinite; the network stays as it was before the round.
        """
        with self._turn, span("round", self._state):
            began = time.perf_counter()
            self._require_open()
            self.is_open = False  # whatever happens
            accepted = sorted(self._accepted)
            left = self._W if len(accepted) == len(self._W) else among(self._W, accepted)
            mixed = [self._state.spare(node) for node in accepted]
            with span("diagnose"):
                diversity = self._diversity()  # before its sum becomes scratch
            with span("step", None, (mixed, mixed)):
                kernels.mix(mixed, left)
            models = list(self._state.models)
            for node, model in zip(accepted, mixed, strict=True):
                models[node] = model
            report = NetworkReport(
                round=self._state.round_number,
                accepted=tuple(self._accepted),
                rejected=tuple(self._rejected),
                steps=sum(steps for _, steps, _ in self._accepted.values()),
                norms=np.array([math.sqrt(square) / distance for square, _, distance in self._accepted.values()]),
                diversity=diversity,
                bytes=self._bytes,
                zeta=self._zeta_among(left),
                consensus=self._consensus(models),
            )
            with uninterrupted():
                for node in accepted:
                    self._state.spares[node] = self._state.models[node]
                self._state.models = models
                self._count()
                self._state.round_number += 1
                self.report = replace(report, seconds=self._seconds + time.perf_counter() - began)
            report = self.report
        warn_if_unheard(report, LOGGER)
        tell(self._callbacks, report, LOGGER)
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
        if update.kind not in KINDS:
            raise UnknownNameError.of("kind", update.kind, KINDS)
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
        with span("read", self._state):
            kind, y = update.kind, in_float32(read_vector(update, self._layout, apart=False)[0])
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
        q = self._q[node : node + 1]
        with span("fold", self._state, (self._sum, x, staged, self._spare_sum)):
            (square,) = kernels.accumulate(self._sum, [x[:p]], [staged[:p]], np.ones(1), q, out=self._spare_sum)
        if not math.sqrt(square) < LONGEST or not kernels.all_finite([staged[p:]])[0]:
            name = first_not_finite(staged, self._layout)
            raise RangeError(f"{NOT_FINITE}, in {name}" if name else NOT_FINITE)
        if (share := self._shares[node]) != 1:
            kernels.combine([staged[:p], x[:p]], [share, 1 - share], staged[:p])
        self._sum, self._spare_sum = self._spare_sum, self._sum
        self._accepted[node] = (float(square), int(update.steps), distance)
        self._counters.append(counters)
        return y.nbytes

    def _diversity(self) -> float | None:
        """sum (q_j / Q) |h_j|^2 / |sum (q_j / Q) h_j|^2 over the nodes heard, Q the sum of their q."""
        weight = sum(float(self._q[node]) for node in self._accepted)
        (square,) = kernels.squared_norms([self._sum])
        if square == 0:
            return None
        return (
            sum(float(self._q[node]) * accepted[0] for node, accepted in self._accepted.items())
            * weight
            / float(square)
        )

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
