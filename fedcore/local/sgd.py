"""The local rule "sgd": plain stochastic gradient descent."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import cross_entropy

from fedcore.local.flat import FlatModel


def sgd(
    model: FlatModel,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    batches: Iterable[npt.NDArray[np.int64]],
    *,
    lr: float,
) -> int:
    """A client's local work: y <- y - lr * grad(mean cross entropy of a minibatch), once a minibatch.

    Args:
        model: holds x_t, and afterwards y: ``model.flat`` is changed in place.
        inputs: float32[m, ...], read-only.
        labels: int64[m], read-only.
        batches: indices into the two, int64[b] each.
        lr: the local rate, eta.

    Returns:
        The number of steps, K_i.

    Cost: a step adds to the forward and backward pass two gathers and two passes over ``grad``, whatever the
    number of the model's tensors.
    """
    steps = 0
    for batch in batches:
        chosen = torch.from_numpy(batch)
        loss = cross_entropy(model.module(inputs.index_select(0, chosen)), labels.index_select(0, chosen))
        model.grad.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        model.parameters.add_(model.grad, alpha=-lr)
        steps += 1
    return steps
