"""A network of nodes that train models and mix them with their neighbours' models, and its rounds."""

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np

from fedcore import errors, kernels, options, validation
from fedcore.algorithms.rates import Rate, as_rate, rate_at, rate_of_steps
from fedcore.arrays import F32, F64, Library, copied, empty, freeze, ieee, own_classes, read_only, zeros
from fedcore.errors import ArrayError, CheckpointError, DivergedError, DtypeError, FedcoreError, RangeError, ShapeError
from fedcore.model import Layout
from fedcore.options import Callback, Limits
from fedcore.profiling import span, timed
from fedcore.rules import Chain
from fedcore.runtime import Unpicklable, uninterrupted
from fedcore.server import ModelReader, OpenRound, OwnModel, Report, RoundLock, Update, one_call
from fedcore.sim.network.topology import Topology, second_eigenvalue
from fedcore.store import ClientStore
from fedcore.validation import Represented, check_integer, describe_integers, is_integer, rejection_reason, short_repr

ROUNDING = 1e-6
"""Tolerance in the check that a matrix, which may be float32, is symmetric and doubly stochastic."""
DISCONNECTED = 1 - 1e-12
"""The minimum zeta of a matrix that does not mix in float64; a ring of ten million nodes has a lower zeta."""


def mixing_matrix(W: Any, p: int) -> tuple[F64, float]:
    """Return a checked W as float64[p, p], and its zeta."""
    W = W.W if isinstance(W, Topology) else W
    W = own_classes("W", W.toarray() if hasattr(W, "toarray") else W)
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
                zeta=network.zeta if left is W else second_eigenvalue(left) if accepted else 1.0,
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
            raise errors.UnknownClientError(f"node={short_repr(update.client)}: must be {describe_integers(0, p - 1)}")
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


WHAT = "a fedcore network"
"""The value of ``what`` in a saved network's state."""


