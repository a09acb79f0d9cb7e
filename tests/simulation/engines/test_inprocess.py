import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedcore import algorithms
from fedcore.algorithms.rates import InverseStep
from fedcore.errors import RangeError, ShapeError, UnknownClientError
from fedcore.model import Layout
from fedcore.server import Broadcast, Server, Update
from fedcore.simulation import in_process as inprocess
from fedcore.simulation.batching import batched_sgd as together_module
from fedcore.simulation.batching.batched_sgd import MOST_PARAMETERS
from fedcore.simulation.data import Dataset, shards
from fedcore.simulation.in_process import InProcess
from fedcore.simulation.local_rules import OneMinibatch, minibatches
from fedcore.simulation.nets import build
from fedcore.simulation.participation import Active
from fedcore.simulation.sgd import FlatModel, LocalOptions, sgd
from fedcore.simulation.torch_device import seeded
from tests.simulation.asked import asked

CLIENTS = 4


def wide() -> nn.Module:
    """A perceptron of more parameters than are trained together."""
    return build("mlp", seed=0, hidden=[MOST_PARAMETERS // 64])


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    """Three classes of 8x8 images, each a noisy pattern of its own."""
    random = np.random.default_rng(0)
    y = np.arange(150) % 3
    x = (random.random((3, 1, 8, 8))[y] + random.normal(size=(150, 1, 8, 8)) / 4).astype(np.float32)
    return Dataset("made up", x[:120], y[:120], x[120:], y[120:], classes=3)


@pytest.fixture(scope="module")
def parts(dataset: Dataset) -> list[np.ndarray]:
    return [*shards(dataset.train_y, CLIENTS, 3, seed=0)[:3], np.arange(7)]


def convolution() -> nn.Module:
    with seeded(1, "tests"):
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 10))


def engine(
    dataset: Dataset, parts: list[np.ndarray], *, module: Callable[[], nn.Module] | None = None, **options: Any
) -> InProcess:
    options = {"batch": 8, "epochs": 2, "seed": 5} | options
    return InProcess(module() if module else build("mlp", seed=1), dataset, parts, **options)


def sent(engine: InProcess, *ids: int, round: int = 0, lr: float = 0.1) -> Broadcast:
    server = Server(engine.initial, algorithms.named("FedAvg"), clients=CLIENTS, lr=lr)
    return replace(server.broadcast(ids), round=round)


def models(engine: InProcess, broadcast: Broadcast) -> dict[Any, np.ndarray]:
    return {update.client: np.array(update.value) for update in engine.updates(broadcast)}


def test_initial_is_a_copy_of_the_modules_values(dataset: Dataset, parts: list[np.ndarray]) -> None:
    work = engine(dataset, parts)
    due = Layout.of(build("mlp", seed=1)).flatten(build("mlp", seed=1))
    models(work, sent(work, 0, 1))
    np.testing.assert_array_equal(work.initial, due)


@pytest.mark.parametrize("together", [False, True])
def test_an_update_is_the_rules_result_on_the_clients_part(
    dataset: Dataset, parts: list[np.ndarray], together: bool
) -> None:
    work = engine(dataset, parts, together=together)
    assert work.together == together
    broadcast = sent(work, 2, round=3)
    (update,) = ((update, np.array(update.value)) for update in work.updates(broadcast))

    model = FlatModel(build("mlp", seed=1))
    batches = minibatches(len(parts[2]), 8, epochs=2, seed=5, round=3, client=2)
    own_x, own_y = torch.from_numpy(dataset.train_x[parts[2]]), torch.from_numpy(dataset.train_y[parts[2]])
    steps = sgd(model, own_x, own_y, batches, asked()).steps

    if together:
        np.testing.assert_allclose(update[1], model.flat.numpy(), rtol=1e-4, atol=1e-6)
    else:
        np.testing.assert_array_equal(update[1], model.flat.numpy())
    assert (update[0].client, update[0].steps, update[0].examples) == (2, steps, len(parts[2]))
    assert update[0].lr == broadcast.lr
    assert np.abs(update[1] - work.initial).max() > 1e-3


def test_an_update_depends_on_nobody_elses(dataset: Dataset, parts: list[np.ndarray]) -> None:
    work = engine(dataset, parts)
    together = models(work, sent(work, 0, 1, 3))
    other_order = models(work, sent(work, 3, 0))
    np.testing.assert_array_equal(together[3], other_order[3])
    np.testing.assert_array_equal(together[0], other_order[0])
    assert not np.array_equal(together[0], models(work, sent(work, 0, round=1))[0])


