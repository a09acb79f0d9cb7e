"""The models by name."""

import math
from functools import partial
from threading import Lock

import pytest
import torch
from torch import nn

from fedcore.errors import ConfigError, RangeError, ShapeError, UnknownNameError
from fedcore.model import Layout
from fedcore.sim import nets
from fedcore.sim.experiment import load_preset

MODELS = {
    "lenet": (44_426, (1, 28, 28), 10),
    "vgg11": (9_750_922, (3, 32, 32), 10),
    "logistic": (610, (60,), 10),
    "mlp": (4_810, (1, 8, 8), 10),
    "mlp-mnist": (199_210, (1, 28, 28), 10),
    "cnn-emnist": (1_690_046, (1, 28, 28), 62),
    "cnn-cifar10": (62_006, (3, 32, 32), 10),
    "mlp-cifar10": (656_810, (3, 32, 32), 10),
    "relu-mnist": (159_010, (1, 28, 28), 10),
    "resnet18": (11_173_962, (3, 32, 32), 10),
}


def parameters(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_every_model_is_in_this_file():
    assert MODELS.keys() == nets.REGISTRY.keys()


@pytest.mark.parametrize("name", MODELS)
def test_sizes_and_a_gradient_of_every_parameter(name):
    count, shape, classes = MODELS[name]
    module = nets.build(name, seed=0).eval()
    assert parameters(module).numel() == count
    assert f"{count:,} parameters" in (nets.REGISTRY[name].__doc__ or "")
    with torch.no_grad():
        assert module(torch.zeros(2, *shape)).shape == (2, classes)
    assert nets.scores(name, shape) == classes
    module.train()
    inputs = torch.rand(4, *shape, generator=torch.Generator().manual_seed(0))
    torch.nn.functional.cross_entropy(module(inputs), torch.arange(4) % classes).backward()
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert parameter.grad.norm() > 1e-6


def test_weights_depend_only_on_the_seed():
    torch.manual_seed(1)
    first = parameters(nets.build("mlp", seed=5))
    torch.manual_seed(2)
    assert torch.equal(parameters(nets.build("mlp", seed=5)), first)
    assert not torch.equal(parameters(nets.build("mlp", seed=6)), first)


def test_build_and_scores_keep_torch_s_random_state():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    nets.build("lenet", seed=0)
    nets.scores("vgg11", (3, 32, 32))
    assert torch.equal(torch.rand(4), expected)


def test_options_reach_the_model():
    assert nets.build("mlp", seed=0, hidden=[3, 5])[1].out_features == 3
    assert nets.scores("cnn-emnist", (1, 28, 28), classes=47) == 47
    assert parameters(nets.CNNEMNIST(classes=47)).numel() == 1_682_351
    assert "1,682,351 for 47" in (nets.CNNEMNIST.__doc__ or "")
    assert nets.MLP(inputs=6, hidden=[5], classes=3)(torch.zeros(2, 2, 3)).shape == (2, 3)


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        *((make, "classes", 0) for make in (nets.CNNEMNIST, nets.CNNCIFAR10, nets.ResNet18)),
        (nets.MLP, "inputs", 0),
        (nets.MLP, "hidden", [3, 0]),
        (nets.MLP, "classes", -1),
        *((nets.VGG11, "dropout", value) for value in (1.0, -0.1, float("nan"))),
    ],
)
def test_options_out_of_range_are_rejected(make, name, value):
    with pytest.raises(RangeError, match=rf"^{name}\b"):
        make(**{name: value})


@pytest.mark.parametrize(("name", "shape"), [("lenet", (1, 8, 8)), ("mlp", (60,)), ("resnet18", (60,))])
def test_examples_of_a_wrong_shape_are_rejected(name, shape):
    with pytest.raises(ShapeError, match=rf"^'{name}': .*[^.]\)$"):
        nets.scores(name, shape)


class Odd(nn.Linear):
    """A user's model whose forward pass returns something else than the scores."""

    def __init__(self, change):
        super().__init__(64, 10)
        self.change = change

    def forward(self, images):
        return self.change(super().forward(images.flatten(1)))


CHANGES = [lambda s: (s, s), lambda s: s[:, 0], lambda s: s[..., None], lambda s: s.argmax(1, keepdim=True), Lock()]
WRONG = [list.pop, nn.Flatten, partial(nn.LazyLinear, 10), *(partial(Odd, change) for change in CHANGES)]