class Network(NetworkState, Represented, Unpicklable):
    """NFSGD(E, W, q): p nodes, each with a model, and no server. After E local steps y_j <- sum_i W_ji y_i.

    Use a ``Network`` like a ``Server``: nodes add their updates to a round, and ``finish`` mixes the models. Each
    update reports its number of steps, so the nodes choose E. An absent node keeps its model. W'_ij = 0 if i or j is
    absent, and W'_ii includes W_ij of each absent j. So W' is symmetric and doubly stochastic like W.

    Before mixing, a node's model is x_j + p q_j (y_j - x_j), which is y_j for equal weights. So the mean of the models
    moves by sum_j q_j (y_j - x_j), and the network minimises sum_j q_j f_j.

    Line 9 of the paper's algorithm prints w_j in place of the neighbours' models, and a factor q_i. The analysis needs
    that factor on the local steps (eqs. 74, 75). As printed, it would shrink the models.

    Args:
        models: p models of one layout, each float32[n] or any form that ``Layout.of`` accepts; copied. The paper starts
            from equal models, ``[x0] * p``.
        W: a ``Topology``, or a dense or sparse float32[p, p] or float64[p, p]. It must be symmetric, with entries >= 0,
            rows that add up to 1, and zeta < 1.
        lr: eta, the rate of the local steps: a number, or a function of the round.
        q: p numbers >= 0, scaled to the sum 1: the nodes' weights in the objective, the output and the gradient
            diversity. The product of ``lr`` and p q_j must be a stable rate. Default: 1/p.
        limits: ``max_steps`` and ``max_client_lr`` of a node's update.
        callbacks: functions that are called with the ``NetworkReport`` of each finished round, as for ``Server``.

    Attributes:
        callbacks: as given. They may be replaced between rounds.
        layout: the layout of all models.
        W: the mixing matrix, float64[p, p], read-only.
        zeta: max(|lambda_2|, |lambda_p|) of W.
        q: the nodes' weights, float64[p], read-only.
        round_number: the number of finished rounds, which is the index of the next round.

    Determinism: float32 operations in the order of the nodes; bit-identical for any order of updates, ISA level and
        thread count. Only the diversity, a float32 sum in the order of ``add``, depends on that order.
    Cost: 8 p n bytes. For each accepted node, a round reads 16 n and writes 8 n bytes, and mixing reads and writes 4 n
        more. The consensus distance reads 8 p n bytes. A round with absent nodes also computes eigenvalues.

    Reference: Haddadpour, Mahdavi, "On the Convergence of Local Descent Methods in Federated Learning", 2019,
    Algorithm 2.

    >>> network = Network([np.zeros(1, np.float32)] * 2, [[0.75, 0.25], [0.25, 0.75]], lr=0.1)
    >>> report = network.round([Update(0, np.float32([4]), steps=1), Update(1, np.float32([8]), steps=1)])
    >>> network.models
    (array([5.], dtype=float32), array([7.], dtype=float32))
    >>> network.output(), report.zeta, report.consensus
    (array([6.], dtype=float32), 0.5, 1.0)
    """

    @ieee
    def __init__(
        self,
        models: Sequence[Any],
        W: Any,
        *,
        lr: float | Rate,
        q: Sequence[float] | F64 | None = None,
        limits: Limits = Limits(),  # noqa: B008  # a frozen value
        callbacks: Sequence[Callback] = (),
    ) -> None:
        if not isinstance(models, list | tuple) or not models:
            raise ArrayError("models: must be a list or tuple of at least one model")
        self.layout = layout = Layout.of(models[0])
        if layout.n_parameters < 1:
            raise ShapeError("models[0]: has no parameters")
        self.W, self.zeta = mixing_matrix(W, len(models))
        self.W.flags.writeable = False
        self.q = _weights(q, len(models))
        self.rate, self.limits = as_rate(lr), options.as_limits(limits)
        self.callbacks, self.round_number = tuple(callbacks), 0
        self.vectors = [layout.flatten(model, empty(layout.n)) for model in models]
        for node, finite in enumerate(kernels.all_finite(self.vectors)):
            if not finite:
                raise ArrayError(f"models[{node}]: a number is NaN or infinite")
        self.counters, self._lock = layout.read_counters(models[0]), RoundLock()
        self.spares = {}

    _instead = "use save(path) and Network.load(path)"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        network = super().__deepcopy__(memo)
        for weights in (network.W, network.q):
            freeze(weights)
        return network

    def _facts(self) -> dict[str, Any]:
        return {"nodes": len(self.W), "n": self.layout.n, "round_number": self.round_number, "zeta": self.zeta}

    @property
    def models(self) -> tuple[F32, ...]:
        """The nodes' models, float32[n] each; read-only views, valid until the next round is finished."""
        return tuple(map(read_only, self.vectors))

    @property
    def lr(self) -> float:
        """eta, the rate of the next round's local steps, or of its first step if the rates differ."""
        return rate_at(self.rate, self.round_number)

    @property
    def lr_of_step(self) -> Callable[[int], float] | None:
        """The rates of the next round's steps as a function, or None if all are equal; see ``Broadcast.lr_of_step``."""
        return rate_of_steps(self.rate, self.round_number)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the state after the last finished round to a folder.

        Args:
            path: a new or empty folder, or that of an earlier save, which stays until the new save is complete.

        Raises:
            StoreError: the folder has other content or is in use, or the disk is full.

        Cost: copies the models once in memory, and writes them.
        """
        rows, lr, number = ClientStore(len(self.vectors), self.layout.n), self.rate, self.round_number
        for node, model in enumerate(self.vectors):
            row = rows.stage(node)
            assert isinstance(row, np.ndarray)  # true for float32 rows
            row[:] = model
        rows.commit(round=number)
        vectors = {"W": self.W.ravel(), "q": self.q, **{f"counter/{k}": v for k, v in self.counters.items()}}
        saved: dict[str, Any] = {"what": WHAT, "layout": self.layout.to_state(), "lr": options.describe("lr", lr)}
        saved |= {"next_rate": options.next_rate("lr", lr, number)}
        saved |= {"limits": options.limits_to_state(self.limits, Chain()), "round_number": number}
        rows.save(path, vectors=vectors, state=saved)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, lr: float | Rate | None = None, callbacks: Sequence[Callback] = ()
    ) -> Self:
        """Load a saved network; its further rounds are bit-identical to those of the original.

        Args:
            path: a folder written by ``save``.
            lr: the rate; required if the saved network's rate is user code.
            callbacks: as for a new network.

        Raises:
            StoreError: the folder does not exist, or was written by a newer version.
            CorruptionError: a file is damaged.
            CheckpointError: the folder is not that of a network, or ``lr`` is missing or differs from the saved rate.
        """
        with ClientStore.open(path, readonly=True) as saved:
            state, vectors = saved.state, {name: np.array(saved.vector(name)) for name in saved.vector_names()}
            if not isinstance(state, dict) or state.get("what") != WHAT:
                raise CheckpointError(f"{path}: is not the folder of a network")
            models = [copied(saved.read(node)) for node in range(len(saved.registry))]
        try:
            rate = options.revive("lr", state["lr"], None if lr is None else as_rate(lr))
            number, q, limits = state["round_number"], vectors["q"], options.limits_from_state(state)[0]
            options.check_rate("lr", rate, state.get("next_rate"), number)
            W = vectors["W"].reshape(len(models), -1)
            network = cls(models, W, lr=rate, q=q, limits=limits, callbacks=callbacks)
            layout = Layout.from_state(state["layout"])
            counters = {k.removeprefix("counter/"): v for k, v in vectors.items() if k.startswith("counter/")}
            if layout.n != network.layout.n or counters.keys() != {piece.name for piece in layout.outside}:
                raise RangeError("layout: does not fit the models and counters")
            if not is_integer(number, 0, 2**63) or not np.allclose(q, network.q, rtol=1e-9, atol=0):
                raise RangeError(f"round_number={number!r}, sum of q {q.sum():g}: one of them is invalid")
        except CheckpointError:
            raise
        except (FedcoreError, LookupError, TypeError, ValueError) as error:  # intact files that ``save`` did not write
            raise CheckpointError(f"{path}: does not hold the state of a network: {error!r}") from None
        q.flags.writeable = False
        network.layout, network.q = layout, q  # q is not scaled again
        network.vectors, network.counters, network.round_number = models, counters, number
        return network

    @ieee
    def output(self, out: F32 | None = None) -> F32:
        """Return the network's output sum_j q_j y_j, float32[n], in ``out`` if given.

        Cost: reads 4 p n bytes.
        """
        total: F32 = kernels.weighted_sum(self.vectors, self.q.astype(np.float32), out, accumulate="float64")
        return total

    def tensors(self, node: int | None = None, *, library: Library | None = None) -> Any:
        """Return copies of a model's tensors by name; counters keep their integer dtypes.

        Args:
            node: the node whose model to return. Default: the network's output.
            library: "numpy" or "torch". Default: that of the models.

        """
        if node is not None:
            node = check_integer("node", node, 0, len(self.W) - 1)
        flat = self.output() if node is None else copied(self.vectors[node])
        return self.layout.tensors(flat, self.counters, library)

    def open_round(self) -> NetworkRound:
        """Open a round; raise RoundError if a round is already open."""
        return self._lock.open(self.round_number, lambda: NetworkRound(self))

    def round(self, updates: Iterable[Update]) -> NetworkReport:
        """Run a round with an iterable of updates, which may be lazy.

        The errors are those of ``NetworkRound.add`` and ``finish``. An error rolls the round back.
        """
        with span("round", self), self.open_round() as opened:
            for update in timed("clients", iter(updates)):
                opened.add_batch([update])
            return opened.finish()


def _weights(q: Sequence[float] | F64 | None, count: int) -> F64:
    weights: F64 = np.full(count, 1 / count) if q is None else validation.numbers("q", q, np.float64)
    if weights.shape != (count,):
        raise ShapeError(f"q: expected {count} numbers, one for each model, got shape {list(weights.shape)}")
    if not (weights >= 0).all() or not 0 < weights.sum() < np.inf:
        raise RangeError(f"q={weights.tolist()}: must be finite numbers >= 0 with a sum > 0")
    weights /= weights.sum()
    weights.flags.writeable = False
    return weights
