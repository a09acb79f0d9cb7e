"""A linear combination without fedcore: SCAFFOLD-M's offset from a float64 total and two rows."""

import numpy as np
import torch

COEFFICIENTS = (0.01, -0.2, 0.8)


def terms(n):
    """Return a total float64[n], and two vectors float32[n]."""
    rng = np.random.default_rng(0)
    return [rng.random(n), rng.random(n, dtype=np.float32), rng.random(n, dtype=np.float32)]


def numpy_expressions(total, row, momentum):
    """Return a function that evaluates the formula in float64 and rounds."""
    a, b, c = COEFFICIENTS
    return lambda: (a * total + b * row.astype(np.float64) + c * momentum.astype(np.float64)).astype(np.float32)


def torch_in_place(total, row, momentum):
    """Return a function that computes in float64 with one scratch vector and rounds."""
    total, row, momentum = (torch.from_numpy(array) for array in (total, row, momentum))
    wide, out = torch.empty_like(total), torch.empty_like(row)
    a, b, c = COEFFICIENTS

    def run():
        torch.mul(total, a, out=wide).add_(row, alpha=b).add_(momentum, alpha=c)
        return out.copy_(wide)

    return run
