"""The local step on a ResNet-18 (11.17 M parameters, beyond the caches) and on paper 1's LeNet (44,426: within)."""

import numpy as np
import pytest
import torch

import fedcore
from bench.probe import rewrite_seconds
from fedcore import kernels

LARGE, SMALL = 11_173_962, 44_426
LENET = [(6, 1, 5, 5), (6,), (16, 6, 5, 5), (16,), (120, 256), (120,), (84, 120), (84,), (10, 84), (10,)]
LR, B = 1e-3, -0.8


@pytest.fixture(autouse=True)
def same_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(fedcore.threads())
    yield
    torch.set_num_threads(before)


def vectors(n, with_prev):
    rng = np.random.default_rng(0)
    return [rng.random(n, dtype=np.float32) for _ in range(4 if with_prev else 3)]


def ours(y, grad, offset, grad_prev=None):
    kernels.direction_step(y, grad, lr=LR, offset=offset, grad_prev=grad_prev, b=0.0 if grad_prev is None else B)


def torch_step(y, grad, offset, grad_prev=None):
    y.add_(offset, alpha=-LR)
    y.add_(grad, alpha=-LR)
    if grad_prev is not None:
        y.add_(grad_prev, alpha=-LR * B)


def torch_foreach(ys, grads, offsets, grad_prevs=None):
    torch._foreach_add_(ys, offsets, alpha=-LR)
    torch._foreach_add_(ys, grads, alpha=-LR)
    if grad_prevs is not None:
        torch._foreach_add_(ys, grad_prevs, alpha=-LR * B)


def title(n, with_prev):
    streams = "y, grad, offset" + ", grad_prev" * with_prev
    return f"local step, {n:,} float32 ({streams}); {fedcore.threads()} threads, {fedcore.isa()}"


@pytest.mark.parametrize("with_prev", [False, True])
def bench_large_step(versus, with_prev):
    arrays = vectors(LARGE, with_prev)
    theirs = [torch.from_numpy(array.copy()) for array in arrays]
    probed = [array.copy() for array in arrays]
    scratch = np.empty(LARGE, np.float32)

    def numpy_step():
        y, *directions = (tensor.numpy() for tensor in theirs)
        for vector, factor in zip(directions, (LR, LR, LR * B), strict=False):
            np.subtract(y, np.multiply(vector, np.float32(factor), out=scratch), out=y)

    versus(
        title(LARGE, with_prev),
        lambda: ours(*arrays),
        {
            "rewrite floor": lambda: rewrite_seconds(probed, len(probed), fedcore.threads()),
            "torch y.add_(..., alpha=)": lambda: torch_step(*theirs),
            "numpy in place": numpy_step,
        },
        timed=["rewrite floor"],
        bytes=(20 if with_prev else 16) * LARGE,
        rounds=21,
    )


@pytest.mark.parametrize("with_prev", [False, True])
def bench_small_step(versus, with_prev):
    """A thousand steps at a time: one alone is shorter than what the clock and the drift add to it."""
    arrays = vectors(SMALL, with_prev)
    flat = [torch.from_numpy(array.copy()) for array in arrays]
    sizes = [int(np.prod(shape)) for shape in LENET]
    layers = [
        [piece.clone().view(shape) for piece, shape in zip(tensor.split(sizes), LENET, strict=True)] for tensor in flat
    ]
    ours_in_torch = [tensor.clone() for tensor in flat]
    ours(*arrays)
    torch_step(*flat)
    np.testing.assert_allclose(arrays[0], flat[0].numpy(), rtol=1e-5, atol=1e-6)

    def thousand(step, *arguments):
        def run():
            for _ in range(1000):
                step(*arguments)

        return run

    versus(
        "1,000 x " + title(SMALL, with_prev),
        thousand(ours, *arrays),
        {
            "fedcore, torch tensors in": thousand(ours, *ours_in_torch),
            "torch y.add_(..., alpha=)": thousand(torch_step, *flat),
            "torch._foreach_add_, 10 tensors": thousand(torch_foreach, *layers),
        },
        bytes=1000 * (20 if with_prev else 16) * SMALL,
    )
