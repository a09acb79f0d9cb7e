"""A round of a network: nodes send their models, and the end of the round mixes them."""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fedcore import kernels
from fedcore.algorithms.rates import Rate
from fedcore.arrays import F32, F64, empty, ieee, own_classes, zeros
from fedcore.errors import DivergedError, DtypeError, FedcoreError, RangeError, ShapeError, UnknownClientError
from fedcore.model import Layout
from fedcore.options import Callback, Limits
from fedcore.profiling import span
from fedcore.runtime import uninterrupted
from fedcore.server import ModelReader, OpenRound, OwnModel, Report, Update, one_call
from fedcore.sim.network.topology import Topology, second_eigenvalue
from fedcore.validation import describe_integers, is_integer, rejection_reason, short_repr

ROUNDING = 1e-6
"""Tolerance in the check that a matrix, which may be float32, is symmetric and doubly stochastic."""
DISCONNECTED = 1 - 1e-12
"""The minimum zeta of a matrix that does not mix in float64; a ring of ten million nodes has a lower zeta."""


def mixing_matrix(W: Any, p: int) -> tuple[F64, float]:
    """Return a checked W as float64[p, p], and its zeta."""
    W = W.W if isinstance(W, Topology) else W
    W = W.toarray() if hasattr(W, "toarray") else W
    W = own_classes("W", W)
    try:
        array = np.asarray(W)
    except ValueError:  # rows of different lengths
        raise ShapeError(f"W: expected [{p}, {p}], got rows of different lengths") from None
    if array.shape != (p, p):
        raise ShapeError(f"W: expected [{p}, {p}], one row for each model, got {list(array.shape)}")
    if array.dtype.kind not in "fiu":
        raise DtypeError(f"W: expected float32 or float64, got {array.dtype}")
    matrix = array.astype(np.float64)
    if not (matrix >= 0).all() or not np.isfinite(matrix).all():
        raise RangeError("W: all entries must be finite and >= 0")
    if np.abs(matrix - matrix.T).max() > ROUNDING:
        raise RangeError("W: the matrix must be symmetric")
    sums = matrix.sum(axis=1)
    row = int(np.abs(sums - 1).argmax())
    if abs(sums[row] - 1) > ROUNDING:
        raise RangeError(f"W: each row must add up to 1, but row {row} adds up to {sums[row]:.9g}")
    zeta = second_eigenvalue(matrix)
    if zeta >= DISCONNECTED:
        raise RangeError(f"W: zeta={zeta:.9g}: must be below 1, so that all models mix")
    return matrix, zeta


def among(W: F64, accepted: Sequence[int]) -> F64:
    """Return the matrix of the accepted nodes, in which a node keeps the weights of its absent neighbours.

    W'_ij = W_ij for i != j, and W'_ii = W_ii + sum of W_ij over the absent nodes j. So W' is symmetric, and its rows
    and columns add up to 1 like those of W. Mixing by W' keeps the mean of the models.

    >>> among(np.full((3, 3), 1 / 3), [0, 2]).round(3).tolist()
    [[0.667, 0.333], [0.333, 0.667]]
    """
    present = np.array(accepted, np.int64)
    absent = np.setdiff1d(np.arange(len(W)), present)
    left = W[np.ix_(present, present)]
    left[np.diag_indices_from(left)] += W[np.ix_(present, absent)].sum(axis=1)
    return left


@dataclass(frozen=True, repr=False)
class NetworkReport(Report):
    """The outcome of a network's round: a ``Report``, and the distance between the models.

    The fields of ``Report`` describe the accepted nodes. h_j is computed from node j's own model, and its weight in the
    diversity is q_j. A network has no server step, so gamma is 0.

    Attributes:
        zeta: max(|lambda_2|, |lambda_k|) of the matrix that mixed the k accepted nodes. It is 1 if the matrix has two
            parts that do not mix, or if no node was accepted.
        consensus: sqrt((1/p) sum_j |y_j - mean|^2) over the parameters of all models after mixing.
    """

    zeta: float = 1.0
    consensus: float = 0.0


