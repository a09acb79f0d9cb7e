"""The engine in this process."""

import threading
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout

from fedcore import algorithms
from fedcore.algorithms.local_rules import LocalRule, OneMinibatch, Table, minibatches
from fedcore.algorithms.rates import InverseStep
from fedcore.errors import AlgorithmError, RangeError, ShapeError, UnknownClientError
from fedcore.model import Layout
from fedcore.server import Server, Update
from fedcore.sim import in_process as inprocess
from fedcore.sim.batching import batched_sgd as together_module
from fedcore.sim.batching.batched_sgd import MOST_PARAMETERS
from fedcore.sim.data import Dataset, shards
from fedcore.sim.in_process import InProcess
from fedcore.sim.nets import build
from fedcore.sim.participation import Active
from fedcore.sim.sgd import FlatModel, LocalOptions, seeded, sgd
from tests.sim.kit import instructions_of, of_copies

CLIENTS = 4


def wide():
    """A perceptron that is too large to be trained together."""
    return build("mlp", seed=0, hidden=[MOST_PARAMETERS // 64])


@pytest.fixture(scope="module")
def dataset():
    """Three classes of 8x8 images, each a noisy pattern."""
    random = np.random.default_rng(0)
    y = np.arange(150) % 3
    x = (random.random((3, 1, 8, 8))[y] + random.normal(size=(150, 1, 8, 8)) / 4).astype(np.float32)
    return Dataset("patterns", x[:120], y[:120], x[120:], y[120:], classes=3)


@pytest.fixture(scope="module")
def parts(dataset):
    return [*shards(dataset.train_y, CLIENTS, 3, seed=0)[:3], np.arange(7)]


def convolution():
    with seeded(1, "tests"):
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 10))


class Stateful(nn.Sequential):
    """A model with a counter and another buffer that a server does not know, and random numbers, also in evaluation."""

    def __init__(self):
        with seeded(1, "tests"):
            super().__init__(nn.Flatten(), nn.BatchNorm1d(64, momentum=None), nn.Linear(64, 10), nn.RReLU())
        self.register_buffer("seen", torch.zeros(10), persistent=False)

    def forward(self, images):
        scores = dropout(super().forward(images), 0.2, training=True)
        self.seen += self.training * scores.detach().mean(0)
        return scores + self.seen


def engine(dataset, parts, *, module=None, **options):
    options = {"batch": 8, "epochs": 2, "seed": 5} | options
    return InProcess(module() if module else build("mlp", seed=1), dataset, parts, **options)


def sent(engine, *ids, round=0, lr=0.1):
    server = Server(engine.initial, algorithms.named("FedAvg"), clients=CLIENTS, lr=lr)
    return replace(server.broadcast(ids), round=round)


def models(engine, broadcast):
    return {update.client: np.array(update.value) for update in engine.updates(broadcast)}


def test_initial_is_a_copy_of_the_module_s_values_and_the_module_is_not_changed(dataset, parts):
    for module in (build("mlp", seed=1), wide()):
        work, expected = InProcess(module, dataset, parts, batch=8, steps=1, seed=5), Layout.of(module).flatten(module)
        models(work, sent(work, 0, 1))
        work.evaluate(work.initial + 1)
        assert np.array_equal(Layout.of(module).flatten(module), expected)
        assert np.array_equal(work.initial, expected)


@pytest.mark.parametrize("together", [False, True])
def test_an_update_is_sgd_on_the_client_s_part(dataset, parts, together):
    work = engine(dataset, parts, together=together)
    assert work.together == together
    broadcast = sent(work, 2, round=3)
    update = next(work.updates(broadcast))
    assert isinstance(update, Update)
    model = FlatModel(build("mlp", seed=1))
    batches = minibatches(len(parts[2]), 8, epochs=2, seed=5, round=3, client=2)
    own_x, own_y = torch.from_numpy(dataset.train_x[parts[2]]), torch.from_numpy(dataset.train_y[parts[2]])
    steps = sgd(model, own_x, own_y, batches, instructions_of()).steps

    rtol, atol = (1e-4, 1e-6) if together else (0, 0)
    np.testing.assert_allclose(update.value, model.flat.numpy(), rtol=rtol, atol=atol)
    assert (update.client, update.steps, update.examples, update.lr) == (2, steps, len(parts[2]), broadcast.lr)
    assert np.abs(update.value - work.initial).max() > 1e-3


