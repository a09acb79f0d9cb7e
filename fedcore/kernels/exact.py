"""Exact sums over clients: their bits do not depend on the order, the tree of additions or the number of workers.

Each term is rounded separately to a fixed grid, then integers are added: high words of 2^-10 and low words of 2^-60.
The sum is a function of the set of its terms. Partial sums join to the same sum, and subtracting a term restores the
sum before it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcore import arrays as memory
from fedcore.arguments import numbers
from fedcore.arrays import F64, I64, ieee
from fedcore.kernels.forms import Terms
from fedcore.kernels.norms import sum_of_partials
from fedcore.kernels.rows import ANCHORED, REPLACED
from fedcore.native import core

LONGEST_EXACT = 2.0**39
"""The |weight h| at which a term is too long for the grid."""
MOST_EXACT = 2.0**52
"""The bound on the sum of the lengths of all terms."""
NEWS = Terms(h=1)
"""The form that ``accumulate_exact`` adds."""


class ExactSum(NamedTuple):
    """A sum of n elements, high 2^-10 + low 2^-60 each, in one form: 0 <= low < 2^50. Equal sums are equal bytes.

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
    def zeros(cls, n: int) -> "ExactSum":
        """A sum of no terms."""
        return cls(memory.zeros(n, np.int64), memory.zeros(n, np.int64))

    @classmethod
    def empty(cls, n: int) -> "ExactSum":
        """Memory for a sum; its content is uninitialised."""
        return cls(memory.empty(n, np.int64), memory.empty(n, np.int64))

    def cut(self, span: slice) -> "ExactSum":
        """A span of the sum, as views."""
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
    """Add clients' mean gradients to an exact sum: out = acc + sum_i rounded(weights[i] h_i), as ``accumulate`` does.

    Args:
        acc: the sum so far; None for zeros.
        bases, ys, scales, weights: as for ``accumulate``, which also defines h_i.
        out: of the length of ``acc``, which it may be; disjoint from everything else.
        partials: as for ``accumulate``, for ``sum_of_partials_exact``.

    Returns:
        float64[k], the squared norms |h_i|^2. One is not finite if ``ys[i]`` has a NaN or an infinity, or if
        |weights[i] h_i| is at least ``LONGEST_EXACT``; ``out`` is then invalid, a separate ``acc`` stays valid. The
        caller keeps the sum of the lengths of all terms below ``MOST_EXACT``.

    Raises:
        ShapeError, DtypeError, ArrayError: an argument differs from ``Args``; nothing was written.

    Determinism: the same bits in any order and for any partition into partial sums that are joined, on every ISA level
        and thread count. The error is below 2^-61 a term, and one rounding when the sum is read.
    Cost: that of ``accumulate`` with a float64 sum, and 16 n bytes more.
    Reference: Demmel and Nguyen, "Parallel Reproducible Summation", 2015, whose bins are here integers on a fixed grid.
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
    """``exchange`` with an exact sum: each term of ``adds`` is rounded separately.

    ::

        r_i' = row.h h_i + row.r r_i + row.q q_i
        out  = acc + sum_i sum over the terms of rounded((weights[i] adds.term) term)

    With weights of 1 and ``adds`` of 1 and -1 a replaced row is subtracted to the last bit. So a running total of many
    exchanges is the sum of the current rows.

    Args:
        acc, out: the same sum, or disjoint ones.
        bases, ys, scales, weights, old_rows, anchors, new_rows, row, adds, keys, sums, first: as for ``exchange``. The
            weighted elements of old rows and anchors are below 2^40, as earlier calls have checked.
        partials: as for ``exchange``, for ``sum_of_partials_exact``.

    Returns:
        float64[k], as of ``exchange``; infinite too where |weights[i] h_i| is ``LONGEST_EXACT`` or more, or an element
        of a new row times its weight 2^40.

    Raises, Determinism: as for ``exchange`` and ``accumulate_exact``.
    Cost: that of ``exchange``, and 16 n bytes more.
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
    """The squared norms that one call of ``accumulate_exact`` or ``exchange_exact`` returns, from its parts' partials.

    ``LONGEST_EXACT`` bounds the length of a whole h_i. A call on a part compares only the part's length with it.

    Args:
        partials: float64[blocks, k] of all blocks, as for ``sum_of_partials``.
        weights: float64[k], those of the calls.
        row, adds: those of the calls of ``exchange_exact``.

    Returns:
        float64[k], infinite where a call on the whole returns infinity.

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
    """The combination sum_i coefficients[i] terms[i] with integer coefficients, exact.

    Args:
        terms: k >= 1 sums, or vectors float32[n], which are rounded to the grid. Read-only.
        coefficients: k integers of at most 2^31.
        out: ``terms[0]`` itself, or words that no term overlaps. Default: new words.

    Returns:
        The combination, ``out`` if it was given. None if an intermediate sum could pass 2^52, or if an element of a
        vector is NaN or at least 2^40; ``out`` is then invalid.

    Raises:
        ShapeError, DtypeError, ArrayError, RangeError: an argument differs from ``Args``; nothing was written.

    Determinism: the same bits in any order of the terms, on every ISA level and thread count.
    Cost: reads 16 n bytes a sum and 4 n a vector, writes 16 n.

    >>> a, b = ExactSum(np.array([5]), np.array([1 << 49])), ExactSum(np.array([-2]), np.array([1 << 49]))
    >>> combine_exact([a, b], [1, 1])
    ExactSum(high=array([4]), low=array([0]))
    """
    if out is None:
        first = terms[0] if len(terms) else np.empty(0)
        out = ExactSum.empty(len(first.high if isinstance(first, ExactSum) else first))
    return out if core.combine_exact(terms, numbers("coefficients", coefficients, np.int64), out) else None


@ieee
def read_exact(sum: ExactSum, out: Any = None) -> Any:
    """The sum as floating numbers: float64(high) 2^-10 + low 2^-60, rounded once where it is below 2^43.

    Args:
        sum: read-only.
        out: float64[n] or float32[n] (rounded from float64 once more), written in place. Default: a new float64
            array.

    Returns:
        ``out``.

    Raises:
        ShapeError, DtypeError, ArrayError: an argument differs from ``Args``; nothing was written.

    Determinism: one function of the integers.
    Cost: reads 16 n bytes, writes 8 n or 4 n.
    """
    if out is None:
        out = memory.empty(len(sum.high), np.float64)
    core.read_exact(sum, out)
    return out
