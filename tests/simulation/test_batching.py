"""The local work of many clients at once."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from fedcore.errors import RangeError, ShapeError
from fedcore.model import Layout
from fedcore.simulation.batching.batched_sgd import (
    CLIENTS,
    INDICES,
    MOST_PARAMETERS,
    batched_sgd,
    can_be_measured,
    fastest,
    in_groups,
    net_of,
)
from fedcore.simulation.batching.convolutions import ConvNet
from fedcore.simulation.batching.layers import BYTES, Block, Linear, Perceptron
from fedcore.simulation.local_rules import Table, minibatch_table, minibatches
from fedcore.simulation.nets import build
from fedcore.simulation.sgd import FlatModel, LocalOptions, sgd
from fedcore.simulation.torch_device import seeded
from tests.simulation.asked import asked

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
    net.gradients(5, 8)(Block(net, 5).fill(rows), inputs, labels.unsqueeze(2), weights.unsqueeze(2), out)
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


# Many clients at once against ``sgd`` one by one, on the same minibatches; and each client whoever is beside it.


RANDOM = torch.Generator().manual_seed(0)
INPUTS, LABELS = torch.rand(200, 1, 4, 5, generator=RANDOM), torch.randint(6, (200,), generator=RANDOM)
DIRECTIONS = {
    "plain": {},
    "proximal": dict(mu=0.3),
    "offsets": dict(offsets=True),
    "two gradients": dict(b=-0.7, offsets=True),
    "all of it": dict(a=0.6, b=-0.4, mu=0.2, offsets=True, second=True),
    "a rate for each step": dict(lr=lambda k: 0.3 / (k + 1)),
}
OPTIONS = {
    "no options": LocalOptions(),
    "decay": LocalOptions(weight_decay=0.1),
    "momentum": LocalOptions(momentum=0.9),
    "clip": LocalOptions(clip=0.3),
    "all options": LocalOptions(weight_decay=0.05, momentum=0.5, clip=0.5),
}


CONVOLUTION = "convolution"


def network(hidden=(7,), seed=1):
    """A perceptron with these hidden layers, or a convolutional network."""
    if hidden != CONVOLUTION:
        return build("mlp", seed=seed, inputs=20, hidden=hidden, classes=6)
    with seeded(seed, "tests"):
        return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 6))


def table(client, examples, steps, width=8, batch=8):
    made = minibatch_table(examples, batch, steps=steps, width=width, seed=3, round=2, client=client)
    return Table(made.indices + 10 * client, made.sizes)


def one_by_one(x, table, hidden, assignment, **how):
    model = FlatModel(network(hidden))
    model.load(x)
    batches = [row[:size] for row, size in zip(table.indices, table.sizes, strict=True)]
    work = sgd(model, INPUTS, LABELS, batches, assignment, x=x, **how)
    return model.flat.numpy().copy(), work


@pytest.mark.parametrize("hidden", [(), (7,), (12, 9), CONVOLUTION], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_equals_one_by_one_but_for_rounding(direction, options, hidden):
    module, how = network(hidden), dict(DIRECTIONS[direction])
    net, x = net_of(module, (1, 4, 5)), FlatModel(module).flat.numpy().copy()
    rng = np.random.default_rng(0)
    tables = [table(0, 30, 5), table(1, 5, 9), table(2, 41, 9), table(3, 8, 1)]
    offsets = [None, *rng.normal(size=(3, net.n)).astype(np.float32)] if how.pop("offsets", False) else [None] * 4
    previous = FlatModel(network(hidden, seed=9))
    ys = np.tile(x, (4, 1))
    x_prev = previous.flat.numpy().copy()
    assignments = [asked(**how, offset=offset, x_prev=x_prev) for offset in offsets]
    works = batched_sgd(net, ys, INPUTS, LABELS, tables, assignments, x=x, options=OPTIONS[options])
    for i in range(4):
        y, work = one_by_one(x, tables[i], hidden, assignments[i], previous=previous, options=OPTIONS[options])
        np.testing.assert_allclose(ys[i], y, rtol=1e-3, atol=1e-5)
        assert (works[i].steps, works[i].lr) == (work.steps, work.lr)
        assert np.abs(y - x).max() > 1e-3
        if how.get("second"):
            np.testing.assert_allclose(works[i].control, work.control, rtol=1e-3, atol=1e-5)
        else:
            assert works[i].control is None


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    steps=st.lists(st.integers(1, 6), min_size=6, max_size=6),
    alone=st.integers(0, 5),
    hidden=st.sampled_from([(7,), CONVOLUTION]),
)
def test_a_client_is_no_matter_of_the_others(sizes, steps, alone, hidden):
    module, alone = network(hidden), alone % len(sizes)
    net, x = net_of(module, (1, 4, 5)), FlatModel(module).flat.numpy().copy()
    tables = [table(i, size, steps[i]) for i, size in enumerate(sizes)]
    ys, y = np.tile(x, (len(sizes), 1)), x[None].copy()
    batched_sgd(net, ys, INPUTS, LABELS, tables, [asked()] * len(tables))
    batched_sgd(net, y, INPUTS, LABELS, [tables[alone]], [asked()])
    np.testing.assert_array_equal(ys[alone], y[0])


@pytest.mark.parametrize("hidden", [(7,), CONVOLUTION], ids=str)
def test_a_client_that_diverges_leaves_the_others_alone(hidden):
    module = network(hidden)
    net, x = net_of(module, (1, 4, 5)), FlatModel(module).flat.numpy().copy()
    tables = [table(0, 30, 4), table(1, 30, 4)]
    offsets = [np.full(net.n, 3e38, np.float32), None]
    ys, due = np.tile(x, (2, 1)), np.tile(x, (2, 1))
    batched_sgd(net, ys, INPUTS, LABELS, tables, [asked(1.0, offset=offset) for offset in offsets])
    batched_sgd(net, due, INPUTS, LABELS, tables, [asked(1.0)] * 2)
    assert not np.isfinite(ys[0]).all()
    np.testing.assert_array_equal(ys[1], due[1])


def test_tables_of_several_widths_are_refused():
    net = Perceptron.of(network(), (1, 4, 5))
    ys = np.zeros((2, net.n), np.float32)
    with pytest.raises(ShapeError, match=r"tables: expected 2 of one width, got widths \[8, 16\]"):
        batched_sgd(net, ys, INPUTS, LABELS, [table(0, 5, 1), table(1, 5, 1, width=16)], [asked()] * 2)
    with pytest.raises(ShapeError, match=r"tables: expected 2 of one width, got widths \[8\]"):
        batched_sgd(net, ys, INPUTS, LABELS, [table(0, 5, 1)], [asked()])


@pytest.mark.parametrize(
    ("inputs", "steps", "widths", "due"),
    [
        (20, 1, [8] * 130, [CLIENTS, CLIENTS, 2]),
        (BYTES // 8 // 10 - 1, 1, [1] * 25, [10, 10, 5]),  # by the models
        (20, 1, [BYTES // 80 // 4] * 9, [4, 4, 1]),  # by the examples of a step
        (20, INDICES // 32, [8] * 9, [4, 4, 1]),  # by the steps
        (BYTES, 1, [1] * 2, [1, 1]),
        (20, 1, [8, 8, 16, 8], [2, 1, 1]),
    ],
)
def test_memory_of_a_call_is_bounded_and_its_tables_have_one_width(inputs, steps, widths, due):
    net = Perceptron([Linear(1, inputs, 0, inputs, relu=False)])
    tables = [Table(np.broadcast_to(0, (steps, width)), np.full(1, width)) for width in widths]
    groups = list(in_groups(net, enumerate(tables)))
    assert [len(group) for group in groups] == due
    assert [client for group in groups for client, _ in group] == list(range(len(widths)))


@given(examples=st.integers(1, 40), batch=st.integers(1, 50), steps=st.integers(1, 30), more=st.integers(0, 3))
def test_a_table_holds_the_minibatches(examples, batch, steps, more):
    due = list(minibatches(examples, batch, steps=steps, seed=1, round=2, client=3))
    width = min(batch, examples) + more
    made = minibatch_table(examples, batch, steps=steps, width=width, seed=1, round=2, client=3)
    assert made.indices.shape == (steps, width)
    for row, size, indices in zip(made.indices, made.sizes, due, strict=True):
        np.testing.assert_array_equal(row[:size], indices)
        assert ((row >= 0) & (row < examples)).all()


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
    with pytest.raises(RangeError, match="module: "):
        fastest(nn.Sequential(convolution), DIGITS, batch=4)
