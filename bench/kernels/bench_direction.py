"""The local step on a ResNet-18 (11.17 M parameters, too large for the caches) and on paper 1's LeNet (44,426)."""

import numpy as np
import pytest
import torch

import fedcore
from bench.alone import Work
from bench.probe import rewrite_floor
from bench.rivals.direction import LR, B, numpy_in_place, torch_add, torch_foreach, vectors
from fedcore import kernels

LARGE, SMALL = 11_173_962, 44_426


def ours(y, grad, offset, grad_prev=None):
    kernels.direction_step(y, grad, lr=LR, offset=offset, grad_prev=grad_prev, b=0.0 if grad_prev is None else B)


def title(n, with_prev):
    return f"local step, {n:,} (y, grad, offset{', grad_prev' * with_prev})"


@pytest.mark.parametrize("with_prev", [False, True])
def bench_large_step(versus, with_prev):
    work = Work(vectors, 3 + with_prev, LARGE)
    versus(
        title(LARGE, with_prev),
        lambda: ours(*work.arrays),
        {
            "rewrite floor": rewrite_floor(work.arrays, len(work.arrays), fedcore.threads()),
            "torch y.add_(..., alpha=)": work.rival(torch_add),
            "numpy in place": numpy_in_place(*work.arrays),
        },
        targets={"rewrite floor": 0.80, "torch y.add_(..., alpha=)": 1.35 if with_prev else 1.15},
        bytes=(20 if with_prev else 16) * LARGE,
        rounds=21,
    )


@pytest.mark.parametrize("with_prev", [False, True])
def bench_small_step(versus, size, with_prev):
    """Time many steps per turn, since one step is shorter than the errors of clock and drift."""
    work = Work(vectors, 3 + with_prev, SMALL)
    mine, theirs = ([array.copy() for array in work.arrays] for _ in range(2))
    ours(*mine)
    torch_add(*theirs)()
    np.testing.assert_allclose(mine[0], theirs[0], rtol=1e-5, atol=1e-6)
    tensors = [torch.from_numpy(array) for array in theirs]
    versus(
        title(SMALL, with_prev),
        lambda: ours(*mine),
        {
            "fedcore, torch tensors in": lambda: ours(*tensors),
            "torch y.add_(..., alpha=)": work.rival(torch_add),
            "torch._foreach_add_, 10 tensors": work.rival(torch_foreach),
        },
        targets={"torch y.add_(..., alpha=)": 2.0, "torch._foreach_add_, 10 tensors": 4.0},
        bytes=(20 if with_prev else 16) * SMALL,
        calls=size(1000, 200),
    )
