"""Exact sums over clients, whose bits do not depend on the order or the tree of additions.

Each term is rounded separately to a fixed grid. Then integers are added: high words of 2^-10 and low words of 2^-60.
The sum depends only on the multiset of its terms. Adding partial sums gives the same sum, and subtracting a term
restores the sum before its addition.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcore import arrays as memory
from fedcore.arrays import F64, I64, core, ieee
from fedcore.kernels.forms import Terms
from fedcore.kernels.norms import sum_of_partials
from fedcore.kernels.rows import ANCHORED, REPLACED
from fedcore.validation import numbers

LONGEST_EXACT = 2.0**39
"""The smallest |weight h| that does not fit the grid."""
MOST_EXACT = 2.0**52
"""The bound on the sum of the norms of all terms."""
NEWS = Terms(h=1)
"""The form that ``accumulate_exact`` adds."""


class ExactSum(NamedTuple):
    """A sum of n elements, each high 2^-10 + low 2^-60 with 0 <= low < 2^50. Equal sums have equal bytes.

    >>> sum = ExactSum.zeros(2)
    >>> accumulate_exact(sum, [None], [np.float32([-1, 4])], np.ones(1), np.ones(1), out=sum)
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
def accumulate_exact(
    acc: ExactSum | None,
    bases: Sequence[Any],
    ys: Sequence[Any],
    scales: F64,
    weights: F64,
    *,
    out: ExactSum,
    partials: F64 | None = None,
) -> F64:
    """Add clients' mean gradients to an exact sum: out = acc + sum_i rounded(weights[i] h_i).

    The caller must keep the sum of the norms of all terms below ``MOST_EXACT``.

    Args:
        acc: the sum so far, or None for zeros.
        bases, ys, scales, weights: as for ``accumulate``, which also defines h_i.
        out: a sum of the same length, which may be ``acc`` and is disjoint from the other arguments.
        partials: as for ``accumulate``, for ``sum_of_partials_exact``.

    Returns:
        float64[k], the squared norms |h_i|^2. A norm is not finite if ``ys[i]`` has a NaN or an infinity, or if
        |weights[i] h_i| >= ``LONGEST_EXACT``. ``out`` is then invalid; a separate ``acc`` stays valid.

    Determinism: bit-identical for any order and any partition into partial sums. The error is below 2^-61 per term,
        plus one rounding when the sum is read.
    Cost: that of ``accumulate`` with a float64 sum, plus 16 n bytes.
    Reference: Demmel and Nguyen, "Parallel Reproducible Summation", 2015. Its bins are integers on a fixed grid here.
    """
    return core.accumulate_exact(acc, out, bases, ys, scales, weights, partials)


@ieee
def exchange_exact(
    acc: ExactSum,
    bases: Sequence[Any],
    ys: Sequence[Any],
    scales: F64,
    weights: F64,
    old_rows: Sequence[Any],
    anchors: Sequence[Any],
    new_rows: Sequence[Any],
    *,
    out: ExactSum,
    row: Terms = REPLACED,
    adds: Terms = ANCHORED,
    keys: npt.NDArray[np.uint64] | None = None,
    sums: npt.NDArray[np.uint64] | None = None,
    first: int = 0,
    partials: F64 | None = None,
) -> F64:
    """Replace rows like ``exchange``, with an exact sum in which each term of ``adds`` is rounded separately::

        r_i' = row.h h_i + row.r r_i + row.q q_i
        out  = acc + sum_i sum over the terms of rounded((weights[i] adds.term) term)

    With weights of 1 and ``adds`` of 1 and -1, replaced rows are subtracted exactly. So a running total of many
    exchanges is the exact sum of the current rows.

    Args:
        acc, out: the same sum, or disjoint sums.
        bases, ys, scales, weights, old_rows, anchors, new_rows, row, adds, keys, sums, first: as for ``exchange``. The
            weighted elements of old rows and anchors must be below 2^40; the calls that wrote them checked this.
        partials: as for ``exchange``, for ``sum_of_partials_exact``.

    Returns:
        float64[k], as for ``exchange``. A norm is also infinite if |weights[i] h_i| >= ``LONGEST_EXACT``, or if an
        element of a new row times its weight is 2^40 or more.

    Determinism: as for ``accumulate_exact``.
    Cost: that of ``exchange``, plus 16 n bytes.
    """
    return core.exchange_exact(
        acc,
        out,
        bases,
        ys,
        scales,
        weights,
        old_rows,
        anchors,
        new_rows,
        row=row,
        adds=adds,
        keys=keys,
        sums=sums,
        first=first,
        partials=partials,
    )


@ieee
def sum_of_partials_exact(partials: F64, weights: F64, *, row: Terms = REPLACED, adds: Terms = NEWS) -> F64:
    """Return the squared norms of ``accumulate_exact`` or ``exchange_exact`` on whole vectors from the parts' partials.

    ``LONGEST_EXACT`` bounds the norm of a whole h_i, but a call on a part compares only the part's norm with it.

    Args:
        partials: float64[blocks, k] of all blocks, as for ``sum_of_partials``.
        weights: the weights of the calls, float64[k].
        row, adds: the forms of the calls of ``exchange_exact``.

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
