"""A linear combination of a float64 total and two float32 vectors: a client's offset, or a diagnostic."""

import numpy as np
import pytest

from bench.alone import Work
from bench.rivals.combine import COEFFICIENTS, numpy_expressions, terms, torch_in_place
from fedcore import kernels

SIZES = {44_426: 100, 11_173_962: 1}
"""The calls per turn, by the number of elements."""


@pytest.mark.parametrize("n", SIZES)
def bench_combine(versus, n):
    work, out = Work(terms, n), np.empty(n, np.float32)
    rivals = {
        "the expression in NumPy": work.rival(numpy_expressions),
        "torch, with a scratch vector": work.rival(torch_in_place),
    }
    versus(
        f"combine, {n:,} (float64 total, two float32)",
        lambda: kernels.combine(work.arrays, COEFFICIENTS, out),
        rivals,
        targets={"the expression in NumPy": 2.0, "torch, with a scratch vector": 1.2},
        bytes=20 * n,
        calls=SIZES[n],
        agree=1e-6,
    )


def bench_combined_square(versus):
    """Time the squared norm of the combination, which is not written."""
    work = Work(terms, 11_173_962)
    a, b, c = COEFFICIENTS

    def expression():
        total, row, momentum = work.arrays
        wide = a * total + b * row.astype(np.float64) + c * momentum.astype(np.float64)
        return float(np.einsum("i,i->", wide, wide))

    versus(
        "length of a combination, 11,173,962",
        lambda: kernels.combined_square(work.arrays, COEFFICIENTS),
        {"the expression in NumPy": expression},
        targets={"the expression in NumPy": 3.0},
        bytes=16 * 11_173_962,
        agree=1e-9,
    )
