import math

import pytest
import torch
from torch import nn

from fedcore.errors import RangeError
from fedcore.local.nets import VGG11


@pytest.fixture(scope="module")
def vgg():
    torch.manual_seed(0)
    return VGG11()


def test_the_layers(vgg):
    marks = {"Conv2d": "c", "ReLU": "", "MaxPool2": "M"}
    assert "".join(marks[type(layer).__name__] for layer in vgg.features) == "cMcMccMccMccM"
    convolutions = [layer for layer in vgg.features if isinstance(layer, nn.Conv2d)]
    assert [layer.out_channels for layer in convolutions] == [64, 128, 256, 256, 512, 512, 512, 512]
    assert not any("norm" in type(layer).__name__.lower() for layer in vgg.modules())


def test_the_initial_weights_keep_the_signal(vgg):
    for layer in vgg.features:
        if isinstance(layer, nn.Conv2d):
            assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / (9 * layer.out_channels)), rel=0.05)
            assert not layer.bias.any()
    with torch.no_grad():
        features = vgg.features(torch.randn(4, 3, 32, 32))
    assert 0.1 < features.std() < 10


def test_dropout_is_there_in_training_only(vgg):
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert not torch.equal(vgg.train()(x), vgg(x))
        assert torch.equal(vgg.eval()(x), vgg(x))
        none = VGG11(dropout=0.0).train()
        assert torch.equal(none(x), none(x))


@pytest.mark.parametrize("dropout", [1.0, -0.1, float("nan")])
def test_a_chance_out_of_range(dropout):
    with pytest.raises(RangeError, match=r"dropout: expected a number in \[0, 1\)"):
        VGG11(dropout=dropout)
