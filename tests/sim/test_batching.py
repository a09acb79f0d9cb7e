"""The local work of many clients at once."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedcore.algorithms.local_rules import Table, minibatch_table, minibatches, orders_of
from fedcore.errors import RangeError, ShapeError
from fedcore.model import Layout
from fedcore.sim.batching import batched_sgd as ways
from fedcore.sim.batching.batched_sgd import batched_sgd, in_groups, net_of
from fedcore.sim.batching.convolutions import ConvNet
from fedcore.sim.batching.layers import BYTES, Block, Linear, Perceptron
from fedcore.sim.nets import build
from fedcore.sim.sgd import FlatModel, LocalOptions, seeded, sgd
from tests.sim.kit import Doubled, check_gradients, frozen, hooked, instructions_of, of_copies, patched

SHARED = nn.Linear(4, 4)
NOT = {
    "dropout": nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5)),
    "normalisation": nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)),
    "another activation": nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 2)),
    "a custom forward pass": Doubled(nn.Linear(4, 2)),
    "shared weights": nn.Sequential(SHARED, nn.ReLU(), SHARED),
    "frozen": nn.Sequential(frozen(nn.Linear(4, 2))),
    "a hook": nn.Sequential(hooked(nn.Linear(4, 2))),
    "a parameter's hook": nn.Sequential(of_copies(nn.Linear(4, 2), "hook")),
    "its own forward": nn.Sequential(patched(nn.Linear(4, 2))),
    "no Sequential": nn.Linear(4, 2),
    "nested": nn.Sequential(nn.Sequential(nn.Linear(4, 2))),
    "ReLU first": nn.Sequential(nn.ReLU(), nn.Linear(4, 2)),
    "other inputs": nn.Sequential(nn.Linear(5, 2)),
    "nothing": nn.Sequential(),
    "convolutions": build("lenet", seed=0),
    "another network": build("resnet18", seed=0),
    "a further parameter": nn.Sequential(OrderedDict(fc=nn.Linear(4, 2))),
}
NOT["a further parameter"].scale = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize("name", NOT)
def test_other_modules_are_no_perceptrons(name):
    assert Perceptron.of(NOT[name], (4,)) is None


def test_images_need_a_flatten_layer():
    for layers, shape, fits in (([], (4,), True), ([], (1, 4), False), ([()], (1, 4), True), ([(2,)], (1, 4), False)):
        module = nn.Sequential(*(nn.Flatten(*axes) for axes in layers), nn.Linear(4, 2))
        assert (Perceptron.of(module, shape) is not None) == fits


@pytest.mark.parametrize(
    "module",
    [
        build("logistic", seed=0),
        build("mlp", seed=0, inputs=60, hidden=[20, 33]),
        nn.Sequential(nn.Linear(60, 3, bias=False), nn.ReLU(), nn.Linear(3, 10), nn.ReLU()),
    ],
    ids=["logistic", "two hidden layers", "no bias, ReLU at the end"],
)
def test_gradients_equal_torch_s(module):
    check_gradients(Perceptron.of(module, (60,)), module, (60,), [8, 3, 8, 1, 5], 8)


def test_a_block_returns_its_rows():
    net = Perceptron.of(build("mlp", seed=0), (1, 8, 8))
    rows, back = torch.rand(3, net.n), torch.zeros(3, net.n)
    block = Block(net, 3).fill(rows)
    block.empty_into(back)
    assert torch.equal(back, rows)
    assert all(weight.is_contiguous() for weight in block.weights)


# Many clients at once against ``sgd`` one by one, on the same minibatches.


RANDOM = torch.Generator().manual_seed(0)
INPUTS, LABELS = torch.rand(200, 1, 4, 5, generator=RANDOM), torch.randint(6, (200,), generator=RANDOM)
EXAMPLES = INPUTS, LABELS
DIRECTIONS = {
    "plain": {},
    "proximal": dict(mu=0.3),
    "offsets": dict(offsets=True),
    "two gradients": dict(b=-0.7, offsets=True),
    "all": dict(a=0.6, b=-0.4, mu=0.2, offsets=True, second=True),
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
    made = minibatch_table(orders_of(examples, 3, 2, client), examples, batch, steps=steps, width=width)
    return Table(made.indices + 10 * client, made.sizes)


def one_by_one(x, table, hidden, assignment, **how):
    model = FlatModel(network(hidden))
    model.load(x)
    batches = [row[:size] for row, size in zip(table.indices, table.sizes, strict=True)]
    work = sgd(model, INPUTS, LABELS, batches, assignment, x=x, **how)
    return model.flat.numpy().copy(), work


@pytest.mark.sample(1)
@pytest.mark.parametrize("hidden", [(12, 9), CONVOLUTION], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_batched_sgd_equals_sgd_except_for_rounding(direction, options, hidden):
    module, how = network(hidden), dict(DIRECTIONS[direction])
    net, x = net_of(module, (1, 4, 5)), FlatModel(module).flat.numpy().copy()
    rng = np.random.default_rng(0)
    tables = [table(0, 30, 5), table(1, 5, 9), table(2, 41, 9), table(3, 8, 1)]
    offsets = [None, *rng.normal(size=(3, net.n)).astype(np.float32)] if how.pop("offsets", False) else [None] * 4
    previous = FlatModel(network(hidden, seed=9))
    ys = np.tile(x, (4, 1))
    x_prev = previous.flat.numpy().copy()
    assignments = [instructions_of(**how, offset=offset, x_prev=x_prev) for offset in offsets]
    works = batched_sgd(net, ys, EXAMPLES, list(zip(tables, assignments, strict=True)), x=x, options=OPTIONS[options])
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
    one=st.integers(0, 5),
    hidden=st.sampled_from([(7,), CONVOLUTION]),
)
def test_a_client_s_bits_do_not_depend_on_the_others(sizes, steps, one, hidden):
    module, one = network(hidden), one % len(sizes)
    net, x = net_of(module, (1, 4, 5)), FlatModel(module).flat.numpy().copy()
    tables = [table(i, size, steps[i]) for i, size in enumerate(sizes)]
    ys, y = np.tile(x, (len(sizes), 1)), x[None].copy()
    batched_sgd(net, ys, EXAMPLES, [(each, instructions_of()) for each in tables])
    batched_sgd(net, y, EXAMPLES, [(tables[one], instructions_of())])
    np.testing.assert_array_equal(ys[one], y[0])


@pytest.mark.parametrize("hidden", [(7,), CONVOLUTION], ids=str)
def test_a_diverging_client_does_not_change_the_others(hidden):
    module = network(hidden)
    net, x = net_of(module, (1, 4, 5)), FlatModel(module).flat.numpy().copy()
    ys, expected = np.tile(x, (2, 1)), np.tile(x, (2, 1))
    for out, offset in ((ys, np.full(net.n, 3e38, np.float32)), (expected, None)):
        offsets = enumerate((offset, None))
        batched_sgd(net, out, EXAMPLES, [(table(i, 30, 4), instructions_of(1.0, offset=own)) for i, own in offsets])
    assert not np.isfinite(ys[0]).all()
    np.testing.assert_array_equal(ys[1], expected[1])


def test_tables_of_several_widths_are_rejected():
    net = Perceptron.of(network(), (1, 4, 5))
    ys = np.zeros((2, net.n), np.float32)
    with pytest.raises(ShapeError, match=r"^tables\b.*\[8, 16\]"):
        wide = table(1, 5, 1, width=16)
        batched_sgd(net, ys, EXAMPLES, [(table(0, 5, 1), instructions_of()), (wide, instructions_of())])
    with pytest.raises(ShapeError, match=r"^tables\b.*\[8\]"):
        batched_sgd(net, ys, EXAMPLES, [(table(0, 5, 1), instructions_of())])


@pytest.mark.parametrize(
    ("inputs", "steps", "widths", "expected"),
    [
        (20, 1, [8] * 130, [ways.CLIENTS, ways.CLIENTS, 2]),
        (BYTES // 8 // 10 - 1, 1, [1] * 25, [10, 10, 5]),  # The models are the limit.
        (20, 1, [BYTES // 80 // 4] * 9, [4, 4, 1]),  # The examples of a step are the limit.
        (20, ways.INDICES // 32, [8] * 9, [4, 4, 1]),  # The steps are the limit.
        (BYTES, 1, [1] * 2, [1, 1]),
        (20, 1, [8, 8, 16, 8], [2, 1, 1]),
    ],
)
def test_groups_are_bounded_in_memory_and_have_one_width(inputs, steps, widths, expected):
    net = Perceptron([Linear(1, inputs, 0, inputs, relu=False)])
    tables = [Table(np.broadcast_to(0, (steps, width)), np.full(1, width)) for width in widths]
    groups = list(in_groups(net, enumerate(tables)))
    assert [len(group) for group in groups] == expected
    assert [client for group in groups for client, _ in group] == list(range(len(widths)))


@given(examples=st.integers(1, 40), batch=st.integers(1, 50), steps=st.integers(1, 30), more=st.integers(0, 3))
def test_a_table_has_the_minibatches(examples, batch, steps, more):
    expected = list(minibatches(examples, batch, steps=steps, seed=1, round=2, client=3))
    width = min(batch, examples) + more
    made = minibatch_table(orders_of(examples, 1, 2, 3), examples, batch, steps=steps, width=width)
    assert made.indices.shape == (steps, width)
    for row, size, indices in zip(made.indices, made.sizes, expected, strict=True):
        np.testing.assert_array_equal(row[:size], indices)
        assert ((row >= 0) & (row < examples)).all()


DIGITS = (1, 8, 8)


@pytest.fixture
def convolution():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 10))


def test_small_perceptrons_and_convolutional_networks_are_batched(convolution):
    assert isinstance(net_of(build("mlp", seed=0), DIGITS), Perceptron)
    assert isinstance(net_of(convolution, DIGITS), ConvNet)
    assert net_of(build("mlp", seed=0, hidden=[ways.MOST_PARAMETERS // 64]), DIGITS) is None
    assert net_of(build("cnn-emnist", seed=0), (1, 28, 28)) is None
    assert net_of(nn.Sequential(convolution), DIGITS) is None


def test_only_convolutional_networks_are_measured(convolution):
    assert ways.can_be_measured(convolution, DIGITS)
    assert not ways.can_be_measured(build("mlp", seed=0), DIGITS)
    assert not ways.can_be_measured(build("resnet18", seed=0), (3, 32, 32))


def test_measuring_does_not_change_the_module_or_torch(convolution):
    before, state = Layout.of(convolution).flatten(convolution), torch.random.get_rng_state()
    assert isinstance(ways.fastest(convolution, DIGITS, batch=4), bool)
    assert (Layout.of(convolution).flatten(convolution) == before).all()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in convolution.parameters())


def test_measuring_rejects_models_that_are_trained_one_by_one(convolution):
    with pytest.raises(RangeError, match="module: "):
        ways.fastest(nn.Sequential(convolution), DIGITS, batch=4)
