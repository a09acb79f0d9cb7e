import pytest
import torch

from fedcore.errors import RangeError
from fedcore.local.nets import MLP, logistic, mlp_cifar10, mlp_mnist, relu_mnist


def widths(module):
    return [layer.out_features for layer in module if isinstance(layer, torch.nn.Linear)]


def test_other_sizes():
    assert MLP(inputs=6, hidden=[5], classes=3)(torch.zeros(2, 2, 3)).shape == (2, 3)


def test_there_is_a_relu_after_every_layer_but_the_last():
    kinds = ["-".join(type(layer).__name__ for layer in module) for module in (MLP(4, [3, 2]), logistic())]
    assert kinds == ["Flatten-Linear-ReLU-Linear-ReLU-Linear", "Flatten-Linear"]


@pytest.mark.parametrize(
    ("make", "due"),
    [(mlp_mnist, [200, 200, 10]), (relu_mnist, [200, 10]), (mlp_cifar10, [200, 200, 10]), (logistic, [10])],
)
def test_the_papers_widths(make, due):
    assert widths(make()) == due


@pytest.mark.parametrize("make", [mlp_mnist, relu_mnist, mlp_cifar10])
def test_widths_that_no_paper_gives_are_arguments(make):
    assert widths(make(hidden=[7])) == [7, 10]


@pytest.mark.parametrize("sizes", [{"inputs": 0}, {"hidden": [3, 0]}, {"classes": -1}])
def test_sizes_below_one(sizes):
    with pytest.raises(RangeError, match=f"{next(iter(sizes))}: expected an integer >= 1"):
        MLP(**sizes)
