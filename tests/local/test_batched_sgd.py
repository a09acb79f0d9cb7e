"""Many clients at once against ``sgd`` one by one, on the same minibatches; and each client whoever is beside it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedcore.errors import ShapeError
from fedcore.local import FlatModel, LocalOptions, build, seeded, sgd
from fedcore.local.batched_sgd import CLIENTS, INDICES, batched_sgd, in_groups
from fedcore.local.layers import Linear
from fedcore.local.perceptron import BYTES, Perceptron
from fedcore.local.together import net_of
from fedcore.local_rules import Table, minibatch_table, minibatches
from tests.local.asked import asked

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
