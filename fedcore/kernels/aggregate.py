"""Weighted sums of rows and models, and sums of clients' mean gradients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar, overload

import numpy as np

from fedcore import arrays as memory
from fedcore.arrays import F64, Bools, Floats, core, ieee, native
from fedcore.errors import ShapeError, UnknownNameError
from fedcore.kernels.exact import ExactSum
from fedcore.validation import check_list, length, numbers

Precision: TypeAlias = Literal["float32", "float64"]
Rows: TypeAlias = Sequence[Any]
Models: TypeAlias = Sequence[Sequence[Any]]
Outs: TypeAlias = Sequence[Any] | None
Total = TypeVar("Total", Floats, ExactSum)


@dataclass(frozen=True, eq=False)
class Summed:
    """A weighted sum of h_i = row i or base - row i, with the norms of the sum and of all h_i.

    Attributes:
        sum: sum_i w_i h_i, an array or the list of a model's arrays.
        squared_norms: |h_i|^2, float64[k].
        squared_norm_of_sum: |sum_i w_i h_i|^2, before a rounding of the sum to 16 bits.
        weights: w_i, float64[k].
    """

    sum: Any
    squared_norms: F64
    squared_norm_of_sum: float
    weights: F64 = field(repr=False)

    @property
    def finite(self) -> Bools:
        """Whether each h_i is finite, bool[k]; float64 rows with numbers above 1e154 count as infinite."""
        return np.isfinite(self.squared_norms)

    @property
    @ieee
    def diversity(self) -> float | None:
        """The weighted gradient diversity sum_i q_i |h_i|^2 / |sum_i q_i h_i|^2, q_i = w_i / sum w.

        The diversity is 1 if all h_i are equal, and large if they cancel. None if the weights or the weighted h_i add
        up to zero, or if a number is not finite.

        Reference: Haddadpour and Mahdavi, On the Convergence of Local Descent Methods in Federated Learning, 2019,
        eq. 7.
        """
        if not (self.finite.all() and 0 < self.squared_norm_of_sum < np.inf):
            return None
        total = float(self.weights.sum())
        diversity = total * float(self.weights @ self.squared_norms) / self.squared_norm_of_sum
        return diversity if total != 0 and np.isfinite(diversity) else None

    @classmethod
    @ieee
    def of(cls, sum: Any, squares: F64, weights: Any) -> "Summed":
        """Return a ``Summed`` from float64[k + 1]: the rows' squared norms, then the sum's."""
        return cls(sum, squares[:-1], float(squares[-1]), np.array(weights, np.float64))


@overload
def weighted_sum(
    rows: Rows, weights: Any, out: Any = ..., *, base: Any = ..., accumulate: Precision = ..., norms: Literal[True]
) -> Summed: ...
@overload
def weighted_sum(
    rows: Rows, weights: Any, out: Any = ..., *, base: Any = ..., accumulate: Precision = ..., norms: bool = ...
) -> Any: ...
@ieee
def weighted_sum(
    rows: Rows,
    weights: Any,
    out: Any = None,
    *,
    base: Any = None,
    accumulate: Precision = "float32",
    norms: bool = False,
) -> Any:
    """Return the weighted sum of separate rows, sum_i w_i h_i with h_i = rows[i] or base - rows[i].

    Args:
        rows: k arrays of n numbers: arrays of NumPy, torch or CuPy, or any objects with DLPack or the buffer protocol.
            All are in CPU memory or on one CUDA device. All have one dtype: float32, float64, float16 or bfloat16
            (torch's, or that of ml_dtypes for NumPy).
        weights: float32[k], or float64[k] for float64 sums, or a list of k numbers.
        out: float32[n], or n numbers of the rows' dtype, written in place, disjoint from all inputs. Default: a new
            array on the rows' device (NumPy's or a ``DeviceArray``), float64 if rows and sum are float64, else float32.
        base: float32[n]. If given, h_i = base - rows[i]; the differences are not stored.
        accumulate: the precision of the products and sums.
        norms: whether to return the squared norms of all h_i and of the sum too.

    Returns:
        The sum, ``out`` if given; with ``norms`` a ``Summed``.

    Determinism: h_i are float32 (float64 if rows and sum are float64). Products and sums have the precision of
        ``accumulate``, in the order of the rows, and are rounded once to ``out``, to nearest with ties to even. The
        sum is bit-identical with and without norms. Norms sum squares of float32(h_i) on 16 fixed float32 lanes, or
        like ``squared_norms`` if float32 could not hold them; their relative error is below 1e-5.
    Cost: reads all rows and the base once and writes the sum once; norms need no further pass.

    >>> weighted_sum([np.float32([1, 2]), np.float32([3, 4])], [0.5, 0.5])
    array([2., 3.], dtype=float32)
    >>> weighted_sum([np.float16([1, 2]), np.float16([3, 4])], [0.5, 0.5], base=np.float32([2, 2]))
    array([ 0., -1.], dtype=float32)
    >>> summed = weighted_sum([np.float32([3, 4]), np.float32([3, -4])], [0.5, 0.5], norms=True)
    >>> summed.squared_norms, summed.squared_norm_of_sum, summed.finite
    (array([25., 25.]), 9.0, array([ True,  True]))
    >>> round(summed.diversity, 3)
    2.778
    """
    weights, float64 = _as_weights(weights, accumulate)
    if out is None:
        rows = check_list("rows", rows)
        if not rows:
            raise ShapeError("rows: must not be empty without out")
        out = memory.empty_beside(rows[0], length("rows[0]", rows[0]), _sum_dtype(rows[0], float64))
    squares = core.weighted_sum(rows, weights, out, base=base, float64=float64, norms=norms)
    return out if squares is None else Summed.of(out, squares, weights)


@overload
def weighted_sum_segments(
    models: Models,
    weights: Any,
    outs: Outs = ...,
    *,
    base: Outs = ...,
    accumulate: Precision = ...,
    norms: Literal[True],
) -> Summed: ...
@overload
def weighted_sum_segments(
    models: Models, weights: Any, outs: Outs = ..., *, base: Outs = ..., accumulate: Precision = ..., norms: bool = ...
) -> Any: ...
@ieee
def weighted_sum_segments(
    models: Models,
    weights: Any,
    outs: Outs = None,
    *,
    base: Outs = None,
    accumulate: Precision = "float32",
    norms: bool = False,
) -> Sequence[Any] | Summed:
    """Return the weighted sum of models given as lists of tensors: outs[s] = sum_i w[i] models[i][s].

    Args:
        models: k lists of contiguous arrays of any shapes, in CPU memory or on one CUDA device. The arrays models[i][s]
            of all models i have the same size and dtype, one of those of ``weighted_sum``.
        weights, accumulate: as for ``weighted_sum``.
        outs: arrays of the same sizes, each float32 or of its tensors' dtype, written in place, disjoint from all
            inputs. Default: new arrays, as for ``weighted_sum`` (vectors on a device).
        base: float32 arrays of the same sizes. If given, the sum is over base[s] - models[i][s].
        norms: whether to return the squared norms of whole models and of their sum too. Tensors' squares are added in
            float64.

    Returns:
        The sums, ``outs`` if given, else arrays with the first model's shapes; with ``norms`` a ``Summed``.

    Determinism: as for ``weighted_sum``.
    Cost: reads every model once and writes one model; no scratch.

    >>> weighted_sum_segments([[np.float32([[1]]), np.float32([2])], [np.float32([[3]]), np.float32([4])]], [1, 1])
    [array([[4.]], dtype=float32), array([6.], dtype=float32)]
    >>> summed = weighted_sum_segments([[np.float32([3]), np.float32([[4]])]], [2], norms=True)
    >>> summed.squared_norms, summed.squared_norm_of_sum
    (array([25.]), 100.0)
    """
    weights, float64 = _as_weights(weights, accumulate)
    if outs is None:
        models = check_list("models", models)
        if not models:
            raise ShapeError("models: must not be empty without outs")
        outs = [_sum_like(tensor, float64) for tensor in check_list("models[0]", models[0])]
    squares = core.weighted_sum_segments(models, weights, outs, base=base, float64=float64, norms=norms)
    return outs if squares is None else Summed.of(outs, squares, weights)


def _as_weights(weights: Any, accumulate: str) -> tuple[Any, bool]:
    if accumulate not in ("float32", "float64"):
        raise UnknownNameError.of("accumulate", accumulate, ["float32", "float64"])
    float64 = accumulate == "float64"
    if isinstance(weights, list | tuple):
        weights = numbers("weights", weights, np.float64 if float64 else np.float32)
    return weights, float64


def _sum_like(tensor: Any, float64: bool) -> Any:
    shape, dtype = np.shape(tensor), _sum_dtype(tensor, float64)
    beside = memory.empty_beside(tensor, math.prod(shape), dtype)
    return beside.reshape(shape) if isinstance(beside, np.ndarray) else beside


def _sum_dtype(row: Any, float64: bool) -> type[np.floating[Any]]:
    """Return float64 if row and sum are float64, else float32; an object with DLPack or a buffer may have no dtype."""
    leaf = row if hasattr(row, "dtype") or not float64 else memory.read_leaf("rows[0]", row)
    dtype = str(leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype).removeprefix("torch.")
    return np.float64 if float64 and dtype == "float64" else np.float32


@native
def accumulate(
    acc: Total | None,
    bases: Sequence[Any],
    ys: Sequence[Any],
    scales: F64,
    weights: F64,
    *,
    out: Total,
    partials: F64 | None = None,
) -> F64:
    """Add clients' mean gradients to a sum: out = acc + sum_i weights[i] h_i, h_i = (bases[i] - ys[i]) scales[i].

    For an ``ExactSum`` each term is rounded: out = acc + sum_i rounded(weights[i] h_i). The caller must keep the sum of
    the norms of all terms below ``MOST_EXACT``.

    Args:
        acc: the sum so far, float32[n], float64[n] or an ``ExactSum``, or None for zeros.
        bases: k entries: client i's initial model, float32[n], or None if ``ys[i]`` is a difference; then
            h_i = -ys[i] scales[i].
        ys: the clients' k arrays [n]: float32, float64, float16 or bfloat16 (torch.bfloat16, by DLPack), rounded to
            float32 first. An entry may also be a list of tensors with n elements in total; all such lists must have the
            same tensor sizes.
        scales: float64[k]; with 1 / (eta_i K_i), h_i is the mean gradient of client i's steps.
        weights: float64[k].
        out: output of the type and length of ``acc``, or ``acc`` itself. It is disjoint from the other arguments.
        partials: output in host memory, float64[blocks, k]: the share of each block of 16,384 elements in each
            |h_i|^2, for ``sum_of_partials``, or for ``sum_of_partials_exact`` with an exact sum. blocks =
            ceil(n / 16,384); for lists, each tensor has its own blocks, in the order of the tensors. Default: no
            output.

    Returns:
        float64[k], the squared norms |h_i|^2. A norm is not finite if and only if ``ys[i]`` has a NaN or an infinity,
        or the sum is exact and |weights[i] h_i| >= ``LONGEST_EXACT``. ``out`` is then invalid; a separate ``acc`` stays
        valid.

    Determinism: h_i is float32. The sum has the dtype of ``out``, in the order of the clients; a batch is
        bit-identical to single calls. An exact sum is bit-identical for any order and any partition into partial sums;
        its error is below 2^-61 per term, plus one rounding when the sum is read.
    Cost: reads the ys once (4 k n bytes in float32), 4 n bytes and ``acc``, and writes ``out`` once. An exact sum has
        16 n bytes.
    Reference: Demmel and Nguyen, "Parallel Reproducible Summation", 2015, for the exact sum. Its bins are integers on a
        fixed grid here.
    """
