"""The steps of a server, an optimiser, a client and a network, and linear combinations of vectors."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedcore import arrays as memory
from fedcore.arguments import length, listed, numbers
from fedcore.arrays import F32, F64, I64, Floats, ieee
from fedcore.errors import DtypeError, RangeError, ShapeError
from fedcore.kernels.forms import Linear
from fedcore.native import core

KEPT = Linear(T=1)
"""The form of a running total that does not change."""


@ieee
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
    """The linear step that ends a round, from the round's sums A and B and the running total T::

        v  = v_of.A A + v_of.T T + v_of.g g + v_of.B B
        T' = total_of.T T + total_of.A A + total_of.B B + total_of.g g + total_of.v v
        x' = x - gamma v

    Args:
        sum: float32[n] or float64[n], A.
        total: float64[n], T, or None where the method keeps no total.
        x: float32[n].
        momentum: float32[n], g, the direction of the round before, or None.
        control: float64[n], B, a second sum of the round, or None.
        v, total_out, x_out: outputs float32[n], float64[n] (None where ``total`` is), float32[n]; each may be the
            input that it replaces: ``momentum``, ``total``, ``x``.
        partials: float64[ceil(n / 16,384), 2], written: the blocks' shares of |v|^2 and |x'|^2, as of ``accumulate``.

    Returns:
        |v|^2 and |x'|^2 in float64; the second is not finite exactly if an element of x' is not.

    Raises:
        ShapeError, DtypeError, ArrayError: an argument differs from ``Args``; nothing was written.

    Determinism: elementwise in float64, each formula from its left to its right and without the terms that are None;
        v and x' rounded once to float32; T' sees v as it was rounded.
    Cost: reads 12 n bytes (8 n more with a total, 4 n with a momentum, 8 n with a control), writes 8 n (16 n).
    """
    return core.server_step(
        sum,
        total,
        momentum,
        control,
        x,
        v,
        total_out,
        x_out,
        v_of=v_of,
        total_of=total_of,
        gamma=gamma,
        partials=partials,
    )


@ieee
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
    """The step x' = x - gamma u of an adaptive optimiser, u = m' / (sqrt(s') + tau), and its next moments m' and s'.

    m' = from_m m + from_v v;  s' = from_s s + from_square v^2, or s - from_square v^2 sign(s - v^2) where ``yogi``.

    Args:
        v: float32[n], the round's direction. Read-only, as all that are no outputs.
        m: float32[n], the first moment.
        s: float32[n], the second moment, or None for an optimiser without one (u = m').
        x: float32[n].
        from_m, from_v, from_s, from_square, tau, gamma: rounded to float32.
        yogi: how the second moment follows; ``from_s`` counts only where it is False.
        m_out, s_out, x_out: outputs float32[n] (``s_out`` None where ``s`` is); each may be the input that it replaces:
            ``m``, ``s``, ``x``.
        partials: float64[ceil(n / 16,384), 1], written: the blocks' shares of |x'|^2, as of ``accumulate``.

    Returns:
        |x'|^2 in float64; not finite exactly if an element of x' is not.

    Raises:
        ShapeError, DtypeError, ArrayError: an argument differs from ``Args``; nothing was written.

    Determinism: float32 in the order of the formulas from their left to their right, each operation rounded: the same
        bits on every ISA level and thread count.
    Cost: reads 16 n bytes, writes 12 n; 12 n and 8 n without a second moment.
    Reference: Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2.

    >>> import numpy as np
    >>> x, m, s = np.float32([1, 1]), np.float32([0, 0]), np.float32([0, 0])
    >>> optimizer_step(np.float32([3, 4]), m, s, x, from_m=0, from_v=1, gamma=0.5, m_out=m, s_out=s, x_out=x)
    0.5
    >>> x, m, s
    (array([0.5, 0.5], dtype=float32), array([3., 4.], dtype=float32), array([ 9., 16.], dtype=float32))
    """
    return core.optimizer_step(
        v,
        m,
        s,
        x,
        m_out,
        s_out,
        x_out,
        from_m=from_m,
        from_v=from_v,
        from_s=from_s,
        from_square=from_square,
        yogi=yogi,
        tau=tau,
        gamma=gamma,
        partials=partials,
    )


@ieee
def combine(terms: Sequence[Any], coefficients: Sequence[float], out: Any = None) -> Any:
    """The linear combination sum_i coefficients[i] terms[i], in one pass.

    An example is the constant part of a method's direction, computed once per client and round. With c = total / N the
    server's control variate, c_i the client's and g the momentum:

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
        terms: k >= 1 arrays [n], each float32 or float64 (a running total need not be copied or divided first).
            Read-only.
        coefficients: k numbers.
        out: float32[n] or float64[n], written in place: ``terms[0]`` itself, or memory that no term overlaps.
            Default: a new float32 array on the device of ``terms[0]``, NumPy's or a ``DeviceArray``.

    Returns:
        The combination, ``out`` if it was given.

    Raises:
        ShapeError, DtypeError, ArrayError: an argument differs from ``Args``; nothing was written.

    Determinism: float64 from the first term to the last, rounded once: the same bits on every ISA level and thread
        count.
    Cost: reads every term once (4 n or 8 n bytes), writes 4 n or 8 n bytes.
    Reference: Cheng et al., Momentum Benefits Non-IID Federated Learning Simply and Provably, Algorithms 1-4.

    >>> combine([np.float64([6, 8]), np.float32([1, 1])], [1 / 2, -1])
    array([2., 3.], dtype=float32)
    >>> total = np.float64([6, 8])
    >>> combine([total, np.float32([1, 1])], [1, -1], total)
    array([5., 7.])
    """
    if out is None:
        terms = listed("terms", terms)
        if not terms:
            raise ShapeError("terms: expected at least one vector, got none")
        out = memory.empty_beside(terms[0], length("terms[0]", terms[0]))
    core.combine(terms, numbers("coefficients", coefficients, np.float64), out)
    return out


@ieee
def combined_square(terms: Sequence[Any], coefficients: Sequence[float], *, partials: F64 | None = None) -> float:
    """The squared norm |sum_i coefficients[i] terms[i]|^2 of a linear combination, without computing the combination.

    Arguments and errors are those of ``combine``; ``partials`` is float64[ceil(n / 16,384), 1], written: the blocks'
    shares, as of ``accumulate``.

    Determinism: float64 throughout, squares on 16 fixed lanes folded in a fixed tree: the same bits on every ISA level
        and thread count.
    Cost: reads every term once, writes nothing.

    >>> combined_square([np.float64([6, 8]), np.float32([3, 4])], [1, -1])
    25.0
    """
    return core.combined_square(terms, numbers("coefficients", coefficients, np.float64), partials)


@ieee
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
    """One local step in place: y <- y - lr (a (grad + weight_decay y) + b grad_prev + offset + mu (y - x)).

    With suitable a, b, mu and offset (``combine``) this is the local step of FedAvg, FedProx, SCAFFOLD and
    the momentum and variance-reduced methods. Weight decay counts as part of the gradient, so ``a`` multiplies it;
    ``grad_prev`` must include its weight decay, weight_decay * x_prev.

    Args:
        y: float32[n] (NumPy, torch, CuPy, anything with DLPack or the buffer protocol), in CPU memory or on a CUDA
            device, as all others then; changed in place; overlaps no other argument.
        grad: float32[n], the minibatch gradient at y. Read-only, as are all that follow.
        lr: the local rate, eta; it and the coefficients are rounded to float32.
        grad_prev: float32[n], the same minibatch's gradient at x_{t-1}; may be None where b = 0.
        offset: float32[n] or None, the part of the direction that is constant over the local steps.
        x: float32[n], the model that the client started from; may be None where mu = 0.

    Raises:
        ShapeError, DtypeError, ArrayError: an argument differs from ``Args``; nothing was written.

    Determinism: float32 in the order of the formula, each operation rounded; a term whose coefficient is 0 or whose
        vector is None is left out. The same bits on every ISA level and thread count.
    Cost: reads 8 n bytes and 4 n for each optional vector that counts, writes 4 n bytes. A torch tensor costs some
        microseconds more than a NumPy array: where n is small, make its ``.numpy()`` view once.
    Reference: Cheng et al., Momentum Benefits Non-IID Federated Learning Simply and Provably, Algorithms 1-4;
        Li et al., Federated Optimization in Heterogeneous Networks (mu).

    >>> import numpy as np
    >>> y = np.float32([1, 2])
    >>> direction_step(y, np.float32([1, 1]), lr=0.5, offset=np.float32([0, 2]))
    >>> y
    array([0.5, 0.5], dtype=float32)
    """
    core.direction_step(y, grad, grad_prev, offset, x, lr, a, b, mu, weight_decay)


@ieee
def mix(models: Sequence[Any], W: Any) -> None:
    """All models at once and in place: y_i <- sum_j W[i, j] y_j.

    Args:
        models: p arrays float32[n] (NumPy, torch, CuPy, anything with DLPack or the buffer protocol), in CPU memory
            or on one CUDA device (p up to 16,384 there), overwritten; no two overlap.
        W: float32[p, p] or float64[p, p] (a nested list counts as float64), or a sparse matrix: anything with
            ``tocsr()``, as SciPy's have, or with the ``indptr``, ``indices`` and ``data`` of compressed rows.
            Rounded to float32. Read-only.

    Raises:
        ShapeError, DtypeError, ArrayError, RangeError: an argument differs from ``Args``, or W is not finite;
            nothing was written.

    Determinism: float32 in the order of the columns; a weight of 0 is left out, so that a dense matrix and the same
        one sparse give the same bits, on every ISA level and thread count. Rounding W leaves the sum of a row within
        a few 1e-8 of what it was.
    Cost: reads 4 p n bytes and writes 4 p n, whatever W; 2 p^2 n operations at most. Scratch: 128 KiB a thread, or
        256 p bytes where that is more.
    Reference: Haddadpour, Mahdavi, On the Convergence of Local Descent Methods in Federated Learning, Algorithm 2.

    >>> models = [np.float32([0, 4]), np.float32([2, 0])]
    >>> mix(models, [[0.5, 0.5], [0.25, 0.75]])
    >>> models
    [array([1., 2.], dtype=float32), array([1.5, 1. ], dtype=float32)]
    """
    each = listed("models", models)
    core.mix(each, *compressed_rows(W, len(each)))


def compressed_rows(W: Any, p: int) -> tuple[I64, I64, F32]:
    """The entries of W that are not 0, by rows and in the order of the columns: starts, columns, weights."""
    if hasattr(W, "tocsr"):
        W = W.tocsr()
    if hasattr(W, "indptr"):
        starts, columns, weights = np.asarray(W.indptr), np.asarray(W.indices), np.asarray(W.data)
        if starts.shape != (p + 1,) or getattr(W, "shape", (p, p)) != (p, p):
            raise ShapeError(f"W: expected [{p}, {p}], one row a model, got {len(starts) - 1} rows")
        counts = np.diff(starts)
        if starts[0] != 0 or (counts < 0).any() or not starts[-1] == len(columns) == len(weights):
            due = f"indptr that rises from 0 to the {len(weights)} entries of data and indices"
            raise RangeError(f"W: expected {due}, got {starts[0]} .. {starts[-1]} for {len(columns)} indices")
        rows = np.repeat(np.arange(p), counts)
    else:
        dense = numbers("W", W, np.float64) if isinstance(W, list | tuple) else np.asarray(W)
        if dense.shape != (p, p):
            raise ShapeError(f"W: expected [{p}, {p}], one row a model, got {list(dense.shape)}")
        rows, columns = np.nonzero(dense)
        weights = dense[rows, columns]
    if weights.dtype not in (np.float32, np.float64):
        raise DtypeError(f"W: expected float32 or float64, got {weights.dtype}")
    with np.errstate(over="ignore"):
        weights = weights.astype(np.float32)
    if not np.isfinite(weights).all():
        raise RangeError("W: expected entries that are finite in float32, got one that is not")
    order = np.lexsort((columns, rows))
    order = order[weights[order] != 0]
    starts = np.zeros(p + 1, np.int64)
    np.cumsum(np.bincount(rows[order], minlength=p), out=starts[1:])
    return starts, columns[order].astype(np.int64), weights[order]
