import pytest
import torch
from torch import nn

from fedcore.errors import RangeError
from fedcore.layout import Layout
from fedcore.local import build
from fedcore.local.batched_sgd import MOST_PARAMETERS
from fedcore.local.convnet import ConvNet
from fedcore.local.perceptron import Perceptron
from fedcore.local.together import can_be_measured, fastest, net_of

DIGITS = (1, 8, 8)


@pytest.fixture
def convolution():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 10))


def test_perceptrons_and_convolutional_networks_up_to_a_size(convolution):
    assert isinstance(net_of(build("mlp", seed=0), DIGITS), Perceptron)
    assert isinstance(net_of(convolution, DIGITS), ConvNet)
    assert net_of(build("mlp", seed=0, hidden=[MOST_PARAMETERS // 64]), DIGITS) is None
    assert net_of(build("cnn-emnist", seed=0), (1, 28, 28)) is None
    assert net_of(nn.Sequential(convolution), DIGITS) is None


def test_only_of_convolutional_networks_the_gain_is_measured(convolution):
    assert can_be_measured(convolution, DIGITS)
    assert not can_be_measured(build("mlp", seed=0), DIGITS)
    assert not can_be_measured(build("resnet18", seed=0), (3, 32, 32))


def test_measuring_leaves_the_module_and_torch_as_they_were(convolution):
    before, state = Layout.of(convolution).flatten(convolution), torch.random.get_rng_state()
    assert isinstance(fastest(convolution, DIGITS, batch=4), bool)
    assert (Layout.of(convolution).flatten(convolution) == before).all()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in convolution.parameters())


def test_what_is_trained_one_by_one_has_no_gain(convolution):
    with pytest.raises(RangeError, match="module: expected a network that net_of knows"):
        fastest(nn.Sequential(convolution), DIGITS, batch=4)
