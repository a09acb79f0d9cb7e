"""A server optimiser's step at 10^4, 10^6 and 10^7 elements: read v, both moments and x; write new moments and x."""

import numpy as np
import pytest

from bench.alone import Work
from bench.rivals.optimizer import (
    FROM_M,
    FROM_S,
    FROM_SQUARE,
    FROM_V,
    GAMMA,
    TAU,
    numpy_expressions,
    torch_adam,
    torch_yogi,
    vectors,
)
from fedcore import kernels

SIZES = {10_000: 100, 1_000_000: 1, 10_000_000: 1}
"""The calls per turn, by the number of elements."""


@pytest.mark.parametrize("rule", ["Adam", "Yogi"])
@pytest.mark.parametrize("n", SIZES)
def bench_step(versus, n, rule):
    work, yogi = Work(vectors, n), rule == "Yogi"
    v, m, s, x = work.arrays
    m_out, s_out, x_out, x_expressions = (np.empty_like(x) for _ in range(4))
    numbers = dict(from_m=FROM_M, from_v=FROM_V, from_s=FROM_S, from_square=FROM_SQUARE, tau=TAU, gamma=GAMMA)

    def ours():
        return kernels.optimizer_step(v, m, s, x, m_out=m_out, s_out=s_out, x_out=x_out, yogi=yogi, **numbers)

    def expressions():
        made = numpy_expressions(v, m, s, x, yogi=yogi, x_out=x_expressions)
        return [*made, kernels.squared_norms([x_expressions])]

    ours()
    for mine, theirs in zip((m_out, s_out, x_out), (*expressions()[:2], x_expressions), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    rivals = {
        "the expressions in NumPy, and squared_norms": expressions,
        "torch, into memory that is there": work.rival(torch_yogi if yogi else torch_adam),
    }
    versus(
        f"{rule}'s step, {n:,}",
        ours,
        rivals,
        targets={"the expressions in NumPy, and squared_norms": 3.0, "torch, into memory that is there": 1.2},
        bytes=28 * n,
        calls=SIZES[n],
    )