def test_steps_done_are_reported(dataset: Dataset, parts: list[np.ndarray]) -> None:
    by_epochs = engine(dataset, parts)
    assert [update.steps for update in by_epochs.updates(sent(by_epochs, 0, 3))] == [2 * -(-len(parts[0]) // 8), 2]
    by_steps = engine(dataset, parts, epochs=None, steps=9)
    assert [update.steps for update in by_steps.updates(sent(by_steps, 0, 3))] == [9, 9]


def test_a_share_of_the_steps_is_where_all_steps_come_by(dataset: Dataset, parts: list[np.ndarray]) -> None:
    work = engine(dataset, parts)
    active = Active(np.array([0, 3]), shares=np.array([0.5, 0.01]), counts=np.array([3, 1]))
    got = [(u.client, u.steps, u.count, np.array(u.value)) for u in work.updates(sent(work, 0, 3), active)]
    full = 2 * -(-len(parts[0]) // 8)
    assert [entry[:3] for entry in got] == [(0, full // 2, 3), (3, 1, 1)]
    by_steps = engine(dataset, parts, epochs=None, steps=full // 2)
    np.testing.assert_array_equal(got[0][3], models(by_steps, sent(by_steps, 0))[0])


def test_active_clients_are_those_of_the_broadcast(dataset: Dataset, parts: list[np.ndarray]) -> None:
    work = engine(dataset, parts)
    everything = [(u.client, u.steps, u.count) for u in work.updates(sent(work, 0, 3), Active(np.array([0, 3])))]
    assert everything == [(u.client, u.steps, u.count) for u in work.updates(sent(work, 0, 3))]
    for other in ([0, 2], [3, 0], [0], []):
        with pytest.raises(RangeError, match=r"^active\b.*\[0, 3\]"):
            next(work.updates(sent(work, 0, 3), Active(np.array(other, np.int64))))


def test_one_by_one_updates_share_one_writable_buffer(dataset: Dataset, parts: list[np.ndarray]) -> None:
    work = engine(dataset, parts, together=False)
    first, second = work.updates(sent(work, 0, 1))
    assert np.shares_memory(first.value, second.value)
    assert first.value.flags.writeable
    assert not first.keep


def test_together_an_update_has_memory_of_its_own(dataset: Dataset, parts: list[np.ndarray]) -> None:
    work = engine(dataset, parts)
    updates = list(work.updates(sent(work, 0, 1)))
    assert not np.shares_memory(updates[0].value, updates[1].value)
    before = [update.value.copy() for update in updates]
    models(work, sent(work, 0, 1, round=1))
    for update, y in zip(updates, before, strict=True):
        assert update.keep
        np.testing.assert_array_equal(update.value, y)


def test_a_round_on_the_server_is_the_mean_of_the_models(dataset: Dataset, parts: list[np.ndarray]) -> None:
    work = engine(dataset, parts)
    server = Server(work.initial, algorithms.named("FedAvg"), clients=CLIENTS, lr=0.1)
    each = models(work, server.broadcast([0, 1, 3]))
    report = server.round(work.updates(server.broadcast([0, 1, 3])))
    assert list(report.accepted) == [0, 1, 3]
    weights = [len(parts[client]) for client in each]
    np.testing.assert_allclose(server.x, np.average(list(each.values()), axis=0, weights=weights), atol=1e-6)


def test_rounds_learn(dataset: Dataset, parts: list[np.ndarray]) -> None:
    work = engine(dataset, parts)
    server = Server(work.initial, algorithms.named("FedAvg"), clients=CLIENTS, lr=0.05)
    before = work.evaluate(server.x)
    for _ in range(8):
        server.round(work.updates(server.broadcast(range(CLIENTS))))
    after = work.evaluate(server.x)
    assert after.accuracy > 0.9 > before.accuracy
    assert after.loss < before.loss / 2


METHODS = [
    "FedAvg",
    "MBSTORM",
    "FedProx",
    "FedAvgM",
    "FedAvgMVR",
    "SCAFFOLD",
    "SCAFFOLDM",
    "SCAFFOLDMVR",
    "MIFA",
    "MimiC",
]


@pytest.mark.parametrize("module", [None, convolution])
@pytest.mark.parametrize("algorithm", [*map(algorithms.named, METHODS), algorithms.LocalDescent(full_gradient=True)])
def test_together_goes_the_way_of_one_by_one(
    dataset: Dataset,
    parts: list[np.ndarray],
    algorithm: algorithms.Algorithm,
    module: Callable[[], nn.Module] | None,
) -> None:
    """Every method, with options, shares of the work and clients of different sizes, over some rounds."""
    options = LocalOptions(weight_decay=0.01, clip=None if algorithm.needs_plain_steps else 0.5)
    cohorts = [np.array(cohort) for cohort in ([0, 1, 2, 3], [1, 3], [0, 2, 3], [3])]
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
    assert np.abs(ends[0] - work.initial).max() > 1e-2


@pytest.mark.parametrize("module", [None, convolution])
@pytest.mark.parametrize("threads", [2, 3, 9])
def test_threads_are_no_matter_of_the_result(
    dataset: Dataset, parts: list[np.ndarray], threads: int, module: Callable[[], nn.Module] | None
) -> None:
    """In a call or in several at once, and in the order of the broadcast; a method whose clients read the server's."""
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
def test_clients_of_single_examples_have_their_bits_whoever_is_beside_them(
    dataset: Dataset, parts: list[np.ndarray], module: Callable[[], nn.Module] | None
) -> None:
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


def test_threads_end_when_nobody_asks_for_more(dataset: Dataset, parts: list[np.ndarray]) -> None:
    work, before = engine(dataset, parts, threads=2), set(threading.enumerate())
    updates = work.updates(sent(work, 0, 1, 2, 3))
    assert next(updates).client == 0
    own = {thread for thread in set(threading.enumerate()) - before if thread.name.startswith("fedcore clients")}
    assert own  # one or two: a quick one takes the next client before another is begun
    updates.close()
    assert not own & set(threading.enumerate())


def test_what_fails_in_a_thread_is_raised(dataset: Dataset, parts: list[np.ndarray], monkeypatch: Any) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError("made up")

    work = engine(dataset, parts, threads=2)
    monkeypatch.setattr(inprocess, "batched_sgd", fails)
    with pytest.raises(MemoryError, match="made up"):
        list(work.updates(sent(work, 0, 1, 2, 3)))


@pytest.mark.parametrize("together", [False, True])
def test_gradients_are_those_at_x_whatever_the_offset(
    dataset: Dataset, parts: list[np.ndarray], together: bool
) -> None:
    work = engine(dataset, parts, together=together)
    server = Server(work.initial, "SCAFFOLD", clients=CLIENTS, lr=0.1)
    server.round(work.updates(server.broadcast([0, 1])))
    plain = Server(server.x, "FedAvg", clients=CLIENTS, lr=0.1)
    came, due = work.gradients(server.broadcast([0, 2])), work.gradients(plain.broadcast([0, 2]))
    assert np.abs(server.broadcast([0]).offset(0)).max() > 0
    for client in (0, 2):
        np.testing.assert_array_equal(came[client], due[client])


@pytest.mark.parametrize("together", [False, True])
def test_rates_that_change_within_a_round(dataset: Dataset, parts: list[np.ndarray], together: bool) -> None:
    """h_i = (x - y_i) / (the sum of the rates of its K_i steps), which becomes MIFA's row."""
    rate = InverseStep(mu=2.0, alpha=3.0, E=5)
    work = engine(dataset, parts, together=together)
    server = Server(work.initial, algorithms.MIFA(wait=False), clients=CLIENTS, lr=rate)
    for t in range(3):
        x, broadcast = server.x.copy(), server.broadcast([0, 1, 3])
        ys = models(work, broadcast)
        report = server.round(work.updates(broadcast))
        for client, K in zip((0, 1, 3), (8, 8, 2), strict=True):
            due = (x.astype(np.float64) - ys[client]) / sum(rate.of_step(t, k) for k in range(K))
            np.testing.assert_allclose(server.store.read(client), due, rtol=1e-5, atol=1e-7)
        assert report.gamma == pytest.approx(np.mean([sum(rate.of_step(t, k) for k in range(K)) for K in (8, 8, 2)]))


def test_a_group_of_clients_is_no_matter_of_the_result(
    dataset: Dataset, parts: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = engine(dataset, parts)
    together = models(work, sent(work, 0, 1, 2, 3))
    monkeypatch.setattr(together_module, "CLIENTS", 2)
    for client, y in models(work, sent(work, 3, 2, 0, 1)).items():
        np.testing.assert_array_equal(y, together[client])


@pytest.mark.parametrize("together", [False, True])
def test_one_minibatch_is_all_that_the_steps_would_see(
    dataset: Dataset, parts: list[np.ndarray], together: bool
) -> None:
    work = engine(dataset, parts, together=together)
    (update,) = work.updates(replace(sent(work, 2, round=3), local_rule=OneMinibatch()))
    model = FlatModel(build("mlp", seed=1))
    seen = np.concatenate(list(minibatches(len(parts[2]), 8, epochs=2, seed=5, round=3, client=2)))
    assert len(seen) == 2 * len(parts[2])
    sgd(model, *work._train, [parts[2][seen]], asked())
    np.testing.assert_allclose(update.value, model.flat.numpy(), rtol=1e-4, atol=1e-7)
    assert update.steps == 1


@pytest.mark.parametrize(("module", "together"), [(lambda: build("mlp", seed=0), True), (wide, False)])
def test_what_is_trained_together_is_a_matter_of_the_model(
    dataset: Dataset, parts: list[np.ndarray], module: Callable[[], nn.Module], together: bool
) -> None:
    assert InProcess(module(), dataset, parts, batch=8, steps=1, seed=0).together == together


@pytest.mark.parametrize("batch", [7, 1000])
def test_evaluation(dataset: Dataset, parts: list[np.ndarray], batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inprocess, "EVALUATION_BATCH", batch)
    work = engine(dataset, parts)
    models(work, sent(work, 0))  # the model now holds something else
    got = work.evaluate(work.initial)
    with torch.no_grad():
        scores = build("mlp", seed=1)(torch.from_numpy(dataset.test_x))
        labels = torch.from_numpy(dataset.test_y)
        assert got.loss == pytest.approx(float(cross_entropy(scores, labels)), rel=1e-5)
    assert got.accuracy == (scores.argmax(1) == labels).sum() / 30


def test_norms_learn_in_training_and_are_used_in_evaluation(dataset: Dataset, parts: list[np.ndarray]) -> None:
    module = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 3))
    work = InProcess(module, dataset, parts, batch=8, steps=2, seed=0)
    y = models(work, sent(work, 0))[0]
    assert np.abs(y[-64:] - work.initial[-64:]).min() > 0  # the running variance
    got = work.evaluate(y)
    module.eval()
    with torch.no_grad():
        scores = module(torch.from_numpy(dataset.test_x))
    assert got.loss == pytest.approx(float(cross_entropy(scores, torch.from_numpy(dataset.test_y))), rel=1e-5)
    assert work.evaluate(y) == got


def test_dropout_depends_on_the_round_and_the_client_alone(dataset: Dataset) -> None:
    module = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 3))
    work = InProcess(module, dataset, [np.array([7])] * 3, batch=1, steps=1, seed=0)
    torch.manual_seed(1)
    together = models(work, sent(work, 0, 1))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    np.testing.assert_array_equal(models(work, sent(work, 1))[1], together[1])
    assert torch.equal(torch.get_rng_state(), state)
    assert not np.array_equal(together[0], together[1])  # one step on one example: only the masks differ
    assert not np.array_equal(models(work, sent(work, 0, round=1))[0], together[0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"parts": []}, r"^parts\b"),
        ({"parts": [np.arange(3), np.arange(0)]}, r"^parts\b.*client 1"),
        ({"parts": [np.array([120])]}, r"^parts\b"),
        ({"parts": [np.array([-1])]}, r"^parts\b"),
        ({"batch": 0}, r"^batch\b"),
        ({"steps": 3}, r"^epochs, steps\b"),
    ],
)
def test_wrong_arguments_are_refused_at_once(dataset: Dataset, wrong: dict[str, Any], message: str) -> None:
    options = {"parts": [np.arange(3)], "batch": 8, "epochs": 1, "seed": 0} | wrong
    with pytest.raises(RangeError, match=message):
        InProcess(build("mlp", seed=0), dataset, **options)


def test_what_cannot_be_trained_is_refused(dataset: Dataset, parts: list[np.ndarray]) -> None:
    work = engine(dataset, parts)
    broadcast = sent(work, 0)
    for client in (4, -1, "0"):
        with pytest.raises(UnknownClientError, match=rf"^ids\b.*{client!r}"):
            next(work.updates(replace(broadcast, ids=(client,))))
    with pytest.raises(ShapeError, match=r"^x\b"):
        work.evaluate(work.initial[:-1])


def test_updates_are_made_when_asked_for(dataset: Dataset, parts: list[np.ndarray]) -> None:
    work = engine(dataset, parts)
    updates = work.updates(sent(work, 1, 0))
    first = next(updates)
    assert isinstance(first, Update)
    assert first.client == 1
