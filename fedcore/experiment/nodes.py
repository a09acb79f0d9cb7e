"""A network of nodes in the places of a trial's server and engine."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from fedcore.algorithms import Algorithm, LocalDescent
from fedcore.clients import ClientId
from fedcore.engines import Engine, Evaluation
from fedcore.local_rules import LocalRule
from fedcore.network import Network, NetworkReport
from fedcore.participation import Active
from fedcore.server import Broadcast, Update
from fedcore.server.sent_vectors import Whole
from fedcore.typing import F32


class Nodes:
    """A ``Network`` as the loop of a trial sees a server: what a round's nodes start from, the round, and the output.

    Args:
        network: the models.
        algorithm: what their local steps are.
    """

    def __init__(self, network: Network, algorithm: LocalDescent) -> None:
        self.network = network
        self.algorithm: Algorithm = algorithm

    @property
    def round_number(self) -> int:
        """The number of finished rounds."""
        return self.network.round_number

    @property
    def x(self) -> F32:
        """The network's answer, sum_j q_j y_j, float32[n]."""
        return self.network.output()

    def broadcast(self, ids: Iterable[ClientId]) -> Broadcast:
        """The order to these nodes alike; its x is the output, and each starts from its own model (``of``).

        Its bytes are those of the models that the nodes get from their neighbours among them.
        """
        nodes = np.array(list(ids), np.int64)
        among = self.network.W[np.ix_(nodes, nodes)]
        edges = int(np.count_nonzero(among)) - int(np.count_nonzero(np.diag(among)))
        return self._broadcast(tuple(nodes.tolist()), self.x, 4 * self.network.layout.n * edges)

    def of(self, node: int) -> Broadcast:
        """The order to one node, from its own model."""
        return self._broadcast((node,), self.network.models[node], 0)

    def _broadcast(self, ids: tuple[int, ...], x: F32, weighs: int) -> Broadcast:
        zeros = np.zeros(self.network.layout.n_parameters, np.float32)
        return Broadcast(
            ids=ids,
            round=self.round_number,
            lr=self.network.lr,
            lr_of_step=self.network.lr_of_step,
            direction=self.algorithm.direction,
            second_vector=None,
            local_rule=self.algorithm.local_rule,
            keeps_row=False,
            has_offset=False,
            plain=False,
            bytes=weighs,
            vectors=Whole(x, None, lambda client, out: zeros),
        )

    def round(self, updates: Iterable[Update]) -> NetworkReport:
        """A whole round: every update that comes in, and the mixing."""
        return self.network.round(updates)

    def save(self, path: Path) -> None:
        """Write a copy, which ``Network.load`` opens."""
        self.network.save(path)


class NodesEngine:
    """The engine of a network's nodes: each is trained from its own model.

    Args:
        engine: who trains them; it is closed with this one.
        nodes: whose models they start from.

    Cost: nodes are trained one call after another, since no two of them start from one model.
    """

    def __init__(self, engine: Engine, nodes: Nodes) -> None:
        self._engine, self._nodes = engine, nodes

    def updates(self, broadcast: Broadcast, active: Active | None = None) -> Iterator[Update]:
        """Train the nodes of a broadcast; see ``Engine.updates``."""
        for place, node in enumerate(broadcast.ids):
            alone = None if active is None else active.only(np.arange(len(active)) == place)
            yield from self._engine.updates(self._nodes.of(int(node)), alone)

    def gradients(self, broadcast: Broadcast, minibatches: int | None = None) -> dict[ClientId, F32]:
        """The gradients at the output; see ``Engine.gradients``."""
        return self._engine.gradients(broadcast, minibatches)

    def evaluate(self, x: F32) -> Evaluation:
        """Accuracy and loss of a model; see ``Engine.evaluate``."""
        return self._engine.evaluate(x)

    def most_steps(self, local_rule: LocalRule) -> int:
        """The most local steps of a node's complete work; see ``Engine.most_steps``."""
        return self._engine.most_steps(local_rule)

    @property
    def together(self) -> bool:
        """False: no two nodes start from one model."""
        return False

    @property
    def waited(self) -> float:
        """Seconds of waiting for workers; see ``Engine.waited``."""
        return self._engine.waited

    def close(self) -> None:
        """Close the engine below."""
        self._engine.close()
