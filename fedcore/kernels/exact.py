"""Exact sums over clients, whose bits do not depend on the order or the tree of additions.

Each term is rounded separately to a fixed grid. Then integers are added: high words of 2^-10 and low words of 2^-60.
The sum depends only on the multiset of its terms. Adding partial sums gives the same sum, and subtracting a term
restores the sum before its addition.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedcore import arrays as memory
from fedcore.arrays import F64, I64, core, ieee
from fedcore.kernels.forms import H, Terms
from fedcore.kernels.norms import sum_of_partials
from fedcore.validation import numbers

LONGEST_EXACT = 2.0**39
"""The smallest |weight h| that does not fit the grid."""
MOST_EXACT = 2.0**52
"""The bound on the sum of the norms of all terms."""


class ExactSum(NamedTuple):
    """A sum of n elements, each high 2^-10 + low 2^-60 with 0 <= low < 2^50. Equal sums have equal bytes.

    >>> from fedcore.kernels import accumulate
    >>> sum = ExactSum.zeros(2)
    >>> accumulate(sum, [None], [np.float32([-1, 4])], np.ones(1), np.ones(1), out=sum)
    array([17.])
    >>> sum
    ExactSum(high=array([ 1024, -4096]), low=array([0, 0]))
    >>> read_exact(sum)
    array([ 1., -4.])
    """

    high: I64
    """int64[n]."""
    low: I64
    """int64[n]."""

    @classmethod
    def zeros(cls, n: int, *, device: str = memory.CPU) -> "ExactSum":
        """Return a sum of no terms."""
        return cls(memory.zeros(n, np.int64, device=device), memory.zeros(n, np.int64, device=device))

    @classmethod
    def empty(cls, n: int, *, device: str = memory.CPU) -> "ExactSum":
        """Return an uninitialised sum."""
        return cls(memory.empty(n, np.int64, device=device), memory.empty(n, np.int64, device=device))

    def copied(self, *, device: str | None = None) -> "ExactSum":
        """Return a copy. Default of ``device``: the sum's device."""
        return ExactSum(*(memory.copied(word, device=device) for word in self))

    def cut(self, span: slice) -> "ExactSum":
        """Return a slice of the sum as views."""
        return ExactSum(self.high[span], self.low[span])


@ieee
def sum_of_partials_exact(partials: F64, weights: F64, *, row: Terms = H, adds: Terms = H) -> F64:
    """Return the squared norms of ``accumulate`` or ``exchange`` with whole exact sums from the parts' partials.

    ``LONGEST_EXACT`` bounds the norm of a whole h_i, but a call on a part compares only the part's norm with it.

    Args:
        partials: float64[blocks, k] of all blocks, as for ``sum_of_partials``.
        weights: the weights of the calls, float64[k].
        row, adds: the forms of the calls of ``exchange``.

    Returns:
        float64[k], infinite if a call on the whole vectors would return infinity.

    >>> sum_of_partials_exact(np.array([[9, 2.0**77], [16, 2.0**77]]), np.ones(2))
    array([25., inf])
    """
    squares = sum_of_partials(partials)
    most = max(abs(adds.row * row.h), abs(adds.h), abs(adds.row))
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        longest = LONGEST_EXACT / (most * np.asarray(weights, np.float64))
        held: F64 = np.where(squares < longest * longest, squares, np.inf)
    return held


@ieee
def combine_exact(terms: Sequence[Any], coefficients: Sequence[int], out: ExactSum | None = None) -> ExactSum | None:
    """Return the exact combination sum_i coefficients[i] terms[i], in ``out`` if given, or None if out of range.

    Args:
        terms: k >= 1 sums, or vectors float32[n], which are rounded to the grid.
        coefficients: k integers with absolute values of at most 2^31.
        out: ``terms[0]`` itself, or a sum that no term overlaps. Default: a new sum.

    Returns:
        None if an intermediate sum could exceed 2^52, or if an element of a vector is NaN or at least 2^40; ``out`` is
        then invalid.

    Determinism: bit-identical for any order of the terms.
    Cost: reads 16 n bytes per sum and 4 n per vector, and writes 16 n.

    >>> a, b = ExactSum(np.array([5]), np.array([1 << 49])), ExactSum(np.array([-2]), np.array([1 << 49]))
    >>> combine_exact([a, b], [1, 1])
    ExactSum(high=array([4]), low=array([0]))
    """
    if out is None:
        first = terms[0] if len(terms) else np.empty(0)
        like = first.high if isinstance(first, ExactSum) else first
        out = ExactSum(*(memory.empty_beside(like, len(like), np.int64) for _ in ExactSum._fields))
    return out if core.combine_exact(terms, numbers("coefficients", coefficients, np.int64), out) else None


@ieee
def read_exact(sum: ExactSum, out: Any = None) -> Any:
    """Return a sum as floats: float64(high) 2^-10 + low 2^-60, rounded once if below 2^43.

    Args:
        out: float64[n], or float32[n] with a second rounding from float64; written in place. Default: a new float64
            array.

    Cost: reads 16 n bytes and writes 8 n or 4 n.
    """
    if out is None:
        out = memory.empty_beside(sum.high, len(sum.high), np.float64)
    core.read_exact(sum, out)
    return out