LOGGER = logging.getLogger("fedcore.sim.network")


SECOND = "update: the round already has an update of this client; only the first counts"


class NetworkState:
    """What the rounds of a network read and change; see ``Network``.

    Attributes:
        rate, limits: of the nodes' updates.
        vectors: the nodes' models.
        counters: the common integer tensors of the models, by name.
        spares: memory for the nodes' next models.
    """

    layout: Layout
    W: F64
    zeta: float
    q: F64
    rate: Rate
    limits: Limits
    callbacks: Sequence[Callback]
    vectors: list[F32]
    counters: dict[str, Any]
    round_number: int
    spares: dict[int, F32]

    def spare(self, node: int) -> F32:
        """Return memory for the node's next model."""
        if node not in self.spares:
            self.spares[node] = empty(self.layout.n)
        return self.spares[node]


class NetworkRound(OpenRound):
    """A round of a network, from ``Network.open_round``; a context manager.

    The end of the block finishes the round if it is still open. An exception in the block, or ``abort()``, rolls the
    round back. Several threads may add updates; each call waits for the call before it.

    Attributes:
        report: the NetworkReport of a finished round, else None.
        is_open: whether updates can still be added.
    """

    report: NetworkReport | None

    def __init__(self, network: NetworkState) -> None:
        super().__init__(network.round_number, network.callbacks, LOGGER)
        self._network, q, p = network, network.q, network.layout.n_parameters
        self._reader = ModelReader(network.layout, network.limits, network.rate, network.round_number)
        self._shares = np.ones(len(q)) if (q == q[0]).all() else q * len(q)  # p q_j
        self._sum: F32 = zeros(p)  # of q_j (x_j - y_j)
        self._spare_sum: F32 = empty(p)
        self._accepted: dict[int, tuple[float, OwnModel]] = {}  # |x_j - y_j|^2, and the update

    def _counts(self) -> dict[str, int]:
        return {"accepted": len(self._accepted), "rejected": len(self._rejected)}

    def add(
        self,
        node: int,
        value: Any,
        *,
        steps: int,
        kind: Literal["model", "delta", "gradient"] = "model",
        lr: float | None = None,
        round: int | None = None,
    ) -> bool:
        """Add a node's model after its local steps; the arguments are those of ``Update``.

        The round rejects an update with an invalid vector, steps, lr or round, and a second update of an accepted node.
        The report lists rejected updates, and the round continues. A rejected node may send a new update. Deltas and
        gradients are relative to the node's own model.

        Returns:
            Whether the update is accepted.

        Raises:
            RoundError: the round is closed.
            UnknownClientError: the node does not exist.
            UnknownNameError: ``kind`` is unknown.
        """
        return self.add_batch([Update(node, value, steps, lr=lr, round=round, kind=kind)])[0]

    def add_batch(self, updates: Sequence[Update]) -> list[bool]:
        """Add the updates of several nodes and return which are accepted.

        ``Update.examples`` and ``Update.update_id`` have no effect.
        """
        return [self._add(update) for update in updates]

    @ieee
    @one_call
    def _add(self, update: Update) -> bool:
        began = time.perf_counter()
        self._require_open()
        node = self._check_caller(update)
        try:
            if known := node in self._accepted:
                raise RangeError(SECOND)
            self._bytes += self._take(update, node)
        except FedcoreError as error:
            self._rejected.append((node, rejection_reason(error)))
            self._bytes += update.nbytes
        self._seconds += time.perf_counter() - began
        return not known and node in self._accepted

    @ieee
    @one_call
    def finish(self) -> NetworkReport:
        """Mix the models of the accepted nodes, and close the round.

        Log a warning to "fedcore.sim.network" if all updates were rejected.

        Raises:
            RoundError: the round is closed.
            DivergedError: a model would become infinite; the round is rolled back.
        """
        network = self._network
        with span("round", network):
            began = time.perf_counter()
            self._require_open()
            self.is_open = False
            accepted, W = sorted(self._accepted), network.W
            left = W if len(accepted) == len(W) else among(W, accepted)
            mixed = [network.spare(node) for node in accepted]
            with span("diagnose"):
                diversity = self._diversity()  # before its sum is overwritten
            with span("step", None, (mixed, mixed)):
                kernels.mix(mixed, left)
            models = list(network.vectors)
            for node, model in zip(accepted, mixed, strict=True):
                models[node] = model
            report = NetworkReport(
                round=network.round_number,
                accepted=tuple(self._accepted),
                rejected=tuple(self._rejected),
                steps=sum(own.steps for _, own in self._accepted.values()),
                norms=np.array([math.sqrt(square) / own.distance for square, own in self._accepted.values()]),
                diversity=diversity,
                bytes=self._bytes,
                zeta=self._zeta_among(left),
                consensus=self._consensus(models),
            )
            counters = [own.counters for _, own in self._accepted.values()]
            with uninterrupted():
                network.spares |= {node: network.vectors[node] for node in accepted}
                network.vectors = models
                network.counters = self._reader.settle(network.counters, counters)
                network.round_number += 1
                self.report = replace(report, seconds=self._seconds + time.perf_counter() - began)
        self._announce(self.report)
        return self.report

    def _check_caller(self, update: Update) -> int:
        """Return the update's node; raise an error for the caller's mistakes."""
        p = len(self._network.W)
        if not is_integer(update.client, 0, p - 1):
            raise UnknownClientError(f"node={short_repr(update.client)}: must be {describe_integers(0, p - 1)}")
        update.require_kind()
        if not is_integer(update.count, 1, 1):
            raise RangeError(f"count={update.count!r}: must be 1, because a node is drawn once")
        return int(update.client)

    def _take(self, update: Update, node: int) -> int:
        """Stage x_j + p q_j (y_j - x_j), add q_j (x_j - y_j) to the sum, and return the number of bytes sent."""
        network = self._network
        x, staged, p = network.vectors[node], network.spare(node), network.layout.n_parameters
        with span("read", network):
            own = self._reader.read(update, x, network.counters, staged)
        q = network.q[node : node + 1]
        with span("fold", network, (self._sum, x, staged, self._spare_sum)):
            (square,) = kernels.accumulate(self._sum, [x[:p]], [staged[:p]], np.ones(1), q, out=self._spare_sum)
        self._reader.require_measured(staged, square)
        if (share := self._shares[node]) != 1:
            kernels.combine([staged[:p], x[:p]], [share, 1 - share], staged[:p])
        self._sum, self._spare_sum = self._spare_sum, self._sum
        self._accepted[node] = float(square), own
        return own.bytes

    def _diversity(self) -> float | None:
        """Return sum (q_j / Q) |h_j|^2 / |sum (q_j / Q) h_j|^2 over the accepted nodes, Q = sum of their q_j."""
        (square,) = kernels.squared_norms([self._sum])
        if square == 0:
            return None
        weights = {node: float(self._network.q[node]) for node in self._accepted}
        squares = sum(weight * self._accepted[node][0] for node, weight in weights.items())
        return squares * sum(weights.values()) / float(square)

    def _zeta_among(self, left: F64) -> float:
        if len(left) == len(self._network.W):
            return self._network.zeta
        return second_eigenvalue(left) if len(left) else 1.0

    def _consensus(self, models: list[F32]) -> float:
        """Return the root mean square distance of the models from their mean; raise if a model is not finite."""
        p, count = self._network.layout.n_parameters, len(models)
        parameters, weights = [model[:p] for model in models], np.full(count, 1 / count)
        mean = kernels.weighted_sum(parameters, weights.astype(np.float32), self._sum, accumulate="float64")
        squares = kernels.accumulate(None, [mean] * count, parameters, np.ones(count), weights, out=self._spare_sum)
        total, number = float(squares @ weights), self._network.round_number
        if not math.isfinite(total):
            raise DivergedError(f"round {number}: mixing would make a model infinite; lower the rates")
        for name in filter(None, map(self._reader.infinite_tensor, models)):
            raise DivergedError(f"round {number}: mixing would make {name} infinite in its dtype; lower the rates")
        return math.sqrt(total)
