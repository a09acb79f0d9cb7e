"""Helpers for the tests of local work."""

from types import MethodType

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedcore.algorithms import MEAN_GRADIENT
from fedcore.model import Layout
from fedcore.server.broadcast import Instructions
from fedcore.sim.batching.layers import Block


def instructions_of(lr=0.1, *, second=False, **fields):
    """Instructions of round 0; ``lr`` may be a function of the step."""
    rates = {"lr": lr(0), "lr_of_step": lr} if callable(lr) else {"lr": lr}
    return Instructions(round=0, second_vector=MEAN_GRADIENT if second else None, **rates, **fields)


class Doubled(nn.Sequential):
    """A sequence with a custom forward pass."""

    def forward(self, inputs):
        return 2 * super().forward(inputs)


def frozen(layer):
    layer.weight.requires_grad_(False)
    return layer


def hooked(layer):
    layer.register_forward_hook(lambda *_: None)
    return layer


def patched(layer):
    """A layer whose own forward replaces that of its class."""
    layer.forward = MethodType(lambda self, x: 3 * type(self).forward(self, x), layer)
    return layer


def of_copies(layer, kind):
    """A layer whose copies compute something else."""
    forward, weight = layer.forward, layer.weight
    if kind == "function":
        layer.forward = lambda x: forward(x)
    else:
        (weight.register_hook if kind == "hook" else weight.register_post_accumulate_grad_hook)(lambda *_: None)
    return layer


def check_gradients(net, module, shape, sizes, b):
    """Compare a network's gradients on minibatches of these sizes, padded to ``b`` examples, with those of torch."""
    layout, m, random = Layout.of(module), len(sizes), torch.Generator().manual_seed(0)
    assert net is not None
    assert net.n == layout.n
    rows = torch.randn(m, net.n, generator=random) / 4
    inputs = torch.randn(m, b, *shape, generator=random)
    if len(shape) == 3:
        inputs[:, :, :, : shape[1] // 2] = 0.5  # Of equal windows the first counts.
    labels = torch.randint(int(module(inputs[0, :1]).shape[1]), (m, b, 1), generator=random)
    weights = torch.tensor([[1 / size if k < size else 0.0 for k in range(b)] for size in sizes]).unsqueeze(2)
    models, out, gradients = Block(net, m).fill(rows), Block(net, m), torch.empty(m, net.n)
    take = net.gradients(m, b)
    with torch.no_grad():
        for _ in range(2):  # The second call reuses scratch memory.
            take(models, inputs.flatten(2), labels, weights, out)
    out.empty_into(gradients)
    for i, size in enumerate(sizes):
        module.load_state_dict({k: torch.tensor(v) for k, v in layout.unflatten(rows[i].numpy()).items()})
        module.zero_grad()
        cross_entropy(module(inputs[i, :size]), labels[i, :size, 0]).backward()
        expected = layout.flatten({name: p.grad for name, p in module.named_parameters()})
        tolerance = 1e-4 * (1e-6 + np.abs(expected).max())
        np.testing.assert_allclose(gradients[i].numpy(), expected, rtol=1e-3, atol=tolerance)
