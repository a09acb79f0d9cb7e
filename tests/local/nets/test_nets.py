import pytest
import torch

from fedcore.errors import RangeError, ShapeError, UnknownNameError
from fedcore.local import build
from fedcore.local.nets import REGISTRY, scores
from fedcore.local.nets.max_pool import MaxPool2

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


def test_every_model_is_measured():
    assert MODELS.keys() == REGISTRY.keys()


@pytest.mark.parametrize("name", MODELS)
def test_sizes(name):
    count, shape, classes = MODELS[name]
    module = build(name, seed=0).eval()
    assert parameters(module).numel() == count
    assert f"{count:,} parameters" in (REGISTRY[name].__doc__ or "")
    with torch.no_grad():
        assert module(torch.zeros(2, *shape)).shape == (2, classes)
    assert scores(name, shape) == classes


@pytest.mark.parametrize("name", MODELS)
def test_a_gradient_reaches_every_parameter(name):
    _, shape, classes = MODELS[name]
    module = build(name, seed=0)
    inputs = torch.rand(4, *shape, generator=torch.Generator().manual_seed(0))
    torch.nn.functional.cross_entropy(module(inputs), torch.arange(4) % classes).backward()
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert parameter.grad.norm() > 1e-6


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    first = parameters(build("mlp", seed=5))
    torch.manual_seed(2)
    assert torch.equal(parameters(build("mlp", seed=5)), first)
    assert not torch.equal(parameters(build("mlp", seed=6)), first)


def test_torchs_random_state_is_left_alone():
    torch.manual_seed(3)
    due = torch.rand(4)
    torch.manual_seed(3)
    build("lenet", seed=0)
    scores("vgg11", (3, 32, 32))
    assert torch.equal(torch.rand(4), due)


def test_options_reach_the_model():
    assert build("mlp", seed=0, hidden=[3, 5])[1].out_features == 3
    assert scores("cnn-emnist", (1, 28, 28), classes=47) == 47


@pytest.mark.parametrize(("name", "shape"), [("lenet", (1, 8, 8)), ("mlp", (60,)), ("resnet18", (60,))])
def test_examples_that_a_model_does_not_take(name, shape):
    with pytest.raises(ShapeError, match=rf"^'{name}': expected .*[^.]\)$"):
        scores(name, shape)


def test_an_option_out_of_range():
    with pytest.raises(RangeError, match="hidden: expected an integer >= 1, got 0"):
        scores("mlp", (1, 8, 8), hidden=[0])


def test_an_unknown_name():
    with pytest.raises(UnknownNameError, match="model: 'lenett' is unknown; did you mean 'lenet'"):
        build("lenett", seed=0)


@pytest.mark.parametrize("shape", [(3, 2, 4, 6), (3, 2, 5, 7), (2, 8, 8)])
def test_pooling_is_torchs_own(shape):
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    due = torch.nn.functional.max_pool2d(images, 2)
    with torch.inference_mode():
        assert torch.equal(MaxPool2()(images), due)
    (gradient,) = torch.autograd.grad(MaxPool2()(images.relu()).sum(), images)  # of several zeros the first counts
    assert torch.equal(gradient, torch.autograd.grad(torch.nn.functional.max_pool2d(images.relu(), 2).sum(), images)[0])
