"""Networked local SGD: every node trains a model of its own and mixes it with its neighbours'."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.algorithms.descriptions import check_rate, describe, next_rate, revive
from fedcore.arguments import is_whole, whole
from fedcore.errors import ArrayError, CheckpointError, DtypeError, FedcoreError, RangeError, RoundError, ShapeError
from fedcore.float_mode import ieee
from fedcore.layout import Layout
from fedcore.libraries import Library
from fedcore.memory import copied, empty
from fedcore.network.mixing import mixing_matrix
from fedcore.network.report import NetworkReport
from fedcore.network.round import Models, NetworkRound
from fedcore.pickling import Unpicklable
from fedcore.rates import Rate, as_rate, rate_at, rate_of_steps
from fedcore.representation import Represented
from fedcore.server import Update
from fedcore.server.limits import Limits
from fedcore.server.report import OnReport
from fedcore.store import ClientStore
from fedcore.typing import F32

WHAT = "a fedcore network"
"""What the folder of a saved one says that it is."""


class Network(Represented, Unpicklable):
    """NFSGD(E, W, q): p nodes with a model each, y_j <- sum_i W_ji y_i after every E local steps, and no server.

    It is used like a ``Server``: the nodes heard in a round add their updates, and ``finish`` mixes. What E is, is
    the nodes' business: each update says how many steps it took. A node that is not heard keeps its model, and its
    neighbours keep the weight that they would have given it: W'_ij = 0 for i or j away, and the missing weight goes to
    the diagonal, so that W' is symmetric and doubly stochastic as W is.

    The models' mean moves by sum_j q_j (y_j - x_j), so that the network minimises sum_j q_j f_j: what a node did in its
    local steps counts p q_j fold, x_j + p q_j (y_j - x_j), before it is mixed. With equal weights that is y_j.

    The paper prints, in line 9 of its algorithm, w_j instead of the neighbours' models and a factor q_i. The factor
    is what its analysis needs for that sum (eqs. 74, 75); as printed it would shrink the models and not their steps.

    Args:
        models: p models, each float32[n] or anything ``Layout.of`` takes, of one layout; copied. Equal models, as the
            paper has them, are ``[x0] * p``.
        W: a ``Topology``, or float32[p, p] or float64[p, p] (or a sparse matrix): symmetric, rows that add up to 1,
            no entry below 0, zeta < 1.
        lr: eta, the rate of the local steps: a number, or a function of the round.
        q: p numbers >= 0, the nodes' weights in the objective, the output and the gradient diversity; scaled to the sum
            1. None is 1/p. A rate that is stable for one node has to be so p q_j fold.
        max_steps: an update that claims more is refused.
        own_rates: whether nodes may have rates of their own, up to ``max_lr``. Else one that says another is refused.
        on_report: called with the NetworkReport of each round after it counted, as a ``Server``'s is.

    Attributes:
        on_report: as given; another one may take its place between rounds.

    Raises:
        ShapeError, DtypeError, ArrayError, RangeError: an argument is not what is said above.

    Determinism: float32 in the order of the nodes: the same bits in whatever order updates come, on every ISA level
        and thread count. Only the diversity, a float32 sum in the order of ``add``, depends on that order.
    Cost: 8 p n bytes. A round reads 16 n and writes 8 n bytes for each node heard, reads and writes 4 n more to mix it,
        and reads 8 p n for the consensus distance; where nodes are away it also takes the eigenvalues of what is left.

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
        max_steps: int = 10**6,
        max_lr: float = 100.0,
        own_rates: bool = False,
        on_report: OnReport | None = None,
    ) -> None:
        if not isinstance(models, list | tuple) or not models:
            raise ArrayError(f"models: expected a list or tuple of at least one, got {type(models).__name__}")
        self.layout = Layout.of(models[0])
        if self.layout.n_parameters < 1:
            raise ShapeError(f"models[0]: expected at least one parameter, got {self.layout.n_parameters}")
        self.W, self.zeta = mixing_matrix(W, len(models))
        self.W.flags.writeable = False
        self.q = _weights(q, len(models))
        self._lr, self.on_report = as_rate(lr), on_report
        self._limits = Limits.of(
            {"max_steps": max_steps, "max_examples": 2**53, "max_lr": max_lr, "own_rates": own_rates}
        )
        flat = [self.layout.flatten(model, empty(self.layout.n)) for model in models]
        for node, finite in enumerate(kernels.all_finite(flat)):
            if not finite:
                raise ArrayError(f"models[{node}]: expected finite numbers, got a NaN or an infinity")
        self._state = Models(flat, self.layout.read_counters(models[0]))
        # Weak, so that a round that was dropped does not stay open for ever.
        self._round: ReferenceType[NetworkRound] | None = None

    _instead = "write it by save(path), and read it by Network.load(path)"

    def _facts(self) -> dict[str, Any]:
        return {"nodes": len(self.W), "n": self.layout.n, "round_number": self.round_number, "zeta": self.zeta}

    @property
    def models(self) -> tuple[F32, ...]:
        """The nodes' models, float32[n] each: read-only views, good until the next round is finished."""
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
        """eta, the rate of the local steps in the next round; of the first one, where they differ."""
        return rate_at(self._lr, self.round_number)

    @property
    def lr_of_step(self) -> Callable[[int], float] | None:
        """The rate of step k of the next round where they differ, else None; see ``Broadcast.lr_of_step``."""
        return rate_of_steps(self._lr, self.round_number)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a copy of the network as its last finished round left it, a folder that ``load`` opens.

        Args:
            path: a new or empty folder, or an older copy, which stays until the new one is there.

        Raises:
            StoreError: the folder is something else, or in use, or the disk is full.

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
                "limits": asdict(self._limits),
                "round_number": state.round_number,
            },
        )

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, lr: float | Rate | None = None, on_report: OnReport | None = None
    ) -> "Network":
        """The network of a folder; its rounds go on as if nothing had happened.

        Args:
            path: what ``save`` wrote.
            lr: to be given again where it is the caller's own code.
            on_report: as for a new network.

        Raises:
            StoreError: there is no such folder, or one of a newer version.
            CorruptionError: a file was damaged.
            CheckpointError: it is not a network's, or the rate is missing or not what was saved.
        """
        with ClientStore.open(path, readonly=True) as saved:
            state, vectors = saved.state, {name: np.array(saved.vector(name)) for name in saved.vector_names()}
            if not isinstance(state, dict) or state.get("what") != WHAT:
                raise CheckpointError(f"{path}: expected the folder of a network, got another store")
            models = [copied(saved.read(node)) for node in range(len(saved.registry))]
        try:
            rate = revive("lr", state["lr"], None if lr is None else as_rate(lr))
            check_rate("lr", rate, state.get("next_rate"), state["round_number"])
            network = cls(models, vectors["W"].reshape(len(models), -1), lr=rate, q=vectors["q"], on_report=on_report)
            network._continue(state, vectors, models)
        except CheckpointError:
            raise
        except (FedcoreError, LookupError, TypeError, ValueError) as error:  # sealed, but by nobody who writes this
            raise CheckpointError(f"{path}: expected what save wrote, got {error!r}") from None
        return network

    def _continue(self, state: dict[str, Any], vectors: dict[str, npt.NDArray[Any]], models: list[F32]) -> None:
        """Take over what a new network of these models does not have.

        Raises:
            RangeError, LookupError, TypeError, ValueError: something is not what ``save`` writes.
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
        self.layout, self._limits = layout, Limits.saved(state["limits"])
        self.q = vectors["q"]  # not scaled once more
        self.q.flags.writeable = False
        self._state = Models(models, counters, number)

    @ieee
    def output(self, out: F32 | None = None) -> F32:
        """The network's answer, sum_j q_j y_j.

        Args:
            out: float32[n], written in place; a new one if None.

        Returns:
            float32[n], ``out`` if it was given.

        Cost: reads 4 p n bytes.
        """
        total: F32 = kernels.weighted_sum(self._state.models, self.q.astype(np.float32), out, accumulate="float64")
        return total

    def tensors(self, node: int | None = None, *, library: Library | None = None) -> Any:
        """One node's model by name, or the output if ``node`` is None, as copies; counters keep their integer types.

        Args:
            library: "numpy" or "torch"; None for that of the models.

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
            self.layout, self._state, self.W, self.zeta, self.q, self._lr, self._limits, self.on_report
        )
        self._round = ref(opened)
        return opened

    def round(self, updates: Iterable[Update]) -> NetworkReport:
        """A whole round from an iterable of updates, which may be made while they are read.

        Errors are those of ``NetworkRound.add`` and ``finish``; the network is then as it was before.
        """
        with self.open_round() as opened:
            for update in updates:
                opened.add_update(update)
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