@pytest.mark.parametrize("make", WRONG)
def test_a_user_s_model_with_a_fault_is_a_problem_of_the_configuration(make, monkeypatch):
    monkeypatch.setitem(nets.REGISTRY, "odd", make)
    with pytest.raises(ConfigError, match=r"^quickstart: model: "):
        load_preset("quickstart", ["model=odd"])


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(UnknownNameError, match="model: 'lenett' is unknown; did you mean 'lenet'"):
        nets.build("lenett", seed=0)


@pytest.mark.parametrize("shape", [(3, 2, 4, 6), (3, 2, 5, 7), (2, 8, 8)])
def test_pooling_equals_torch_s(shape):
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected = torch.nn.functional.max_pool2d(images, 2)
    with torch.inference_mode():
        assert torch.equal(nets.MaxPool2()(images), expected)
    # Of several zeros the first counts.
    (gradient,) = torch.autograd.grad(nets.MaxPool2()(images.relu()).sum(), images)
    assert torch.equal(gradient, torch.autograd.grad(torch.nn.functional.max_pool2d(images.relu(), 2).sum(), images)[0])


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (nets.LeNet, ["Conv2d", "ReLU", "MaxPool2"] * 2 + ["Flatten", "Linear", "ReLU", "Linear", "ReLU", "Linear"]),
        (nets.CNNEMNIST, ["Conv2d", "ReLU", "MaxPool2"] * 2 + ["Flatten", "Linear", "ReLU", "Linear"]),
        (lambda: nets.MLP(4, [3, 2]), ["Flatten", "Linear", "ReLU", "Linear", "ReLU", "Linear"]),
        (nets.logistic, ["Flatten", "Linear"]),
    ],
)
def test_the_layers_of_sequences(make, expected):
    assert [type(layer).__name__ for layer in make()] == expected


def widths(module):
    return [layer.out_features for layer in module if isinstance(layer, torch.nn.Linear)]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (nets.mlp_mnist, [200, 200, 10]),
        (nets.relu_mnist, [200, 10]),
        (nets.mlp_cifar10, [200, 200, 10]),
        (nets.logistic, [10]),
    ],
)
def test_the_papers_widths_and_unpublished_ones_as_arguments(make, expected):
    assert widths(make()) == expected
    assert make is nets.logistic or widths(make(hidden=[7])) == [7, 10]


def test_resnet18_has_eighteen_layers_with_weights_and_batchnorm_statistics_in_buffers():
    torch.manual_seed(0)
    resnet = nets.ResNet18()
    layout = Layout.of(resnet)
    assert (layout.n_parameters, layout.n - layout.n_parameters, len(layout.counters)) == (11_173_962, 9_600, 20)
    assert "11,173,962 parameters and 9,600 BatchNorm statistics" in (nets.ResNet18.__doc__ or "")

    weights = [m for m in resnet.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    shortcuts = [m for m in weights if isinstance(m, torch.nn.Conv2d) and m.kernel_size == (1, 1)]
    assert (len(weights) - len(shortcuts), len(shortcuts)) == (18, 3)

    block, x = resnet.blocks[1].eval(), torch.randn(2, 64, 8, 8)
    with torch.no_grad():
        assert resnet.blocks(resnet.conv(torch.zeros(1, 3, 32, 32))).shape == (1, 512, 4, 4)
        # With its last normalisation at zero, a block of one shape gives relu(x).
        torch.nn.init.zeros_(block.bn2.weight)
        torch.testing.assert_close(block(x), x.relu())


def test_the_layers_of_vgg11_its_initial_weights_and_dropout_only_in_training():
    torch.manual_seed(0)
    vgg = nets.VGG11()
    marks = {"Conv2d": "c", "ReLU": "", "MaxPool2": "M"}
    assert "".join(marks[type(layer).__name__] for layer in vgg.features) == "cMcMccMccMccM"
    convolutions = [layer for layer in vgg.features if isinstance(layer, nn.Conv2d)]
    assert [layer.out_channels for layer in convolutions] == [64, 128, 256, 256, 512, 512, 512, 512]
    assert not any("norm" in type(layer).__name__.lower() for layer in vgg.modules())

    for layer in vgg.features:
        if isinstance(layer, nn.Conv2d):
            assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / (9 * layer.out_channels)), rel=0.05)
            assert not layer.bias.any()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert 0.1 < vgg.features(torch.randn(4, 3, 32, 32)).std() < 10
        assert not torch.equal(vgg.train()(x), vgg(x))
        assert torch.equal(vgg.eval()(x), vgg(x))
        none = nets.VGG11(dropout=0.0).train()
        assert torch.equal(none(x), none(x))
