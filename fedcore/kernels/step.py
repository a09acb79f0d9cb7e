"""Steps of servers, optimizers, clients and networks, and linear combinations of vectors."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedcore import arrays as memory
from fedcore.arrays import F32, F64, I64, Floats, core, ieee, native
from fedcore.errors import DtypeError, RangeError, ShapeError
from fedcore.kernels.forms import KEPT, Linear
from fedcore.validation import check_list, length, numbers


@native
def server_step(
    sum: Floats,
    total: F64 | None,
    x: F32,
    *,
    v_of: Linear,
    total_of: Linear = KEPT,
    gamma: float,
    momentum: F32 | None = None,
    control: F64 | None = None,
    v: F32,
    total_out: F64 | None,
    x_out: F32,
    partials: F64 | None = None,
) -> tuple[float, float]:
    """Take the server's linear step from the round's sums A and B and the running total T::

        v  = v_of.A A + v_of.T T + v_of.g g + v_of.B B
        T' = total_of.T T + total_of.A A + total_of.B B + total_of.g g + total_of.v v
        x' = x - gamma v

    Args:
        sum: A, float32[n] or float64[n].
        total: T, float64[n], or None if the method keeps no total.
        x: float32[n].
        momentum: g, the direction of the previous round, float32[n], or None.
        control: B, a second sum of the round, float64[n], or None.
        v, total_out, x_out: outputs, float32[n], float64[n] (None if ``total`` is None) and float32[n]. They may be
            ``momentum``, ``total`` and ``x``.
        partials: output, float64[ceil(n / 16,384), 2], the blocks' shares of |v|^2 and |x'|^2; see ``accumulate``.

    Returns:
        |v|^2 and |x'|^2 in float64. |x'|^2 is not finite if and only if an element of x' is not.

    Determinism: float64 terms from left to right, without terms that are None. v and x' are rounded once to float32; T'
        uses the rounded v.
    Cost: reads 12 n bytes (8 n more with a total, 4 n with a momentum, 8 n with a control) and writes 8 n (16 n).
    """


@native
def optimizer_step(
    v: F32,
    m: F32,
    s: F32 | None,
    x: F32,
    *,
    from_m: float,
    from_v: float,
    from_s: float = 1.0,
    from_square: float = 1.0,
    yogi: bool = False,
    tau: float = 0.0,
    gamma: float,
    m_out: F32,
    s_out: F32 | None,
    x_out: F32,
    partials: F64 | None = None,
) -> float:
    """Take the step x' = x - gamma u of an adaptive optimizer, u = m' / (sqrt(s') + tau), and compute m' and s'.

    m' = from_m m + from_v v. s' = from_s s + from_square v^2, or with ``yogi`` s - from_square v^2 sign(s - v^2).

    Args:
        v: the round's direction, float32[n].
        m: the first moment, float32[n].
        s: the second moment, float32[n], or None for an optimizer without a second moment (u = m').
        x: float32[n].
        from_m, from_v, from_s, from_square, tau, gamma: rounded to float32.
        yogi: the rule for the second moment. If True, ``from_s`` has no effect.
        m_out, s_out, x_out: outputs, float32[n] (``s_out`` is None if ``s`` is None). They may be ``m``, ``s`` and
            ``x``.
        partials: output, float64[ceil(n / 16,384), 1], the blocks' shares of |x'|^2; see ``accumulate``.

    Returns:
        |x'|^2 in float64. It is not finite if and only if an element of x' is not.

    Determinism: float32 in the order of the formulas from left to right, rounded after each operation.
    Cost: reads 16 n bytes and writes 12 n; 12 n and 8 n without a second moment.
    Reference: Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2.

    >>> import numpy as np
    >>> x, m, s = np.float32([1, 1]), np.float32([0, 0]), np.float32([0, 0])
    >>> optimizer_step(np.float32([3, 4]), m, s, x, from_m=0, from_v=1, gamma=0.5, m_out=m, s_out=s, x_out=x)
    0.5
    >>> x, m, s
    (array([0.5, 0.5], dtype=float32), array([3., 4.], dtype=float32), array([ 9., 16.], dtype=float32))
    """


@ieee
def combine(terms: Sequence[Any], coefficients: Sequence[float], out: Any = None) -> Any:
    """Return the linear combination sum_i coefficients[i] terms[i], in ``out`` if given.

    An example is the constant part of a method's direction, computed once per client and round. With the server's
    control variate c = total / N, the client's control variate c_i and the momentum g:

    ================  ===========================  ==============================
    method            terms                        coefficients
    ================  ===========================  ==============================
    SCAFFOLD          total, c_i                   1 / N, -1
    FedAvg-M          g                            1 - beta
    SCAFFOLD-M        total, c_i, g                beta / N, -beta, 1 - beta
    FedAvg-M-VR       g                            1 - beta  (b = -(1 - beta))
    SCAFFOLD-M-VR     total, c_i, g                beta / N, -beta, 1 - beta  (b likewise)
    ================  ===========================  ==============================

    Args:
        terms: k >= 1 arrays [n], each float32 or float64.
        coefficients: k numbers.
        out: float32[n] or float64[n], written in place: ``terms[0]`` itself, or memory that no term overlaps.
            Default: a new float32 array on the device of ``terms[0]`` (NumPy's or a ``DeviceArray``).

    Determinism: float64 in the order of the terms, rounded once.
    Cost: reads every term once (4 n or 8 n bytes) and writes 4 n or 8 n bytes.
    Reference: Cheng et al., Momentum Benefits Non-IID Federated Learning Simply and Provably, Algorithms 1-4.

    >>> combine([np.float64([6, 8]), np.float32([1, 1])], [1 / 2, -1])
    array([2., 3.], dtype=float32)
    >>> total = np.float64([6, 8])
    >>> combine([total, np.float32([1, 1])], [1, -1], total)
    array([5., 7.])
    """
    if out is None:
        terms = check_list("terms", terms)
        if not terms:
            raise ShapeError("terms: must not be empty")
        out = memory.empty_beside(terms[0], length("terms[0]", terms[0]))
    core.combine(terms, numbers("coefficients", coefficients, np.float64), out)
    return out


@ieee
def combined_square(terms: Sequence[Any], coefficients: Sequence[float], *, partials: F64 | None = None) -> float:
    """Return |sum_i coefficients[i] terms[i]|^2 without storing the combination.

    ``terms`` and ``coefficients`` are those of ``combine``. ``partials`` is an output, float64[ceil(n / 16,384), 1]:
    the blocks' shares; see ``accumulate``.

    Determinism: float64; squares are summed on 16 fixed lanes in a fixed tree.
    Cost: reads every term once.

    >>> combined_square([np.float64([6, 8]), np.float32([3, 4])], [1, -1])
    25.0
    """
    return core.combined_square(terms, numbers("coefficients", coefficients, np.float64), partials)


@native
def direction_step(
    y: Any,
    grad: Any,
    *,
    lr: float,
    a: float = 1.0,
    b: float = 0.0,
    mu: float = 0.0,
    weight_decay: float = 0.0,
    grad_prev: Any = None,
    offset: Any = None,
    x: Any = None,
) -> None:
    """Take a local step in place: y <- y - lr (a (grad + weight_decay y) + b grad_prev + offset + mu (y - x)).

    With suitable a, b, mu and offset (``combine``) this is the local step of FedAvg, FedProx, SCAFFOLD and the momentum
    and variance-reduced methods. Weight decay is part of the gradient, so ``a`` multiplies it. ``grad_prev`` must
    already include its weight decay, weight_decay * x_prev.

    Args:
        y: float32[n], changed in place: an array of NumPy, torch or CuPy, or any object with DLPack or the buffer
            protocol. All vectors are in CPU memory or on one CUDA device; y overlaps no other vector.
        grad: the minibatch gradient at y, float32[n].
        lr: eta, the local rate. The rate and the coefficients are rounded to float32.
        grad_prev: the gradient of the same minibatch at x_{t-1}, float32[n]; may be None if b = 0.
        offset: the part of the direction that is constant over the local steps, float32[n] or None.
        x: the client's initial model, float32[n]; may be None if mu = 0.

    Determinism: float32 in the order of the formula, rounded after each operation. Terms with a coefficient of 0 or a
        vector of None are omitted.
    Cost: reads 8 n bytes and 4 n for each optional vector in use, and writes 4 n bytes. A torch tensor costs some
        microseconds more than a NumPy array; for small n, create its ``.numpy()`` view once.
    Reference: Cheng et al., Momentum Benefits Non-IID Federated Learning Simply and Provably, Algorithms 1-4;
        Li et al., Federated Optimization in Heterogeneous Networks (mu).

    >>> import numpy as np
    >>> y = np.float32([1, 2])
    >>> direction_step(y, np.float32([1, 1]), lr=0.5, offset=np.float32([0, 2]))
    >>> y
    array([0.5, 0.5], dtype=float32)
    """


@ieee
def mix(models: Sequence[Any], W: Any) -> None:
    """All models at once and in place: y_i <- sum_j W[i, j] y_j.

    Args:
        models: p disjoint arrays float32[n], overwritten, of any kind that ``direction_step`` accepts. They are in CPU
            memory or on one CUDA device, where p is at most 16,384.
        W: float32[p, p] or float64[p, p] (nested lists are float64), or a sparse matrix, which has ``tocsr()`` as in
            SciPy, or the ``indptr``, ``indices`` and ``data`` of compressed rows. Finite; rounded to float32.

    Determinism: float32 in the order of the columns. Weights of 0 are omitted, so a matrix has the same result in dense
        and sparse form. Rounding W changes the sum of a row by a few 1e-8.
    Cost: reads and writes 4 p n bytes each for any W; at most 2 p^2 n operations. Scratch per thread: 128 KiB or
        256 p bytes, whichever is larger.
    Reference: Haddadpour, Mahdavi, On the Convergence of Local Descent Methods in Federated Learning, Algorithm 2.

    >>> models = [np.float32([0, 4]), np.float32([2, 0])]
    >>> mix(models, [[0.5, 0.5], [0.25, 0.75]])
    >>> models
    [array([1., 2.], dtype=float32), array([1.5, 1. ], dtype=float32)]
    """
    each = check_list("models", models)
    core.mix(each, *compressed_rows(W, len(each)))


def compressed_rows(W: Any, p: int) -> tuple[I64, I64, F32]:
    """Return the non-zero entries of W as compressed rows: starts, columns and weights."""
    if hasattr(W, "tocsr"):
        W = W.tocsr()
    if hasattr(W, "indptr"):
        starts, columns, weights = (numbers("W", one) for one in (W.indptr, W.indices, W.data))
        if starts.shape != (p + 1,) or getattr(W, "shape", (p, p)) != (p, p):
            raise ShapeError(f"W: expected [{p}, {p}], one row per model, got {len(starts) - 1} rows")
        counts = np.diff(starts)
        if starts[0] != 0 or (counts < 0).any() or not starts[-1] == len(columns) == len(weights):
            raise RangeError(
                f"W: indptr must increase from 0 to the length of data and indices; it goes from {starts[0]} to "
                f"{starts[-1]}, and the lengths are {len(weights)} and {len(columns)}"
            )
        rows = np.repeat(np.arange(p), counts)
    else:
        dense = numbers("W", W, np.float64 if isinstance(W, list | tuple) else None)
        if dense.shape != (p, p):
            raise ShapeError(f"W: expected [{p}, {p}], one row per model, got {list(dense.shape)}")
        rows, columns = np.nonzero(dense)
        weights = dense[rows, columns]
    if weights.dtype not in (np.float32, np.float64):
        raise DtypeError(f"W: expected float32 or float64, got {weights.dtype}")
    with np.errstate(over="ignore"):
        weights = weights.astype(np.float32)
    if not np.isfinite(weights).all():
        raise RangeError("W: entries must be finite in float32")
    order = np.lexsort((columns, rows))
    order = order[weights[order] != 0]
    starts = np.zeros(p + 1, np.int64)
    np.cumsum(np.bincount(rows[order], minlength=p), out=starts[1:])
    return starts, columns[order].astype(np.int64), weights[order]


@native
def add_discrete_gaussian(sum: F64, grid: float, sigma: int, key: bytes, *, out: F64) -> None:
    """Write (round(sum / grid) + y) grid, with y from the discrete Gaussian of standard deviation ``sigma``.

    Args:
        sum: float64[n].
        grid: a power of two.
        sigma: an integer in [1, 2^26].
        key: 32 bytes, the key of ChaCha20 (RFC 8439). Each use needs a new one, such as ``os.urandom(32)``.
        out: output, float64[n]; it may be ``sum``.

    Determinism: y is a function of the key, sigma and the index of the element.
    Cost: reads and writes 8 n bytes; 5 to 15 ns an element on one thread.
    Source: Canonne, Kamath, Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS 2020; by rejection from
        the bounds of 512 intervals. The law is exact to within 2^-52 in total variation, apart from relative errors of
        at most 2^-40 of single probabilities.

    >>> noise = np.zeros(3)
    >>> add_discrete_gaussian(noise, 0.5, 8, bytes(32), out=noise)
    >>> noise
    array([ 0.5, -2. ,  0. ])
    """
