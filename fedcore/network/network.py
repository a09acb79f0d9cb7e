"""Networked local SGD: every node trains a model of its own and mixes it with its neighbours'."""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.algorithms.rates import Rate, as_rate, rate_at, rate_of_steps
from fedcore.arguments import is_whole, whole
from fedcore.arrays import F32, Library, copied, empty, ieee
from fedcore.errors import ArrayError, CheckpointError, DtypeError, FedcoreError, RangeError, RoundError, ShapeError
from fedcore.model import Layout
from fedcore.network.round import Models, NetworkReport, NetworkRound, mixing_matrix
from fedcore.options import (
    Callback,
    Limits,
    check_rate,
    describe,
    limits_from_state,
    limits_to_state,
    next_rate,
    revive,
)
from fedcore.pickling import Unpicklable
from fedcore.profiling import span, timed
from fedcore.representation import Represented
from fedcore.rules import Chain
from fedcore.server import Update
from fedcore.store import ClientStore

WHAT = "a fedcore network"
"""The kind of a saved network's folder."""


class Network(Represented, Unpicklable):
    """NFSGD(E, W, q): p nodes with a model each, y_j <- sum_i W_ji y_i after every E local steps, and no server.

    It is used like a ``Server``: the nodes add their updates to a round, and ``finish`` mixes them. Each update has its
    number of steps, so the nodes choose E. An absent node keeps its model, and its neighbours keep their weight for it:
    W'_ij = 0 for i or j absent, and the missing weight goes to the diagonal, so that W' is symmetric and doubly
    stochastic as W is.

    The models' mean moves by sum_j q_j (y_j - x_j), so that the network minimises sum_j q_j f_j: before mixing, a
    node's local steps count p q_j fold, x_j + p q_j (y_j - x_j). With equal weights that is y_j.

    The paper prints, in line 9 of its algorithm, w_j instead of the neighbours' models and a factor q_i. Its analysis
    needs the factor for that sum (eqs. 74, 75); as printed it would shrink the models instead of their steps.

    Args:
        models: p models, each float32[n] or anything ``Layout.of`` takes, of one layout; copied. Equal models, as the
            paper has them, are ``[x0] * p``.
        W: a ``Topology``, or float32[p, p] or float64[p, p] (or a sparse matrix): symmetric, rows that add up to 1,
            no entry below 0, zeta < 1.
        lr: eta, the rate of the local steps: a number, or a function of the round.
        q: p numbers >= 0, the nodes' weights in the objective, the output and the gradient diversity; scaled to the sum
            1. Default: 1/p. A rate must be stable p q_j fold.
        limits: ``max_steps`` and ``max_client_lr`` of a node's update.
        callbacks: functions that are called with the ``NetworkReport`` of each finished round, as a ``Server``'s are.

    Attributes:
        callbacks: as given; they may be replaced between rounds.

    Raises:
        ShapeError, DtypeError, ArrayError, RangeError: an argument is not as above.

    Determinism: float32 in the order of the nodes: the same bits for any order of updates, on every ISA level and
        thread count. Only the diversity, a float32 sum in the order of ``add``, depends on that order.
    Cost: 8 p n bytes. A round reads 16 n and writes 8 n bytes for each accepted node, reads and writes 4 n more to mix
        it, and reads 8 p n for the consensus distance; with absent nodes it also computes eigenvalues.

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
            raise ArrayError(f"models: expected a list or tuple of at least one, got {type(models).__name__}")
        if not isinstance(limits, Limits):
            raise RangeError(f"limits={limits!r}: give a fedcore.Limits")
        self.layout = Layout.of(models[0])
        if self.layout.n_parameters < 1:
            raise ShapeError(f"models[0]: expected at least one parameter, got {self.layout.n_parameters}")
        self.W, self.zeta = mixing_matrix(W, len(models))
        self.W.flags.writeable = False
        self.q = _weights(q, len(models))
        self._lr, self.callbacks, self._limits = as_rate(lr), tuple(callbacks), limits
        flat = [self.layout.flatten(model, empty(self.layout.n)) for model in models]
        for node, finite in enumerate(kernels.all_finite(flat)):
            if not finite:
                raise ArrayError(f"models[{node}]: expected finite numbers, got a NaN or an infinity")
        self._state = Models(flat, self.layout.read_counters(models[0]))
        # Weak, so that an abandoned round does not stay open.
        self._round: ReferenceType[NetworkRound] | None = None

    _instead = "write it by save(path), and read it by Network.load(path)"

    def _facts(self) -> dict[str, Any]:
        return {"nodes": len(self.W), "n": self.layout.n, "round_number": self.round_number, "zeta": self.zeta}

    @property
    def models(self) -> tuple[F32, ...]:
        """The nodes' models, float32[n] each: read-only views, valid until the next round is finished."""
        views = tuple(model.view() for model in self._state.models)
        for view in views:
            view.flags.writeable = False
        return views

    @property
    def round_number(self) -> int:
        """The number of finished rounds, which is the number of the next."""
        return self._state.round_number

    @property
    def lr(self) -> float:
        """eta, the rate of the local steps in the next round; of the first step, if they differ."""
        return rate_at(self._lr, self.round_number)

    @property
    def lr_of_step(self) -> Callable[[int], float] | None:
        """The rate of step k of the next round if they differ, else None; see ``Broadcast.lr_of_step``."""
        return rate_of_steps(self._lr, self.round_number)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the network after its last finished round to a folder, which ``load`` opens.

        Args:
            path: a new or empty folder, or an older copy, which stays until the new one is complete.

        Raises:
            StoreError: the folder has other content, or is in use, or the disk is full.

        Cost: copies the models once in memory, and writes them.
        """
        state, rows = self._state, ClientStore(len(self._state.models), self.layout.n)
        for node, model in enumerate(state.models):
            row = rows.stage(node)
            assert isinstance(row, np.ndarray)  # as rows of float32 are
            row[:] = model
        rows.commit(round=state.round_number)
        rows.save(
            path,
            vectors={"W": self.W.ravel(), "q": self.q, **{f"counter/{k}": v for k, v in state.counters.items()}},
            state={
                "what": WHAT,
                "layout": self.layout.to_state(),
                "lr": describe("lr", self._lr),
                "next_rate": next_rate("lr", self._lr, state.round_number),
                "limits": limits_to_state(self._limits, Chain()),
                "round_number": state.round_number,
            },
        )

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, lr: float | Rate | None = None, callbacks: Sequence[Callback] = ()
    ) -> "Network":
        """Load a saved network; its next rounds are bit for bit those of the saved one.

        Args:
            path: a folder of ``save``.
            lr: the rate, if it is the caller's code.
            callbacks: as for a new network.

        Raises:
            StoreError: there is no such folder, or it has a newer version.
            CorruptionError: a file is damaged.
            CheckpointError: it is not a network's, or the rate is missing or not the saved one.
        """
        with ClientStore.open(path, readonly=True) as saved:
            state, vectors = saved.state, {name: np.array(saved.vector(name)) for name in saved.vector_names()}
            if not isinstance(state, dict) or state.get("what") != WHAT:
                raise CheckpointError(f"{path}: expected the folder of a network, got another store")
            models = [copied(saved.read(node)) for node in range(len(saved.registry))]
        try:
            rate = revive("lr", state["lr"], None if lr is None else as_rate(lr))
            check_rate("lr", rate, state.get("next_rate"), state["round_number"])
            network = cls(models, vectors["W"].reshape(len(models), -1), lr=rate, q=vectors["q"], callbacks=callbacks)
            network._continue(state, vectors, models)
        except CheckpointError:
            raise
        except (FedcoreError, LookupError, TypeError, ValueError) as error:  # sealed, but not by ``save``
            raise CheckpointError(f"{path}: expected what save wrote, got {error!r}") from None
        return network

    def _continue(self, state: dict[str, Any], vectors: dict[str, npt.NDArray[Any]], models: list[F32]) -> None:
        """Restore the rest of a saved network.

        Raises:
            RangeError, LookupError, TypeError, ValueError: a value is not one of ``save``.
        """
        layout, number = Layout.from_state(state["layout"]), state["round_number"]
        counters = {k.removeprefix("counter/"): v for k, v in vectors.items() if k.startswith("counter/")}
        if (
            layout.n != self.layout.n
            or not is_whole(number, 0, 2**63)
            or counters.keys() != {piece.name for piece in layout.outside}
        ):
            raise RangeError(f"layout, counters, round: expected those of {self.layout.n} elements, got others")
        if not np.allclose(vectors["q"], self.q, rtol=1e-9, atol=0):
            raise RangeError(f"q: expected weights with the sum 1, got {vectors['q'].sum():g}")
        self.layout, self._limits = layout, limits_from_state(state)[0]
        self.q = vectors["q"]  # not scaled once more
        self.q.flags.writeable = False
        self._state = Models(models, counters, number)

    @ieee
    def output(self, out: F32 | None = None) -> F32:
        """Return the network's output, sum_j q_j y_j.

        Args:
            out: float32[n], written in place. Default: a new array.

        Returns:
            float32[n], ``out`` if it was given.

        Cost: reads 4 p n bytes.
        """
        total: F32 = kernels.weighted_sum(self._state.models, self.q.astype(np.float32), out, accumulate="float64")
        return total

    def tensors(self, node: int | None = None, *, library: Library | None = None) -> Any:
        """Return one node's model by name, or the output without a node, as copies; counters keep their integer types.

        Args:
            library: "numpy" or "torch". Default: that of the models.

        Raises:
            RangeError: there is no such node.
        """
        if node is not None:
            node = whole("node", node, 0, len(self.W) - 1)
        flat = self.output() if node is None else copied(self._state.models[node])
        return self.layout.tensors(flat, self._state.counters, library)

    def open_round(self) -> NetworkRound:
        """Start a round; there is one at a time.

        Raises:
            RoundError: one is open already.
        """
        before = self._round() if self._round is not None else None
        if before is not None and before.is_open:
            raise RoundError(
                "round: expected one open at a time, found that"
                f" round {self.round_number} is open already: finish or abort it"
            )
        opened = NetworkRound(
            self.layout, self._state, self.W, self.zeta, self.q, self._lr, self._limits, self.callbacks
        )
        self._round = ref(opened)
        return opened

    def round(self, updates: Iterable[Update]) -> NetworkReport:
        """Run a round with an iterable of updates, which may be made while they are read.

        Errors are those of ``NetworkRound.add`` and ``finish``; they leave the network as it was.
        """
        with span("round", self._state), self.open_round() as opened:
            for update in timed("clients", iter(updates)):
                opened.add_batch([update])
            return opened.finish()


def _weights(q: Sequence[float] | npt.NDArray[np.float64] | None, count: int) -> npt.NDArray[np.float64]:
    try:
        weights = np.full(count, 1 / count) if q is None else np.array(q, np.float64)
    except (TypeError, ValueError):
        raise DtypeError(f"q: expected {count} numbers, one a model, got {q!r}") from None
    if weights.shape != (count,):
        raise ShapeError(f"q: expected {count} numbers, one a model, got shape {list(weights.shape)}")
    if not (weights >= 0).all() or not 0 < weights.sum() < np.inf:
        raise RangeError(f"q: expected finite numbers >= 0 with a sum > 0, got {weights.tolist()}")
    weights /= weights.sum()
    weights.flags.writeable = False
    return weights
