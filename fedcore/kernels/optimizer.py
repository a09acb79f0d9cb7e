"""optimizer: a server optimiser's step along the round's direction, with its moments, in one pass."""

from fedcore.float_mode import ieee
from fedcore.native import core
from fedcore.typing import F32, F64


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
        s: float32[n], the second moment; None for an optimiser without one, whose u is m'.
        x: float32[n].
        from_m, from_v, from_s, from_square, tau, gamma: rounded to float32.
        yogi: how the second moment follows; ``from_s`` counts only where it is False.
        m_out, s_out, x_out: outputs float32[n] (``s_out`` None where ``s`` is); each may be the input that it replaces:
            ``m``, ``s``, ``x``.
        partials: float64[ceil(n / 16,384), 1], written: the blocks' shares of |x'|^2, as of ``accumulate``.

    Returns:
        |x'|^2 in float64; not finite exactly if an element of x' is not.

    Raises:
        ShapeError, DtypeError, ArrayError: an argument is not what is said above; nothing was written.

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