@pytest.mark.parametrize("module", [None, Stateful])
def test_an_update_does_not_depend_on_other_clients_or_groups(dataset, parts, monkeypatch, module):
    work = engine(dataset, parts, module=module)
    together = models(work, sent(work, 0, 1, 3))
    asked = [replace(sent(work, *ids), needs_loss=True) for ids in ((0, 3), (3,))]
    assert len({[update.loss for update in work.updates(one)][-1] for one in asked}) == 1
    assert work.evaluate(work.initial) == work.evaluate(work.initial)
    for client, y in models(work, sent(work, 3, 0)).items():
        np.testing.assert_array_equal(y, together[client])
    assert not np.array_equal(together[0], models(work, sent(work, 0, round=1))[0])
    monkeypatch.setattr(together_module, "CLIENTS", 2)
    for client, y in models(work, sent(work, 3, 1, 0)).items():
        np.testing.assert_array_equal(y, together[client])


@pytest.mark.parametrize("together", [False, True])
def test_losses_are_those_of_the_model_that_was_sent(dataset, parts, together):
    work = engine(dataset, parts, together=together)
    plain = sent(work, 2, 0)
    before = {update.client: (np.array(update.value), update.loss) for update in work.updates(plain)}
    for update in work.updates(replace(plain, needs_loss=True)):
        own = (torch.from_numpy(values[parts[update.client]]) for values in (dataset.train_x, dataset.train_y))
        inputs, labels = own
        with torch.no_grad():
            due = float(cross_entropy(build("mlp", seed=1)(inputs), labels))
        assert update.loss == pytest.approx(due, rel=1e-5)
        assert before[update.client][1] is None
        np.testing.assert_array_equal(update.value, before[update.client][0])


