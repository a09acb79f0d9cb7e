"""Convolutional networks as products over columns, against torch's own gradients."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedcore.sim.batching.convolutions import PIECE, ConvNet, Kernel, Windows
from fedcore.sim.batching.layers import Block
from fedcore.sim.nets import build
from tests.sim.kit import Doubled, check_gradients, frozen, hooked, patched

pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))
KINDS = dict(kernel=pairs, stride=pairs, padding=pairs, dilation=pairs)


@given(**KINDS)
def test_windows_without_pooling_equal_torch_s_unfold(kernel, stride, padding, dilation):
    windows = Windows.of((2, 7, 6), Kernel(kernel, stride, padding, dilation))
    image = torch.rand(1, 2, 7, 6)
    expected = torch.nn.functional.unfold(image, kernel, dilation, padding, stride)[0]
    got = np.append(image.numpy().ravel(), 0)[windows.table]
    np.testing.assert_array_equal(got, expected.numpy())
    assert windows.height * windows.width == expected.shape[1]
    np.testing.assert_array_equal(windows.places, np.arange(len(expected))[None])


@given(**KINDS, pool=pairs, pool_stride=pairs)
def test_a_pooled_window_covers_the_windows_of_its_outputs(kernel, stride, padding, dilation, pool, pool_stride):
    image, how = (2, 7, 6), dict(stride=stride, padding=padding, dilation=dilation)
    one = Windows.of(image, Kernel(kernel, **how))
    pooled = Windows.of(image, Kernel(kernel, **how, pool=pool, pool_stride=pool_stride))
    if one is None or one.height < pool[0] or one.width < pool[1]:
        assert pooled is None
        return
    apart = one.table.reshape(-1, one.height, one.width)
    for y in range(pooled.height):
        for x in range(pooled.width):
            window = pooled.table[:, y * pooled.width + x]
            for k, places in enumerate(pooled.places):
                dy, dx = divmod(k, pool[1])
                expected = apart[:, y * pool_stride[0] + dy, x * pool_stride[1] + dx]
                np.testing.assert_array_equal(window[places], expected)


@given(**KINDS, pool=pairs)
def test_covering_lists_each_pixel_s_places(kernel, stride, padding, dilation, pool):
    windows = Windows.of((2, 7, 6), Kernel(kernel, stride, padding, dilation, pool))
    if windows is None:
        return
    order, begins = windows.covering
    for pixel, places in enumerate(np.split(order, begins[1:])):
        np.testing.assert_array_equal(places, np.flatnonzero(windows.table.ravel() == pixel))


def test_a_5x5_kernel_with_2x2_pooling_has_6x6_windows():
    windows = Windows.of((1, 28, 28), Kernel((5, 5), pool=(2, 2), pool_stride=(2, 2)))
    assert windows.table.shape == (36, 144)
    assert windows.places.shape == (4, 25)
    assert windows.places[3].tolist() == [6 * (1 + a) + 1 + b for a in range(5) for b in range(5)]


# Gradients.


SHAPE = (2, 8, 7)


def behind(*convolutions, shape=SHAPE, classes=3):
    """A network of these layers and a fully connected layer."""
    features = nn.Sequential(*convolutions, nn.Flatten())
    return nn.Sequential(*features, nn.Linear(features(torch.zeros(1, *shape)).shape[1], classes))


@pytest.mark.parametrize(
    ("name", "shape"), [("lenet", (1, 28, 28)), ("cnn-emnist", (1, 28, 28)), ("cnn-cifar10", (3, 32, 32))]
)
def test_gradients_of_known_networks_equal_torch_s(name, shape):
    module = build(name, seed=0)
    check_gradients(ConvNet.of(module, shape), module, shape, [16, 5], 16)


@settings(max_examples=100)
@given(
    kernel=pairs,
    stride=pairs,
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=pairs,
    pool=pairs,
    pool_stride=pairs,
    pooled=st.booleans(),
    bias=st.booleans(),
    relu=st.sampled_from(["none", "before", "behind"]),
    second=st.booleans(),
    outputs=st.integers(1, 4),
)
def test_gradients_equal_torch_s_for_all_kinds_of_windows(
    kernel, stride, padding, dilation, pool, pool_stride, pooled, bias, relu, second, outputs
):
    layers = [nn.Conv2d(2, outputs, kernel, stride, padding, dilation, bias=bias)]
    layers += [nn.ReLU()] * (relu == "before") + [nn.MaxPool2d(pool, pool_stride)] * pooled
    layers += [nn.ReLU()] * (relu == "behind") + [nn.Conv2d(outputs, 3, 2, padding=1), nn.ReLU()] * second
    try:
        module = behind(*layers)
    except RuntimeError:  # The result is empty.
        shape = nn.Sequential(*layers, nn.Flatten(), nn.Linear(1, 3))
        assert ConvNet.of(shape, SHAPE) is None
        return
    check_gradients(ConvNet.of(module, SHAPE), module, SHAPE, [4, 3], 4)


@pytest.mark.parametrize("b", [PIECE, PIECE + 1, 2 * PIECE + 5])
def test_large_minibatches_are_divided(b):
    module = behind(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2))
    check_gradients(ConvNet.of(module, SHAPE), module, SHAPE, [b, b - 40], b)


def test_a_model_s_gradient_does_not_depend_on_other_models():
    net, random = ConvNet.of(build("lenet", seed=0), (1, 28, 28)), torch.Generator().manual_seed(0)
    rows = torch.randn(7, net.n, generator=random) / 10
    inputs, weights = torch.randn(7, 16, 784, generator=random), torch.full((7, 16, 1), 1 / 16)
    labels = torch.randint(10, (7, 16, 1), generator=random)

    def taken(some):
        m = len(rows[some])
        out, got = Block(net, m), torch.empty(m, net.n)
        with torch.no_grad():
            net.gradients(m, 16)(Block(net, m).fill(rows[some]), inputs[some], labels[some], weights[some], out)
        out.empty_into(got)
        return got

    together = taken(slice(7))
    for i in range(7):
        assert torch.equal(taken(slice(i, i + 1))[0], together[i])
    assert torch.equal(taken(slice(2, 5)), together[2:5])


SHARED = nn.Conv2d(2, 2, 3, padding=1)
NOT = {
    "groups": behind(nn.Conv2d(2, 4, 3, groups=2)),
    "reflected padding": behind(nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect")),
    "padding by name": behind(nn.Conv2d(2, 4, 3, padding="same")),
    "padded pooling": behind(nn.Conv2d(2, 4, 3), nn.MaxPool2d(2, padding=1)),
    "dilated pooling": behind(nn.Conv2d(2, 4, 3), nn.MaxPool2d(2, dilation=2)),
    "incomplete pooling windows": behind(nn.Conv2d(2, 4, 3), nn.MaxPool2d(2, ceil_mode=True)),
    "pooling twice": behind(nn.Conv2d(2, 4, 3), nn.MaxPool2d(2), nn.MaxPool2d(2)),
    "mean pooling": behind(nn.Conv2d(2, 4, 3), nn.AvgPool2d(2)),
    "pooling first": behind(nn.MaxPool2d(2), nn.Conv2d(2, 4, 3)),
    "dropout": behind(nn.Conv2d(2, 4, 3), nn.Dropout2d(0.5)),
    "normalisation": behind(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)),
    "another activation": behind(nn.Conv2d(2, 4, 3), nn.Tanh()),
    "shared weights": behind(SHARED, nn.ReLU(), SHARED),
    "frozen": behind(frozen(nn.Conv2d(2, 3, 3))),
    "a hook": behind(hooked(nn.Conv2d(2, 3, 3))),
    "its own forward": behind(patched(nn.Conv2d(2, 3, 3))),
    "transposed": behind(nn.ConvTranspose2d(2, 4, 3)),
    "nested": nn.Sequential(behind(nn.Conv2d(2, 4, 3))),
    "a custom forward pass": Doubled(*behind(nn.Conv2d(2, 4, 3))),
    "images of other channels": behind(nn.Conv2d(3, 4, 3), shape=(3, 8, 7)),
    "images of another size": behind(nn.Conv2d(2, 4, 3), shape=(2, 9, 7)),
    "too small images": nn.Sequential(nn.Conv2d(2, 4, 9), nn.Flatten(), nn.Linear(4, 3)),
    "no scores": nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten()),
    "images as scores": nn.Sequential(nn.Conv2d(2, 4, 3)),
    "no convolution": nn.Sequential(nn.Flatten(), nn.Linear(112, 3)),
    "nothing": nn.Sequential(),
    "no Sequential": nn.Conv2d(2, 4, 3),
    "a further parameter": nn.Sequential(OrderedDict(behind(nn.Conv2d(2, 4, 3)).named_children())),
}
NOT["a further parameter"].scale = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize("name", NOT)
def test_other_modules_are_no_convolutional_networks(name):
    assert ConvNet.of(NOT[name], SHAPE) is None


@pytest.mark.parametrize(("name", "shape"), [("resnet18", (3, 32, 32)), ("vgg11", (3, 32, 32)), ("mlp", (1, 8, 8))])
def test_other_networks_of_the_papers_are_rejected(name, shape):
    assert ConvNet.of(build(name, seed=0), shape) is None


def test_examples_must_be_images():
    assert ConvNet.of(behind(nn.Conv2d(2, 4, 3)), SHAPE) is not None
    assert ConvNet.of(behind(nn.Conv2d(2, 4, 3)), SHAPE[1:]) is None
