"""The table of the configuration that takes the server away: nodes with a model each, mixed between neighbours."""

from typing import Any, Literal

from pydantic import field_validator

from fedcore.errors import FedcoreError
from fedcore.experiment.schema.section import Section, problems
from fedcore.topology import NAMES, Topology


class NetworkOfNodes(Section):
    """Networked local SGD: every client is a node of a graph, and mixes its model with its neighbours' after a round.

    The method is ``LocalDescent``, whose options say what the local steps are. A node that takes no part in a round
    keeps its model. Accuracy and loss are those of the nodes' weighted mean.

    Attributes:
        graph: "complete", "ring", "star", "torus" or "erdos-renyi".
        rows: of a torus; None is as square as can be.
        probability, seed: of a random graph.
        weights: of the nodes in the objective: "uniform", 1/p, or "examples", n_j / n.

    Reference: Haddadpour, Mahdavi, "On the Convergence of Local Descent Methods in Federated Learning", 2019,
    Algorithm 2.
    """

    graph: str
    rows: int | None = None
    probability: float | None = None
    seed: int | None = None
    weights: Literal["uniform", "examples"] = "uniform"

    @field_validator("graph")
    @classmethod
    def _is_known(cls, graph: str) -> str:
        if graph not in NAMES:
            raise problems({"": f"expected one of {', '.join(NAMES)}, got {graph!r}"})
        return graph

    def topology(self, nodes: int) -> Topology:
        """The graph of so many nodes.

        Raises:
            FedcoreError: an option is not the graph's, or out of range; or the graph is not connected.
        """
        given: dict[str, Any] = {"rows": self.rows, "probability": self.probability, "seed": self.seed}
        return Topology.named(self.graph, nodes, **{key: value for key, value in given.items() if value is not None})

    def problem(self, nodes: int) -> str | None:
        """The fault that shows with so many nodes, or None."""
        try:
            self.topology(nodes)
        except FedcoreError as error:
            return str(error)
        return None
