from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedcore.layout import Layout
from fedcore.local import build
from fedcore.local.layers import Block
from fedcore.local.perceptron import Perceptron, gradients

SHARED = nn.Linear(4, 4)
FROZEN = nn.Linear(4, 2)
FROZEN.bias.requires_grad_(False)
HOOKED = nn.Linear(4, 2)
HOOKED.register_forward_hook(lambda *_: None)


class Doubled(nn.Sequential):
    def forward(self, inputs):
        return 2 * super().forward(inputs)


NOT = {
    "dropout": nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5)),
    "normalisation": nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)),
    "another activation": nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 2)),
    "a forward pass of its own": Doubled(nn.Linear(4, 2)),
    "shared weights": nn.Sequential(SHARED, nn.ReLU(), SHARED),
    "frozen": nn.Sequential(FROZEN),
    "a hook": nn.Sequential(HOOKED),
    "no Sequential": nn.Linear(4, 2),
    "nested": nn.Sequential(nn.Sequential(nn.Linear(4, 2))),
    "ReLU first": nn.Sequential(nn.ReLU(), nn.Linear(4, 2)),
    "other inputs": nn.Sequential(nn.Linear(5, 2)),
    "nothing": nn.Sequential(),
    "a parameter beside": nn.Sequential(OrderedDict(fc=nn.Linear(4, 2))),
}
NOT["a parameter beside"].scale = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize("what", NOT)
def test_what_is_none(what):
    assert Perceptron.of(NOT[what], (4,)) is None


def test_examples_that_are_not_flat_need_a_flatten():
    assert Perceptron.of(nn.Sequential(nn.Linear(4, 2)), (4,)) is not None
    assert Perceptron.of(nn.Sequential(nn.Linear(4, 2)), (1, 4)) is None
    assert Perceptron.of(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), (1, 4)) is not None
    assert Perceptron.of(nn.Sequential(nn.Flatten(2), nn.Linear(4, 2)), (1, 4)) is None


@pytest.mark.parametrize("name", ["lenet", "resnet18", "cnn-emnist"])
def test_the_papers_convolutions_are_none(name):
    assert Perceptron.of(build(name, seed=0), (1, 28, 28)) is None


@pytest.mark.parametrize(
    "module",
    [
        build("logistic", seed=0),
        build("mlp", seed=0, inputs=60, hidden=[20, 33]),
        nn.Sequential(nn.Linear(60, 3, bias=False), nn.ReLU(), nn.Linear(3, 10), nn.ReLU()),
    ],
    ids=["logistic", "two hidden layers", "no bias, ReLU at the end"],
)
def test_gradients_equal_torchs(module):
    layout, net = Layout.of(module), Perceptron.of(module, (60,))
    assert net.n == layout.n
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(5, net.n, generator=random) / 4
    inputs, labels = torch.randn(5, 8, 60, generator=random), torch.randint(10, (5, 8), generator=random)
    sizes = [8, 3, 8, 1, 5]
    weights = torch.tensor([[1 / size if k < size else 0.0 for k in range(8)] for size in sizes])
    out = Block(net, 5)
    gradients(net, Block(net, 5).fill(rows), inputs, labels.unsqueeze(2), weights.unsqueeze(2), out)
    got = torch.empty(5, net.n)
    out.empty_into(got)
    for i, size in enumerate(sizes):
        module.load_state_dict({k: torch.tensor(v) for k, v in layout.unflatten(rows[i].numpy()).items()})
        module.zero_grad()
        cross_entropy(module(inputs[i, :size]), labels[i, :size]).backward()
        due = layout.flatten({name: p.grad for name, p in module.named_parameters()})
        np.testing.assert_allclose(got[i].numpy(), due, rtol=1e-4, atol=1e-6)


def test_a_block_gives_back_what_it_was_filled_with():
    net = Perceptron.of(build("mlp", seed=0), (1, 8, 8))
    rows, back = torch.rand(3, net.n), torch.zeros(3, net.n)
    block = Block(net, 3).fill(rows)
    block.empty_into(back)
    assert torch.equal(back, rows)
    assert all(weight.is_contiguous() for weight in block.weights)
