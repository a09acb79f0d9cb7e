"""A connected graph and the mixing matrix that it gives: symmetric and doubly stochastic, by Metropolis weights."""

from collections.abc import Hashable
from inspect import signature
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedcore.errors import RangeError, UnknownNameError
from fedcore.float_mode import ieee
from fedcore.representation import UNMADE
from fedcore.topology.graphs import GRAPHS, networkx

NAMES = tuple(GRAPHS)
"""The graphs that ``Topology.named`` knows."""


class Topology:
    """The mixing matrix of a graph.

    W_ij = 1 / (1 + max(d_i, d_j)) for neighbours i and j, d their degrees; 0 for others; W_ii = 1 - sum_j W_ij. So W
    is symmetric, its rows and columns add up to 1, no entry is negative and the diagonal is positive: mixing keeps
    the mean of the models, and on a connected graph brings them together. On the complete graph W_ij = 1/p.

    Args:
        graph: a networkx graph: undirected, connected, with at least one node. Edge weights are not used, and a node's
            edge to itself changes nothing.
        name: what messages call it.
        dtype: of ``W``.

    Attributes:
        name: what it is called.
        nodes: the graph's nodes; node i of a ``Network`` is ``nodes[i]``.
        W: float64[p, p] or float32[p, p], read-only.
        zeta: max(|lambda_2|, |lambda_p|) over the eigenvalues 1 = lambda_1 >= ... >= lambda_p of W, in [0, 1): how
            much of the models' disagreement one mixing leaves. 0 is the complete graph, near 1 mixes slowly.

    Raises:
        RangeError: the graph is directed, empty, or not connected.
        MissingDependencyError: networkx is not installed.

    Cost: O(p^3), for the eigenvalues.

    Reference: Haddadpour, Mahdavi, "On the Convergence of Local Descent Methods in Federated Learning", 2019,
    Algorithm 2 and zeta. Xiao, Boyd, Kim, "Distributed average consensus with least-mean-square deviation", 2007:
    Metropolis weights.

    >>> Topology.named("ring", 4).W[0]
    array([0.33333333, 0.33333333, 0.        , 0.33333333])
    """

    def __init__(self, graph: Any, *, name: str = "graph", dtype: Literal["float64", "float32"] = "float64") -> None:
        if dtype not in ("float64", "float32"):
            raise UnknownNameError.of("dtype", dtype, ["float64", "float32"])
        _check(graph, name)
        self.name = name
        self.nodes: tuple[Hashable, ...] = tuple(graph.nodes)
        exact = _metropolis(_adjacency(graph))
        self.zeta = second_eigenvalue(exact)
        self.W: npt.NDArray[Any] = exact.astype(dtype)
        self.W.flags.writeable = False

    @classmethod
    def named(
        cls, name: str, nodes: int, *, dtype: Literal["float64", "float32"] = "float64", **options: Any
    ) -> "Topology":
        """The topology of that name.

        Args:
            name: "complete"; "ring"; "star", node 0 in the middle; "torus", a grid that closes on itself, of the
                given ``rows`` or as square as ``nodes`` allows; "erdos-renyi", where two nodes are neighbours with the
                given ``probability``, independently of others, by ``seed``.
            nodes: p.
            dtype: of ``W``.
            options: ``rows``, or ``probability`` and ``seed``, as above.

        Raises:
            UnknownNameError: there is no such graph, or it has no such option.
            RangeError: an argument is outside its range, or a random graph is not connected.
            MissingDependencyError: networkx is not installed.

        Determinism: the arguments alone, on every platform.

        >>> topology = Topology.named("torus", 12)
        >>> topology
        torus(nodes=12, rows=3): zeta 0.6
        """
        if name not in GRAPHS:
            raise UnknownNameError.of("topology", name, GRAPHS)
        known = list(signature(GRAPHS[name]).parameters.values())[1:]
        for option in options:
            if option not in {parameter.name for parameter in known}:
                raise UnknownNameError.of(f"option of {name}", option, [parameter.name for parameter in known])
        for parameter in known:
            if parameter.default is parameter.empty and parameter.name not in options:
                raise RangeError(f"{parameter.name}: expected a value, since the graph is {name}, got none")
        graph, said = GRAPHS[name](nodes, **options)
        return cls(graph, name=said, dtype=dtype)

    def __len__(self) -> int:
        return len(self.nodes)

    def __repr__(self) -> str:
        if "zeta" not in vars(self):  # its graph was refused
            return f"Topology(unknown={UNMADE!r})"
        return f"{self.name}: zeta {self.zeta:.4g}"


@ieee
def second_eigenvalue(W: npt.NDArray[np.float64]) -> float:
    """zeta = max(|lambda_2|, |lambda_p|) of a symmetric, doubly stochastic matrix; 0 if it has one row.

    Args:
        W: float64[p, p], read-only.

    Cost: O(p^3).

    >>> second_eigenvalue(np.full((3, 3), 1 / 3)) < 1e-12
    True
    """
    values = np.linalg.eigvalsh(W)
    return float(max(abs(values[-2]), abs(values[0]))) if len(values) > 1 else 0.0


def _check(graph: Any, name: str) -> None:
    nx = networkx()
    if not isinstance(graph, nx.Graph):
        raise RangeError(f"graph: expected a networkx graph, got {type(graph).__name__}")
    if graph.is_directed():
        raise RangeError(f"graph: expected an undirected one, got {name}, which is directed")
    if not len(graph):
        raise RangeError(f"graph: expected at least one node, got {name}, which has none")
    parts = nx.number_connected_components(graph)
    if parts > 1:
        raise RangeError(f"graph: expected a connected one, got {name}, which has {parts} parts")


def _adjacency(graph: Any) -> npt.NDArray[np.bool_]:
    place = {node: i for i, node in enumerate(graph.nodes)}
    neighbours = np.zeros((len(place), len(place)), np.bool_)
    for a, b in graph.edges():
        neighbours[place[a], place[b]] = neighbours[place[b], place[a]] = a != b
    return neighbours


def _metropolis(neighbours: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    degrees = neighbours.sum(axis=1)
    W = np.where(neighbours, 1 / (1 + np.maximum.outer(degrees, degrees)), 0.0)
    W[np.diag_indices_from(W)] = 1 - W.sum(axis=1)
    return W
