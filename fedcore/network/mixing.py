"""The matrices that mix, and the rest of one when some nodes are away."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedcore.errors import DtypeError, RangeError, ShapeError
from fedcore.topology import Topology
from fedcore.topology.topology import second_eigenvalue
from fedcore.typing import F64

ROUNDING = 1e-6
"""How far a float32 matrix may be from symmetric and doubly stochastic."""
DISCONNECTED = 1 - 1e-12
"""A zeta from which on nothing is mixed that a float64 could tell: ten million nodes in a ring are below it."""


def mixing_matrix(W: Any, p: int) -> tuple[F64, float]:
    """W as float64[p, p], and its zeta.

    Raises:
        ShapeError, DtypeError: it is no matrix of p rows.
        RangeError: it is not symmetric, not doubly stochastic, has a negative entry, or does not mix all models.
    """
    if isinstance(W, Topology):
        W = W.W
    if hasattr(W, "toarray"):
        W = W.toarray()
    try:
        given = np.asarray(W)
    except ValueError:  # rows of different lengths
        raise ShapeError(f"W: expected [{p}, {p}], one row a model, got no matrix") from None
    if given.shape != (p, p):
        raise ShapeError(f"W: expected [{p}, {p}], one row a model, got {list(given.shape)}")
    if given.dtype.kind not in "fiu":
        raise DtypeError(f"W: expected float32 or float64, got {given.dtype}")
    matrix = given.astype(np.float64)
    if not (matrix >= 0).all() or not np.isfinite(matrix).all():
        raise RangeError("W: expected finite entries >= 0, got others")
    if np.abs(matrix - matrix.T).max() > ROUNDING:
        raise RangeError("W: expected a symmetric matrix, got one that is not")
    off = np.abs(matrix.sum(axis=1) - 1)
    if off.max() > ROUNDING:
        row = int(off.argmax())
        raise RangeError(f"W: expected rows that add up to 1, got {matrix[row].sum():.9g} in row {row}")
    zeta = second_eigenvalue(matrix)
    if zeta >= DISCONNECTED:
        raise RangeError(f"W: expected a matrix that mixes all models (zeta < 1), got zeta = {zeta:.9g}")
    return matrix, zeta


def among(W: F64, heard: Sequence[int]) -> F64:
    """The matrix among the nodes heard: what a node would have given to those away, it keeps.

    W'_ij = W_ij for i != j, W'_ii = W_ii + sum of W_ij over the nodes away. So W' is symmetric and its rows and
    columns add up to 1 as those of W do: a round with nodes away keeps the mean of the models, too.

    Args:
        W: float64[p, p], read-only.
        heard: k different rows.

    Returns:
        float64[k, k].

    >>> among(np.full((3, 3), 1 / 3), [0, 2]).round(3).tolist()
    [[0.667, 0.333], [0.333, 0.667]]
    """
    places = np.array(heard, np.int64)
    away = np.ones(len(W), np.bool_)
    away[places] = False
    left = W[np.ix_(places, places)]
    left[np.diag_indices_from(left)] += W[np.ix_(places, np.flatnonzero(away))].sum(axis=1)
    return left
