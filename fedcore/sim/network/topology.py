"""Graphs, and the mixing matrix of a connected graph."""

from collections.abc import Callable, Hashable
from inspect import signature
from math import isqrt
from typing import Any, Literal

import numpy as np

from fedcore.arrays import F64, Bools, Vector, ieee
from fedcore.errors import MissingDependencyError, RangeError, UnknownNameError
from fedcore.sampling import bernoulli
from fedcore.validation import UNMADE, check_integer, check_number

__all__ = ["NAMES", "Topology"]

MOST_NODES = 2**14
"""The maximum number of nodes; the dense W then has 2 GiB."""


def networkx() -> Any:
    """Return the module networkx; raise MissingDependencyError if it is not installed."""
    try:
        import networkx
    except ImportError as error:
        raise MissingDependencyError.of("topology", "networkx", extra="sim") from error
    return networkx


def complete(nodes: int) -> tuple[Any, str]:
    """Return a complete graph and its description."""
    return networkx().complete_graph(_count(nodes)), f"complete(nodes={nodes})"


def ring(nodes: int) -> tuple[Any, str]:
    """Return a ring and its description."""
    return networkx().cycle_graph(_count(nodes)), f"ring(nodes={nodes})"


def star(nodes: int) -> tuple[Any, str]:
    """Return a star around node 0 and its description."""
    return networkx().star_graph(_count(nodes) - 1), f"star(nodes={nodes})"


def torus(nodes: int, rows: int | None = None) -> tuple[Any, str]:
    """Return a grid that wraps around in both directions, with nodes in row order, and its description."""
    divisors = [count for count in range(2, _count(nodes) // 2 + 1) if nodes % count == 0]
    if not divisors:
        raise RangeError(f"nodes={nodes}: a torus needs at least two rows and two columns")
    if rows is None:
        rows = max(count for count in divisors if count <= isqrt(nodes))
    if rows not in divisors:
        raise RangeError(f"rows={rows!r}: must be one of {divisors} for {nodes} nodes")
    grid = networkx().grid_2d_graph(rows, nodes // rows, periodic=True)
    return grid, f"torus(nodes={nodes}, rows={rows})"


def erdos_renyi(nodes: int, probability: float, seed: int = 0) -> tuple[Any, str]:
    """Return a random graph and its description."""
    check_number("probability", probability, "[0, 1]")
    first, second = np.triu_indices(_count(nodes), 1)
    drawn = bernoulli(len(first), float(probability), seed=seed, round=0, purpose="topology: erdos-renyi")
    graph = networkx().empty_graph(nodes)
    graph.add_edges_from(zip(first[drawn].tolist(), second[drawn].tolist(), strict=True))
    return graph, f"erdos-renyi(nodes={nodes}, probability={float(probability):g}, seed={seed})"


_GRAPHS: tuple[Any, ...] = (complete, erdos_renyi, ring, star, torus)
GRAPHS: dict[str, Callable[..., tuple[Any, str]]] = {make.__name__.replace("_", "-"): make for make in _GRAPHS}


def _count(nodes: int) -> int:
    return check_integer("nodes", nodes, 1, MOST_NODES)


NAMES = tuple(GRAPHS)
"""The names that ``Topology.named`` accepts."""


class Topology:
    """The mixing matrix of a graph.

    W_ij = 1 / (1 + max(d_i, d_j)) for neighbours i and j with degrees d, otherwise 0; W_ii = 1 - sum_j W_ij. On the
    complete graph W_ij = 1/p. W is symmetric and doubly stochastic with a positive diagonal. So mixing keeps the mean
    of the models, and on a connected graph the models converge to it.

    Args:
        graph: an undirected, connected networkx graph with at least one node. Edge weights and loops have no effect.
        name: the name in messages.
        dtype: the dtype of ``W``.

    Attributes:
        name: the name in messages.
        nodes: the graph's nodes; node i of a ``Network`` is ``nodes[i]``.
        W: float64[p, p] or float32[p, p], read-only.
        zeta: max(|lambda_2|, |lambda_p|) over the eigenvalues 1 = lambda_1 >= ... >= lambda_p of W, in [0, 1). One
            mixing multiplies the models' disagreement by at most zeta. It is 0 for the complete graph.

    Raises:
        RangeError: the graph is directed, empty, or not connected.
        MissingDependencyError: networkx is not installed.

    Cost: O(p^3) for the eigenvalues.

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
        exact = _metropolis(networkx().to_numpy_array(graph, weight=None) > 0)
        self.zeta = second_eigenvalue(exact)
        self.W: Vector = exact.astype(dtype)
        self.W.flags.writeable = False

    @classmethod
    def named(
        cls, name: str, nodes: int, *, dtype: Literal["float64", "float32"] = "float64", **options: Any
    ) -> "Topology":
        """Return the topology of a named graph.

        - "complete": all nodes are neighbours.
        - "ring": each node has two neighbours.
        - "star": node 0 is the only neighbour of all other nodes.
        - "torus": a grid with ``rows`` rows that wraps around. Default of ``rows``: the most square grid.
        - "erdos-renyi": two nodes are neighbours with ``probability``, independently of other pairs, by ``seed``.

        Args:
            name: the name of the graph.
            nodes: p.
            dtype: the dtype of ``W``.
            options: ``rows``, or ``probability`` and ``seed``.

        Raises:
            RangeError: an argument is outside its range, or a random graph is not connected.
            MissingDependencyError: networkx is not installed.

        Determinism: a function of the arguments on every platform.

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
                raise RangeError(f"{parameter.name}: the graph {name!r} requires this option")
        graph, text = GRAPHS[name](nodes, **options)
        return cls(graph, name=text, dtype=dtype)

    def __len__(self) -> int:
        return len(self.nodes)

    def __repr__(self) -> str:
        if "zeta" not in vars(self):  # the constructor rejected the graph
            return f"Topology(unknown={UNMADE!r})"
        return f"{self.name}: zeta {self.zeta:.4g}"


@ieee
def second_eigenvalue(W: F64) -> float:
    """Return zeta = max(|lambda_2|, |lambda_p|) of a symmetric, doubly stochastic matrix; 0 for a single row.

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
        raise RangeError(f"graph: {name} is directed; use an undirected graph")
    if not len(graph):
        raise RangeError(f"graph: {name} has no nodes")
    parts = nx.number_connected_components(graph)
    if parts > 1:
        raise RangeError(f"graph: {name} has {parts} unconnected parts; use a connected graph")


def _metropolis(neighbours: Bools) -> F64:
    np.fill_diagonal(neighbours, False)  # a loop does not count
    degrees = neighbours.sum(axis=1)
    W = np.where(neighbours, 1 / (1 + np.maximum.outer(degrees, degrees)), 0.0)
    W[np.diag_indices_from(W)] = 1 - W.sum(axis=1)
    return W
