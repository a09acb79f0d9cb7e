"""Inner products of updates and order statistics of their columns, for robust aggregation rules."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedcore.arrays import F32, F64, Bfloat16Array, core, ieee, native
from fedcore.errors import RangeError
from fedcore.validation import check_integer, check_list, length

BLOCK = 16_384
"""The elements of a block, whose share of a sum is added at once."""


@native
def gram_matrix(bases: Sequence[Any], ys: Sequence[Any], scales: F64, *, partials: F64 | None = None) -> F64:
    """Return the inner products of k clients' updates, float64[k, k]: G[i, j] = sum over the elements of h_i h_j.

    Args:
        bases, ys, scales: as for ``accumulate``, on any device; they define h_i = (bases[i] - ys[i]) scales[i], or
            -ys[i] scales[i] without a base.
        partials: output, float64[blocks, k (k + 1) / 2], blocks = ceil(n / 16,384): the share of each block in the
            upper triangle of G, row by row, for ``sum_of_partials``. Default: no output.

    Determinism: h_i is float32. Products are exact in float64, added on 8 lanes in each block of 16,384 elements.
        Updates of the same bits have the same entries, so their distance is exactly zero. Separate tensors give the
        bits of flat vectors.
    Cost: reads all updates once, with k^2 / 2 multiplications per element; 4 k^2 bytes per 16,384 elements.

    >>> import numpy as np
    >>> gram_matrix([None, None], [np.float32([1, 2]), np.float32([3, 0])], np.ones(2))
    array([[5., 3.],
           [3., 9.]])
    """


def symmetric(triangle: F64, k: int) -> F64:
    """Return the symmetric matrix, float64[k, k], of an upper triangle, row by row.

    >>> import numpy as np
    >>> symmetric(np.float64([5, 3, 9]), 2)
    array([[5., 3.],
           [3., 9.]])
    """
    matrix: F64 = np.empty((k, k))
    rows, columns = np.triu_indices(k)
    matrix[rows, columns] = matrix[columns, rows] = triangle
    return matrix


class GramSum:
    """``gram_matrix`` of updates that come in windows of columns, with the bits of one call.

    A window may have any length; less than a block of it, k vectors of 16,384 elements, is kept for the next one.

    >>> import numpy as np
    >>> total = GramSum(2)
    >>> for window in ([np.float32([1]), np.float32([3])], [np.float32([2]), np.float32([0])]):
    ...     total.add(None, window)
    >>> total.result()
    array([[5., 3.],
           [3., 9.]])
    """

    def __init__(self, k: int) -> None:
        self._k, self._sum = k, np.zeros(k * (k + 1) // 2)
        self._base: list[Any] = []
        self._rows: list[list[Any]] = [[] for _ in range(k)]
        self._length = 0

    def add(self, base: F32 | None, rows: Sequence[Any]) -> None:
        """Add a window: h_i = base - rows[i], or -rows[i]; vectors of one length."""
        if not len(rows[0]):
            return
        self._base.append(base)
        for kept, row in zip(self._rows, rows, strict=True):
            kept.append(row)
        self._length += len(rows[0])
        if self._length >= BLOCK:
            self._take(self._length // BLOCK * BLOCK)
        for kept in (*self._rows, self._base):
            kept[-1:] = [_copied(vector) for vector in kept[-1:]]  # the caller reuses its memory

    def result(self) -> F64:
        """Return the inner products, float64[k, k]."""
        if self._length:
            self._take(self._length)
        return symmetric(self._sum, self._k)

    def _take(self, n: int) -> None:
        """Add the first n elements, and keep the rest, which is a part of the last window."""
        rest = self._length - n
        ends = [len(row) for row in self._rows[0]]
        ends[-1] -= rest
        heads = [[row[:end] for row, end in zip(kept, ends, strict=True)] for kept in self._rows]
        bases: list[Any] = [None if base is None else base[:end] for base, end in zip(self._base, ends, strict=True)]
        whole = None if bases[0] is None else np.concatenate(bases)
        partials = np.empty((-(-n // BLOCK), len(self._sum)))
        gram_matrix([whole] * self._k, heads, np.ones(self._k), partials=partials)
        for share in partials:
            self._sum += share
        self._rows = [[kept[-1][ends[-1] :]] if rest else [] for kept in self._rows]
        self._base = [None if whole is None else self._base[-1][ends[-1] :]] if rest else []
        self._length = rest


def _copied(vector: Any) -> Any:
    if isinstance(vector, Bfloat16Array):
        return Bfloat16Array(vector.codes.copy())
    return vector.clone() if hasattr(vector, "clone") else None if vector is None else np.array(core.present(vector))


@ieee
def trimmed_mean(
    bases: Sequence[Any], ys: Sequence[Any], scales: F64, f: int, *, out: F32, mixing: F64 | None = None
) -> F32:
    """Write the mean of each column without its f smallest and its f largest values.

    With f = (r - 1) // 2 of r values, this is the median; for even r, the mean of the two middle values.

    Args:
        bases, ys, scales: as for ``gram_matrix``.
        f: the number of values to leave out at each end, 0 <= 2 f < r.
        out: output, float32[n], disjoint from the inputs.
        mixing: float64[r, k]. The values of a column are the r combinations sum_i mixing[r, i] h_i, rounded to float32.
            Default: the k values of h_i.

    Returns:
        ``out``.

    Determinism: float64 sums in rising order, rounded once. A zero is +0. The order of the clients has no effect,
        except through the sums of ``mixing``.
    Cost: reads all updates once and writes 4 n bytes; about r log2(r)^2 / 2 vector operations per vector of columns.

    >>> import numpy as np
    >>> ys = [np.float32([y]) for y in (1, 2, 3, -100)]
    >>> trimmed_mean([None] * 4, ys, -np.ones(4), 1, out=np.empty(1, np.float32))
    array([1.5], dtype=float32)
    """
    rows = _rows(ys, mixing)
    f = check_integer("f", f, 0)
    if 2 * f >= rows:
        raise RangeError(f"f={f}: must be less than half of the {rows} values")
    core.column_statistic(bases, ys, scales, out, mixing=mixing, rows=rows, first=f, last=rows - f, nearest=0)
    return out


@ieee
def mean_near_median(
    bases: Sequence[Any], ys: Sequence[Any], scales: F64, m: int, *, out: F32, mixing: F64 | None = None
) -> F32:
    """Write the mean of the m values of each column that are nearest the column's median.

    If values are equally near, it is the mean of the two choices: the lower values, and the higher ones. So the result
    of -h is the negative of that of h. Distances compare as s_i + s_j < 2 median in float64.

    Args:
        bases, ys, scales, out, mixing: as for ``trimmed_mean``.
        m: the number of values, 1 <= m <= r.

    Returns:
        ``out``.

    Determinism, cost: as for ``trimmed_mean``.

    >>> import numpy as np
    >>> ys = [np.float32([y]) for y in (1, 2, 3, -100, 4)]
    >>> mean_near_median([None] * 5, ys, -np.ones(5), 4, out=np.empty(1, np.float32))
    array([2.5], dtype=float32)
    >>> mean_near_median([None] * 6, ys[:3] * 2, -np.ones(6), 3, out=np.empty(1, np.float32))
    array([2.], dtype=float32)
    """
    rows = _rows(ys, mixing)
    m = check_integer("m", m, 1, rows)
    core.column_statistic(bases, ys, scales, out, mixing=mixing, rows=rows, first=0, last=rows, nearest=m)
    return out


def _rows(ys: Sequence[Any], mixing: F64 | None) -> int:
    """Return the number of values of a column."""
    return len(check_list("ys", ys)) if mixing is None else length("mixing", mixing)