def test_the_number_of_steps_and_a_share_of_them_which_is_a_prefix(dataset, parts):
    for work, due in (
        (engine(dataset, parts, epochs=None, steps=9), [9, 9]),
        (engine(dataset, parts), [2 * -(-len(parts[0]) // 8), 2]),
    ):
        assert [update.steps for update in work.updates(sent(work, 0, 3))] == due
    active = Active(np.array([0, 3]), shares=np.array([0.5, 0.01]), counts=np.array([3, 1]))
    got = [(u.client, u.steps, u.count, np.array(u.value)) for u in work.updates(sent(work, 0, 3), active)]
    full = 2 * -(-len(parts[0]) // 8)
    assert [entry[:3] for entry in got] == [(0, full // 2, 3), (3, 1, 1)]
    by_steps = engine(dataset, parts, epochs=None, steps=full // 2)
    np.testing.assert_array_equal(got[0][3], models(by_steps, sent(by_steps, 0))[0])


def test_active_must_have_the_clients_of_the_broadcast(dataset, parts):
    work = engine(dataset, parts)
    everything = [(u.client, u.steps, u.count) for u in work.updates(sent(work, 0, 3), Active(np.array([0, 3])))]
    assert everything == [(u.client, u.steps, u.count) for u in work.updates(sent(work, 0, 3))]
    for other in ([0, 2], [3, 0], [0], []):
        with pytest.raises(RangeError, match=r"^active\b.*\[0, 3\]"):
            next(work.updates(sent(work, 0, 3), Active(np.array(other, np.int64))))


def test_one_by_one_updates_share_one_writable_buffer(dataset, parts):
    work = engine(dataset, parts, together=False)
    first, second = work.updates(sent(work, 0, 1))
    assert np.shares_memory(first.value, second.value)
    assert first.value.flags.writeable
    assert not first.keep


def test_together_each_update_has_its_own_memory(dataset, parts):
    work = engine(dataset, parts)
    updates = list(work.updates(sent(work, 0, 1)))
    assert not np.shares_memory(updates[0].value, updates[1].value)
    before = [update.value.copy() for update in updates]
    models(work, sent(work, 0, 1, round=1))
    for update, y in zip(updates, before, strict=True):
        assert update.keep
        np.testing.assert_array_equal(update.value, y)


def test_a_round_on_the_server_is_the_mean_of_the_models(dataset, parts):
    work = engine(dataset, parts)
    server = Server(work.initial, algorithms.named("FedAvg"), clients=CLIENTS, lr=0.1)
    each = models(work, server.broadcast([0, 1, 3]))
    report = server.round(work.updates(server.broadcast([0, 1, 3])))
    assert list(report.accepted) == [0, 1, 3]
    weights = [len(parts[client]) for client in each]
    np.testing.assert_allclose(server.x, np.average(list(each.values()), axis=0, weights=weights), atol=1e-6)


def test_rounds_learn(dataset, parts):
    work = engine(dataset, parts)
    server = Server(work.initial, algorithms.named("FedAvg"), clients=CLIENTS, lr=0.05)
    before = work.evaluate(server.x)
    for _ in range(8):
        server.round(work.updates(server.broadcast(range(CLIENTS))))
    after = work.evaluate(server.x)
    assert after.accuracy > 0.9 > before.accuracy
    assert after.loss < before.loss / 2


METHODS = ["MBSTORM", "FedProx", "FedAvgM", "FedAvgMVR", "SCAFFOLD", "SCAFFOLDM", "SCAFFOLDMVR", "MIFA", "MimiC"]


@pytest.mark.parametrize("module", [None, convolution])
@pytest.mark.parametrize("algorithm", [*map(algorithms.named, METHODS), algorithms.LocalDescent(full_gradient=True)])
def test_together_equals_one_by_one_except_for_rounding(dataset, parts, algorithm, module):
    """With options, shares of the steps and clients of different sizes, over some rounds."""
    options = LocalOptions(weight_decay=0.01, clip=None if algorithm.needs_plain_steps else 0.5)
    cohorts = [np.array(cohort) for cohort in ([0, 1, 2, 3], [0, 2, 3], [3])]
    ends = []
    for together in (False, True):
        work = engine(dataset, parts, module=module, together=together, options=options)
        assert work.together == together
        server = Server(work.initial, algorithm, clients=CLIENTS, lr=0.2)
        for cohort in cohorts:
            active = Active(cohort, shares=np.linspace(0.4, 1, len(cohort)))
            report = server.round(work.updates(server.broadcast(cohort), active))
            assert report.accepted == tuple(cohort)
        ends.append(server.x)
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-3, atol=1e-5)
    assert np.abs(ends[0] - work.initial).max() > 5e-3


@pytest.mark.parametrize("module", [None, convolution])
@pytest.mark.parametrize("threads", [2, 9])
def test_the_bits_do_not_depend_on_threads(dataset, parts, threads, module):
    """With one call or several at once, in the order of the broadcast, and with offsets."""
    ends = []
    for work in (engine(dataset, parts, module=module, threads=count) for count in (1, threads)):
        server = Server(work.initial, "SCAFFOLD", clients=CLIENTS, lr=0.2)
        for cohort in ([0, 1, 2, 3], [3, 1, 0]):
            updates = list(work.updates(server.broadcast(cohort)))
            assert [update.client for update in updates] == cohort
            server.round(updates)
        ends.append(server.x)
    np.testing.assert_array_equal(ends[1], ends[0])


@pytest.mark.parametrize("module", [None, convolution])
def test_bits_with_minibatches_of_one_example_do_not_depend_on_other_clients(dataset, parts, module):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ends = [
            models(work, sent(work, *cohort))[0]
            for threads, cohort in ((1, [0, 1, 2, 3]), (4, [0, 1, 2, 3]), (1, [0]))
            for work in [engine(dataset, parts, module=module, threads=threads, batch=1)]
        ]
    finally:
        torch.set_num_threads(before)
    np.testing.assert_array_equal(ends[1], ends[0])
    np.testing.assert_array_equal(ends[2], ends[0])


def test_threads_end_when_the_iterator_is_closed(dataset, parts):
    work, before = engine(dataset, parts, threads=2), set(threading.enumerate())
    updates = work.updates(sent(work, 0, 1, 2, 3))
    assert next(updates).client == 0
    own = {thread for thread in set(threading.enumerate()) - before if thread.name.startswith("fedcore clients")}
    assert own  # A fast thread may take the next client before a second thread starts.
    updates.close()
    assert not own & set(threading.enumerate())


def test_an_error_in_a_thread_is_raised(dataset, parts, monkeypatch):
    def fails(*_, **__):
        raise MemoryError("made up")

    work = engine(dataset, parts, threads=2)
    monkeypatch.setattr(inprocess, "batched_sgd", fails)
    with pytest.raises(MemoryError, match="made up"):
        list(work.updates(sent(work, 0, 1, 2, 3)))


@pytest.mark.parametrize("together", [False, True])
def test_gradients_at_x_do_not_depend_on_the_offset(dataset, parts, together):
    work = engine(dataset, parts, together=together)
    server = Server(work.initial, "SCAFFOLD", clients=CLIENTS, lr=0.1)
    server.round(work.updates(server.broadcast([0, 1])))
    plain = Server(server.x, "FedAvg", clients=CLIENTS, lr=0.1)
    with_offset, without = work.gradients(server.broadcast([0, 2])), work.gradients(plain.broadcast([0, 2]))
    assert np.abs(server.broadcast([0]).offset(0)).max() > 0
    for client in (0, 2):
        np.testing.assert_array_equal(with_offset[client], without[client])


@pytest.mark.parametrize("together", [False, True])
def test_rates_that_change_within_a_round(dataset, parts, together):
    """h_i = (x - y_i) / (the sum of the rates of its K_i steps), which becomes MIFA's row."""
    rate = InverseStep(mu=2.0, alpha=3.0, E=5)
    work = engine(dataset, parts, together=together)
    server = Server(work.initial, algorithms.MIFA(wait=False), clients=CLIENTS, lr=rate)
    for t in range(3):
        x, broadcast = server.x.copy(), server.broadcast([0, 1, 3])
        ys = models(work, broadcast)
        report = server.round(work.updates(broadcast))
        for client, K in zip((0, 1, 3), (8, 8, 2), strict=True):
            expected = (x.astype(np.float64) - ys[client]) / sum(rate.of_step(t, k) for k in range(K))
            np.testing.assert_allclose(server.store.read(client), expected, rtol=1e-5, atol=1e-7)
        assert report.gamma == pytest.approx(np.mean([sum(rate.of_step(t, k) for k in range(K)) for K in (8, 8, 2)]))


@pytest.mark.parametrize("together", [False, True])
def test_one_minibatch_has_the_examples_of_all_steps(dataset, parts, together):
    work = engine(dataset, parts, together=together)
    (update,) = work.updates(replace(sent(work, 2, round=3), local_rule=OneMinibatch()))
    model = FlatModel(build("mlp", seed=1))
    seen = np.concatenate(list(minibatches(len(parts[2]), 8, epochs=2, seed=5, round=3, client=2)))
    assert len(seen) == 2 * len(parts[2])
    sgd(model, *work._train, [parts[2][seen]], instructions_of())
    np.testing.assert_allclose(update.value, model.flat.numpy(), rtol=1e-4, atol=1e-7)
    assert update.steps == 1


@pytest.mark.parametrize(("module", "together"), [(lambda: build("mlp", seed=0), True), (wide, False)])
def test_what_is_trained_together_is_a_matter_of_the_model(dataset, parts, module, together):
    assert InProcess(module(), dataset, parts, batch=8, steps=1, seed=0).together == together


@pytest.mark.parametrize("batch", [7, 1000])
def test_evaluation_uses_trained_batchnorm_statistics(dataset, parts, batch, monkeypatch):
    monkeypatch.setattr("fedcore.sim.sgd.SCORED", batch)
    module = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 3))
    work = InProcess(module, dataset, parts, batch=8, steps=2, seed=0)
    y = models(work, sent(work, 0))[0]
    assert np.abs(y[-64:] - work.initial[-64:]).min() > 0  # The running variance.
    got = work.evaluate(y)
    FlatModel(module.eval()).load(y)
    with torch.no_grad():
        scores, labels = module(torch.from_numpy(dataset.test_x)), torch.from_numpy(dataset.test_y)
    assert got.loss == pytest.approx(float(cross_entropy(scores, labels)), rel=1e-5)
    assert got.accuracy == (scores.argmax(1) == labels).sum() / 30
    assert work.evaluate(y) == got


def test_dropout_depends_only_on_the_round_and_the_client(dataset):
    module = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 3))
    work = InProcess(module, dataset, [np.array([7])] * 3, batch=1, steps=1, seed=0)
    torch.manual_seed(1)
    together = models(work, sent(work, 0, 1))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    np.testing.assert_array_equal(models(work, sent(work, 1))[1], together[1])
    assert torch.equal(torch.get_rng_state(), state)
    assert not np.array_equal(together[0], together[1])  # Only the masks differ.
    assert not np.array_equal(models(work, sent(work, 0, round=1))[0], together[0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"parts": []}, r"^parts\b"),
        ({"parts": [np.arange(3), np.arange(0)]}, r"^parts\b.*client 1"),
        ({"parts": [np.array([120])]}, r"^parts\b"),
        ({"parts": [np.array([-1])]}, r"^parts\b"),
        ({"batch": 0}, r"^batch\b"),
        ({"steps": 3}, r"^epochs\b"),
    ],
)
def test_wrong_arguments_are_rejected_at_once(dataset, wrong, message):
    options = {"parts": [np.arange(3)], "batch": 8, "epochs": 1, "seed": 0} | wrong
    with pytest.raises(RangeError, match=message):
        InProcess(build("mlp", seed=0), dataset, **options)


