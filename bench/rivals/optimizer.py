"""A server's Adam and Yogi without fedcore; they write new moments and a new x, and keep the old ones."""

import numpy as np
import torch

FROM_M, FROM_V, FROM_S, FROM_SQUARE, TAU, GAMMA = 0.9, 0.1, 0.99, 0.01, 1e-3, 0.5


def vectors(n):
    """Return float32[n] vectors v, m, s >= 0 and x."""
    rng = np.random.default_rng(0)
    return [rng.random(n, dtype=np.float32) for _ in range(4)]


def numpy_expressions(v, m, s, x, *, yogi, x_out):
    """Evaluate the paper's formulas in NumPy, with a temporary array per operation and without |x'|^2."""
    m = np.float32(FROM_M) * m + np.float32(FROM_V) * v
    square = v * v
    if yogi:
        s = s - np.float32(FROM_SQUARE) * square * np.sign(s - square)
    else:
        s = np.float32(FROM_S) * s + np.float32(FROM_SQUARE) * square
    u = np.divide(m, np.sqrt(s) + np.float32(TAU), dtype=np.float32)
    np.subtract(x, np.float32(GAMMA) * u, out=x_out)
    return m, s


def torch_adam(v, m, s, x):
    """Return a function for Adam with the fewest torch operations, into allocated memory and without |x'|^2."""
    v, m, s, x = (torch.from_numpy(array) for array in (v, m, s, x))
    m_out, s_out, x_out, root = (torch.empty_like(x) for _ in range(4))

    def run():
        torch.mul(m, FROM_M, out=m_out).add_(v, alpha=FROM_V)
        torch.mul(s, FROM_S, out=s_out).addcmul_(v, v, value=FROM_SQUARE)
        torch.sqrt(s_out, out=root).add_(TAU)
        torch.addcdiv(x, m_out, root, value=-GAMMA, out=x_out)

    return run


def torch_yogi(v, m, s, x):
    """Return a function for Yogi with the fewest torch operations, into allocated memory and without |x'|^2."""
    v, m, s, x = (torch.from_numpy(array) for array in (v, m, s, x))
    m_out, s_out, x_out, root = (torch.empty_like(x) for _ in range(4))

    def run():
        torch.mul(m, FROM_M, out=m_out).add_(v, alpha=FROM_V)
        torch.mul(v, v, out=s_out)
        torch.sub(s, s_out, out=root).sign_().mul_(s_out)
        torch.add(s, root, alpha=-FROM_SQUARE, out=s_out)
        torch.sqrt(s_out, out=root).add_(TAU)
        torch.addcdiv(x, m_out, root, value=-GAMMA, out=x_out)

    return run
