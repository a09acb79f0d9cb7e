"""A network of nodes that train models and mix them with their neighbours' models."""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fedcore import kernels, options
from fedcore.algorithms.rates import Rate, as_rate, rate_at, rate_of_steps
from fedcore.arrays import F32, Library, copied, empty, freeze, ieee, own_classes, read_only
from fedcore.errors import ArrayError, CheckpointError, DtypeError, FedcoreError, RangeError, ShapeError
from fedcore.model import Layout
from fedcore.options import Callback, Limits
from fedcore.profiling import span, timed
from fedcore.rules import Chain
from fedcore.runtime import Unpicklable
from fedcore.server import RoundLock, Update
from fedcore.sim.network.round import NetworkReport, NetworkRound, NetworkState, mixing_matrix
from fedcore.store import ClientStore
from fedcore.validation import Represented, check_integer, is_integer

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
        q: Sequence[float] | npt.NDArray[np.float64] | None = None,
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


def _weights(q: Sequence[float] | npt.NDArray[np.float64] | None, count: int) -> npt.NDArray[np.float64]:
    q = own_classes("q", q)
    try:
        weights = np.full(count, 1 / count) if q is None else np.array(np.asarray(q), np.float64)
    except (TypeError, ValueError):
        raise DtypeError(f"q={q!r}: must be {count} numbers, one for each model") from None
    if weights.shape != (count,):
        raise ShapeError(f"q: expected {count} numbers, one for each model, got shape {list(weights.shape)}")
    if not (weights >= 0).all() or not 0 < weights.sum() < np.inf:
        raise RangeError(f"q={weights.tolist()}: must be finite numbers >= 0 with a sum > 0")
    weights /= weights.sum()
    weights.flags.writeable = False
    return weights
