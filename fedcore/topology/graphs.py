"""The graphs that have names here, from networkx."""

from collections.abc import Callable
from math import isqrt
from typing import Any

import numpy as np

from fedcore.arguments import real, whole
from fedcore.errors import MissingDependencyError, RangeError
from fedcore.sampling import bernoulli

MOST_NODES = 2**14
"""W is dense: 2 GiB at this number."""


def networkx() -> Any:
    """The networkx package.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import networkx
    except ImportError as error:
        raise MissingDependencyError.of("topology", "networkx", extra="sim") from error
    return networkx


def complete(nodes: int) -> tuple[Any, str]:
    """The graph in which everybody is next to everybody."""
    return networkx().complete_graph(_count(nodes)), f"complete(nodes={nodes})"


def ring(nodes: int) -> tuple[Any, str]:
    """Each node between two others."""
    return networkx().cycle_graph(_count(nodes)), f"ring(nodes={nodes})"


def star(nodes: int) -> tuple[Any, str]:
    """Node 0 next to all others."""
    return networkx().star_graph(_count(nodes) - 1), f"star(nodes={nodes})"


def torus(nodes: int, rows: int | None = None) -> tuple[Any, str]:
    """A grid of rows x columns that closes on itself in both directions, node by node along the rows."""
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
    """Each pair is next to each other with the given probability, independently."""
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
