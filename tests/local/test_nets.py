import pytest
import torch

from fedcore.errors import UnknownNameError
from fedcore.local import build
from fedcore.local.nets import MLP, REGISTRY, LeNet


def parameters(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.mark.parametrize(("name", "count", "shape"), [("lenet", 44426, (1, 28, 28)), ("mlp", 4810, (1, 8, 8))])
def test_sizes(name: str, count: int, shape: tuple[int, ...]) -> None:
    module = build(name, seed=0)
    assert parameters(module).numel() == count
    assert module(torch.zeros(3, *shape)).shape == (3, 10)
    assert f"{count:,} parameters" in (REGISTRY[name].__doc__ or "")


def test_lenet_is_the_papers_network() -> None:
    kinds = [type(layer).__name__ for layer in LeNet()]
    assert kinds == ["Conv2d", "ReLU", "MaxPool2d"] * 2 + [
        "Flatten",
        "Linear",
        "ReLU",
        "Linear",
        "ReLU",
        "Linear",
    ]


def test_mlp_of_other_sizes() -> None:
    assert MLP(inputs=6, hidden=5, classes=3)(torch.zeros(2, 2, 3)).shape == (2, 3)


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = parameters(build("mlp", seed=5))
    torch.manual_seed(2)
    assert torch.equal(parameters(build("mlp", seed=5)), first)
    assert not torch.equal(parameters(build("mlp", seed=6)), first)


def test_torchs_random_state_is_left_alone() -> None:
    torch.manual_seed(3)
    due = torch.rand(4)
    torch.manual_seed(3)
    build("lenet", seed=0)
    assert torch.equal(torch.rand(4), due)


def test_an_unknown_name() -> None:
    with pytest.raises(UnknownNameError, match="model: 'lenett' is unknown; did you mean 'lenet'"):
        build("lenett", seed=0)
