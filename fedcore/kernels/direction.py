"""direction: the step that a client takes along its corrected gradient."""

from typing import Any

from fedcore.float_mode import ieee
from fedcore.native import core


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

    With the right a, b, mu and offset (``combine``) this is the local step of FedAvg, FedProx, SCAFFOLD and
    the momentum and variance-reduced methods. Weight decay counts as part of the gradient, so ``a`` multiplies it;
    ``grad_prev`` is to come with its own, weight_decay * x_prev, already added.

    Args:
        y: float32[n] (NumPy, torch, CuPy, anything with DLPack or the buffer protocol), in CPU memory or on a CUDA
            device, as all others then; changed in place; overlaps no other argument.
        grad: float32[n], the minibatch gradient at y. Read-only, as are all that follow.
        lr: the local rate, eta; it and the coefficients are rounded to float32.
        grad_prev: float32[n], the same minibatch's gradient at x_{t-1}; may be None where b = 0.
        offset: float32[n] or None, the part of the direction that is constant over the local steps.
        x: float32[n], the model that the client started from; may be None where mu = 0.

    Raises:
        ShapeError, DtypeError, ArrayError: an argument is not what is said above; nothing was written.

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
