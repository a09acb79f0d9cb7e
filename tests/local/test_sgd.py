import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedcore.local import RULES, FlatModel, build, minibatches, sgd

SHAPES = {"lenet": (1, 28, 28), "mlp": (1, 8, 8)}


@pytest.mark.parametrize("name", SHAPES)
def test_equals_torchs_sgd_to_the_bit(name: str) -> None:
    random = torch.Generator().manual_seed(0)
    inputs = torch.rand(50, *SHAPES[name], generator=random)
    labels = torch.randint(10, (50,), generator=random)
    batches = list(minibatches(50, 16, epochs=2, seed=1, round=2, client=3))

    due = build(name, seed=4)
    optimiser = torch.optim.SGD(due.parameters(), lr=0.1)
    for batch in batches:
        optimiser.zero_grad()
        cross_entropy(due(inputs[batch]), labels[batch]).backward()
        optimiser.step()

    model = FlatModel(build(name, seed=4))
    start = model.flat.clone()
    assert sgd(model, inputs, labels, iter(batches), lr=0.1) == 8
    assert (model.flat - start).abs().max() > 1e-3
    np.testing.assert_array_equal(model.flat.numpy(), model.layout.flatten(due))


def test_a_step_by_hand() -> None:
    """Softmax regression from zero: the gradient of the scores is 1/2 - onehot."""
    linear = nn.Linear(1, 2)
    model = FlatModel(linear)
    model.flat.zero_()
    assert sgd(model, torch.tensor([[3.0]]), torch.tensor([1]), [np.array([0])], lr=0.5) == 1
    assert linear.weight.flatten().tolist() == [-0.75, 0.75]
    assert linear.bias.tolist() == [-0.25, 0.25]


def test_no_minibatches_no_steps() -> None:
    model = FlatModel(nn.Linear(1, 2))
    start = model.flat.clone()
    assert sgd(model, torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), [], lr=0.5) == 0
    assert torch.equal(model.flat, start)


def test_it_is_the_rule_of_its_name() -> None:
    assert RULES["sgd"] is sgd