@pytest.mark.parametrize("kind", ["hook", "grad hook", "function"])
def test_a_module_whose_copies_compute_something_else_is_rejected(dataset, parts, kind):
    with pytest.raises(RangeError, match=r"^1(\.weight)?: .*cop"):
        engine(dataset, parts, module=lambda: nn.Sequential(nn.Flatten(), of_copies(nn.Linear(64, 3), kind)))


def test_unknown_clients_and_wrong_vectors_are_rejected(dataset, parts):
    work = engine(dataset, parts)
    broadcast = sent(work, 0)
    for client in (4, -1, "0"):
        with pytest.raises(UnknownClientError, match=rf"^ids\b.*{client!r}"):
            next(work.updates(replace(broadcast, ids=(client,))))
    with pytest.raises(ShapeError, match=r"^x\b"):
        work.evaluate(work.initial[:-1])


class Faulty(LocalRule):
    """A rule of a user; ``faults`` replaces its methods."""

    faults: ClassVar = {}

    def __getattribute__(self, name):
        faults = type(self).faults
        return faults[name] if name in faults else super().__getattribute__(name)


FAULTS = {
    "batch raises": {"batch": lambda batch: 1 / 0},
    "batch of 0": {"batch": lambda batch: 0},
    "batch of NaN": {"batch": lambda batch: np.nan},
    "full_steps raises": {"full_steps": lambda *_, **__: 1 / 0},
    "full_steps of NaN": {"full_steps": lambda *_, **__: np.nan},
    "full_steps of -1": {"full_steps": lambda *_, **__: -1},
    "along raises": {"along": lambda batches, examples: 1 / 0},
    "along raises late": {
        "along": lambda batches, examples: (one[:0] if i else 1 / 0 for i, one in enumerate(batches))
    },
    "along of nothing": {"along": lambda batches, examples: None},
    "no examples": {"along": lambda batches, examples: (one[:0] for one in batches)},
    "fractions": {"along": lambda batches, examples: (one / 2 for one in batches)},
    "NaN": {"along": lambda batches, examples: (one * np.nan for one in batches)},
    "another shape": {"along": lambda batches, examples: (one[None] for one in batches)},
    "an index too large": {"along": lambda batches, examples: (one + examples for one in batches)},
    "an index below 0": {"along": lambda batches, examples: (one - examples for one in batches)},
    "in_table raises": {"in_table": lambda table, examples: 1 / 0},
    "in_table of None": {"in_table": lambda table, examples: None},
    "a table of floats": {"in_table": lambda table, examples: Table(table.indices * 1.0, table.sizes)},
    "too many sizes": {"in_table": lambda table, examples: Table(table.indices, np.append(table.sizes, 1))},
    "a size too large": {"in_table": lambda table, examples: Table(table.indices, table.sizes * 9)},
    "a table of other examples": {"in_table": lambda table, examples: Table(table.indices + examples, table.sizes)},
}


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_an_own_rule_names_it(fault, together, dataset, parts, monkeypatch):
    monkeypatch.setattr(Faulty, "faults", FAULTS[fault])
    (method,) = FAULTS[fault]
    work = engine(dataset, parts, together=together)
    if method == "in_table" and not together:
        return  # it is not called
    with pytest.raises(AlgorithmError, match=f"Faulty: {method}"):
        list(work.updates(replace(sent(work, 0, 2), local_rule=Faulty())))
