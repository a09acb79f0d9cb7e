"""The local step without fedcore, from y, grad, offset and, for some methods, grad_prev."""

import numpy as np
import torch

LR, B = 1e-3, -0.8
LENET = [(6, 1, 5, 5), (6,), (16, 6, 5, 5), (16,), (120, 256), (120,), (84, 120), (84,), (10, 84), (10,)]


def vectors(count, n):
    """Return float32[n] vectors: y, grad, offset, and grad_prev if ``count`` is 4."""
    rng = np.random.default_rng(0)
    return [rng.random(n, dtype=np.float32) for _ in range(count)]


def torch_add(y, grad, offset, grad_prev=None):
    """Return a function with two in-place additions, or three with grad_prev: the best torch formulation."""
    y, *directions = _tensors(y, grad, offset, grad_prev)
    factors = (-LR, -LR, -LR * B)

    def run():
        for vector, factor in zip(directions, factors, strict=False):
            y.add_(vector, alpha=factor)

    return run


def torch_foreach(y, grad, offset, grad_prev=None):
    """Return a function that steps a LeNet's ten tensors with torch's foreach functions, as optimisers do."""
    sizes = [int(np.prod(shape)) for shape in LENET]
    ys, *directions = [
        [piece.clone().view(shape) for piece, shape in zip(tensor.split(sizes), LENET, strict=True)]
        for tensor in _tensors(y, grad, offset, grad_prev)
    ]
    factors = (-LR, -LR, -LR * B)

    def run():
        for tensors, factor in zip(directions, factors, strict=False):
            torch._foreach_add_(ys, tensors, alpha=factor)

    return run


def numpy_in_place(y, grad, offset, grad_prev=None):
    """Return a function that computes in place with one scratch vector."""
    scratch = np.empty_like(y)
    terms = [(grad, LR), (offset, LR), (grad_prev, LR * B)]

    def run():
        for vector, factor in terms:
            if vector is not None:
                np.subtract(y, np.multiply(vector, np.float32(factor), out=scratch), out=y)

    return run


def _tensors(*arrays):
    return [torch.from_numpy(array) for array in arrays if array is not None]
