"""Graphs, and the mixing matrix of a connected graph."""

from collections.abc import Callable, Hashable
from inspect import signature
from math import isqrt
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedcore.arguments import real, whole
from fedcore.arrays import ieee
from fedcore.errors import MissingDependencyError, RangeError, UnknownNameError
from fedcore.representation import UNMADE
from fedcore.sampling import bernoulli

__all__ = ["NAMES", "Topology"]

MOST_NODES = 2**14
"""W is dense: 2 GiB at this number."""


def networkx() -> Any:
    """Import networkx; raise MissingDependencyError if it is not installed."""
    try:
        import networkx
    except ImportError as error:
        raise MissingDependencyError.of("topology", "networkx", extra="sim") from error
    return networkx


def complete(nodes: int) -> tuple[Any, str]:
    """All nodes are neighbours."""
    return networkx().complete_graph(_count(nodes)), f"complete(nodes={nodes})"


def ring(nodes: int) -> tuple[Any, str]:
    """Each node has two neighbours."""
    return networkx().cycle_graph(_count(nodes)), f"ring(nodes={nodes})"


def star(nodes: int) -> tuple[Any, str]:
    """Node 0 is the neighbour of all others."""
    return networkx().star_graph(_count(nodes) - 1), f"star(nodes={nodes})"


def torus(nodes: int, rows: int | None = None) -> tuple[Any, str]:
    """A grid of rows x columns that wraps around in both directions, node by node along the rows."""
    divisors = [count for count in range(2, _count(nodes) // 2 + 1) if nodes % count == 0]
    if not divisors:
        raise RangeError(f"nodes: expected rows x columns with at least two of each, got {nodes}")
    if rows is None:
        rows = max(count for count in divisors if count <= isqrt(nodes))
    if rows not in divisors:
        raise RangeError(f"rows: expected one of {divisors}, which divide {nodes}, got {rows!r}")
    grid = networkx().grid_2d_graph(rows, nodes // rows, periodic=True)
    return grid, f"torus(nodes={nodes}, rows={rows})"


def erdos_renyi(nodes: int, probability: float, seed: int = 0) -> tuple[Any, str]:
    """Two nodes are neighbours with the given probability, independently of the others."""
    real("probability", probability, "[0, 1]")
    first, second = np.triu_indices(_count(nodes), 1)
    drawn = bernoulli(len(first), float(probability), seed=seed, round=0, purpose="topology: erdos-renyi")
    graph = networkx().empty_graph(nodes)
    graph.add_edges_from(zip(first[drawn].tolist(), second[drawn].tolist(), strict=True))
    return graph, f"erdos-renyi(nodes={nodes}, probability={float(probability):g}, seed={seed})"


GRAPHS: dict[str, Callable[..., tuple[Any, str]]] = {
    "complete": complete,
    "erdos-renyi": erdos_renyi,
    "ring": ring,
    "star": star,
    "torus": torus,
}


def _count(nodes: int) -> int:
    return whole("nodes", nodes, 1, MOST_NODES)


NAMES = tuple(GRAPHS)
"""The graphs that ``Topology.named`` knows."""


class Topology:
    """The mixing matrix of a graph.

    W_ij = 1 / (1 + max(d_i, d_j)) for neighbours i and j, d their degrees; 0 for others; W_ii = 1 - sum_j W_ij. So W
    is symmetric, its rows and columns add up to 1, no entry is negative and the diagonal is positive: mixing keeps
    the mean of the models, and on a connected graph brings them together. On the complete graph W_ij = 1/p.

    Args:
        graph: a networkx graph: undirected, connected, with at least one node. Edge weights and loops have no effect.
        name: the name in messages.
        dtype: of ``W``.

    Attributes:
        name: the name in messages.
        nodes: the graph's nodes; node i of a ``Network`` is ``nodes[i]``.
        W: float64[p, p] or float32[p, p], read-only.
        zeta: max(|lambda_2|, |lambda_p|) over the eigenvalues 1 = lambda_1 >= ... >= lambda_p of W, in [0, 1): the
            share of the models' disagreement that one mixing leaves. 0 is the complete graph, near 1 mixes slowly.

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
        """Make the topology of that name.

        Args:
            name: "complete"; "ring"; "star", node 0 in the middle; "torus", a grid that wraps around, of the given
                ``rows`` or as square as ``nodes`` allows; "erdos-renyi", where two nodes are neighbours with the given
                ``probability``, independently of others, by ``seed``.
            nodes: p.
            dtype: of ``W``.
            options: ``rows``, or ``probability`` and ``seed``, as above.

        Raises:
            UnknownNameError: there is no such graph, or it has no such option.
            RangeError: an argument is outside its range, or a random graph is not connected.
            MissingDependencyError: networkx is not installed.

        Determinism: only the arguments, on every platform.

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
        if "zeta" not in vars(self):  # its graph was rejected
            return f"Topology(unknown={UNMADE!r})"
        return f"{self.name}: zeta {self.zeta:.4g}"


@ieee
def second_eigenvalue(W: npt.NDArray[np.float64]) -> float:
    """Return zeta = max(|lambda_2|, |lambda_p|) of a symmetric, doubly stochastic matrix; 0 if it has one row.

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
