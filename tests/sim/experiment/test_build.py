"""The server, engine and clients that a trial is built from."""

import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedcore import Server, Update, algorithms
from fedcore.algorithms import SCAFFOLD, Algorithm, Direction, FedAvg, Linear, Step, optimizers
from fedcore.algorithms.local_rules import minibatches
from fedcore.errors import ConfigError, FedcoreError, RangeError
from fedcore.sim import nets
from fedcore.sim.engines import NO_ROUND, check_method
from fedcore.sim.experiment import load_preset
from fedcore.sim.experiment.config import load_and_partition
from fedcore.sim.experiment.schema import Trial
from fedcore.sim.experiment.trial import build, run_trial
from fedcore.sim.sgd import LocalOptions


@pytest.fixture
def norm(monkeypatch):
    """A small model with BatchNorm for the digits: 652 parameters, 2 statistics and a counter."""

    def make() -> nn.Module:
        return nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 10))

    monkeypatch.setitem(nets.REGISTRY, "norm", make)
    return load_preset("quickstart", ["model=norm", "algorithms=['MimiC']", "partition.clients=10", "local.epochs=1"])


def test_batchnorm_statistics_are_averaged_without_correction(norm):
    parts = build(Trial(norm, 0, 0))
    server, engine = parts.server, parts.engine
    assert (server.layout.n_parameters, server.layout.n) == (652, 654)
    assert server.store.n == server.layout.n_parameters
    for cohort in ([0, 1, 2], [2, 5], [0, 5, 7]):
        sent = server.broadcast(cohort)
        each = [np.array(update.value[server.layout.n_parameters :]) for update in engine.updates(sent)]
        server.round(engine.updates(sent))
        np.testing.assert_allclose(server.x[server.layout.n_parameters :], np.mean(each, axis=0), rtol=1e-5, atol=1e-7)


def test_a_run_that_cannot_succeed_names_the_remedy(tmp_path):
    for change, message in (
        ("model='tests.sim.engines.test_inprocess:Stateful'", r"^client \d+: .*local\.batch"),
        ("data='tests.sim.experiment.kit:UNTESTED'", "validation"),
        ("algorithms=['FlexibleFedAvg']", r"algorithms\.0: .*local_steps"),
    ):
        with pytest.raises(FedcoreError, match=message):
            experiment = load_preset("quickstart", ["algorithms=['FedAvg']", change])
            run_trial(Trial(experiment, 0, 0), tmp_path / message[-2:])


@pytest.mark.parametrize(
    "changes",
    [
        [
            "data={name='synthetic', alpha=1, beta=1, largest=60}",
            "partition={name='natural', clients=5}",
            "model=logistic",
        ],
        ["partition={name='dirichlet', clients=5, alpha=0.1}", "model={name='mlp', hidden=[6, 5]}"],
    ],
)
def test_trial_uses_the_configured_data_and_model(tmp_path, changes):
    experiment = load_preset("quickstart", [*changes, "rounds=2", "participation={name='Bernoulli', p=1}"])
    lines = []
    run_trial(Trial(experiment, 0, 0), tmp_path, lines.append)
    assert [line.accepted for line in lines] == [5, 5]
    assert all(0 <= line.accuracy <= 1 for line in lines)


def test_server_optimizer_of_the_configuration():
    changed = load_preset("quickstart", ["rate.optimizer={name='Adam', tau=0.1}", "rate.server_lr=0.01"])
    assert build(Trial(changed, 0, 0)).server.settings.optimizer == optimizers.Adam(tau=0.1)
    assert build(Trial(load_preset("quickstart"), 0, 0)).server.settings.optimizer is None
    with pytest.raises(ConfigError, match=r"rate.optimizer.name: 'Adma' is unknown; did you mean 'Adam'"):
        load_preset("quickstart", ["rate.optimizer='Adma'"])
    with pytest.raises(ConfigError, match=r"rate.optimizer: beta2=.*: must be a number in"):
        load_preset("quickstart", ["rate.optimizer={name='Adam', beta2=2}"])


WARM = ["algorithms=[{name='SCAFFOLD', warm_start=true}]", "partition.clients=5", "local.weight_decay=0.1"]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("model", ["mlp", "convolution"])
def test_warm_start_has_the_mean_gradients_of_the_first_model(model, together, monkeypatch):
    def convolution() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 10))

    monkeypatch.setitem(nets.REGISTRY, "convolution", convolution)
    changes = [*WARM, "local.epochs=1", f"model={model}", f"together={str(together).lower()}"]
    trial = Trial(load_preset("quickstart", changes), 0, 3)
    parts = build(trial)
    assert parts.engine.together == together
    dataset, holdings = load_and_partition(trial.experiment, 3)
    module, batch = nets.build(model, seed=3), trial.experiment.local.batch
    of_round_0 = next(minibatches(len(holdings[0]), batch, epochs=1, seed=3, round=0, client=0))
    for client, part in enumerate(holdings[:2]):
        expected, taken = 0, list(minibatches(len(part), batch, epochs=1, seed=3, round=NO_ROUND, client=client))
        for chosen in taken:
            module.zero_grad()
            scores = module(torch.from_numpy(dataset.train_x[part[chosen]]))
            cross_entropy(scores, torch.from_numpy(dataset.train_y[part[chosen]])).backward()
            expected += np.concatenate([(p.grad + 0.1 * p.detach()).numpy().ravel() for p in module.parameters()])
        np.testing.assert_allclose(parts.server.store.read(client), expected / len(taken), rtol=1e-3, atol=1e-6)
        assert client or taken[0].tolist() != of_round_0.tolist()
    assert parts.server.round_number == 0
    np.testing.assert_array_equal(parts.server.x, parts.engine.initial)


def test_warm_start_uploads_one_vector_per_client(tmp_path):
    lines = []
    warm = load_preset("quickstart", [*WARM, "rounds=2", "participation={name='Uniform', k=3}"])
    assert warm.algorithms[0].label == "SCAFFOLD (warm start)"
    run_trial(Trial(warm, 0, 0), tmp_path, lines.append)
    assert [line.uploads for line in lines] == [5 + 3, 5 + 3 + 3]
    assert [line.uploadings for line in lines] == [1 + 1, 1 + 2]
    with pytest.raises(ConfigError, match="warm_start=True: must be false"):
        load_preset("quickstart", ["algorithms=[{name='FedAvg', warm_start=true}]"])


class OwnVector(Algorithm):
    """A method whose clients send an unknown second vector, as exact FedDyn."""

    second_vector = "g + alpha (x - y)"
    keeps_total = True

    def step(self, cohort):
        return Step(v=Linear(A=1 / cohort.S), T=Linear(T=1, B=1))


class Contradictory(FedAvg):
    direction = Direction(from_row=-1)


@pytest.mark.parametrize(
    ("method", "message"),
    [(OwnVector, r"second_vector='g \+ alpha \(x - y\)'"), (Contradictory, r"Contradictory.direction\b.*from_row")],
)
def test_custom_method_that_cannot_be_simulated_is_rejected_on_loading(method, message, monkeypatch):
    monkeypatch.setitem(algorithms.REGISTRY, method.__name__, method)
    with pytest.raises(ConfigError, match=message):
        load_preset("quickstart", [f"algorithms=['FedAvg', '{method.__name__}']"])


def test_engine_rejects_an_unknown_second_vector():
    engine = build(Trial(load_preset("quickstart"), 0, 0)).engine
    server = Server(engine.initial, OwnVector(), clients=30, lr=0.1)
    assert server.broadcast([0]).second
    with pytest.raises(RangeError, match="second_vector="):
        server.round(engine.updates(server.broadcast([0])))
    with pytest.raises(RangeError, match="second_vector="):
        check_method(server.algorithm)


def test_engine_rejects_unsupported_methods_and_options():
    parts = build(Trial(load_preset("quickstart", ["algorithms=['SCAFFOLD']"]), 0, 0))
    engine = parts.engine
    with pytest.raises(RangeError, match=r"^placement: must be 'server'"):
        list(engine.updates(Server(engine.initial, SCAFFOLD(placement="client"), clients=30, lr=0.1).broadcast([0])))
    engine.parts.options = LocalOptions(momentum=0.5)
    with pytest.raises(RangeError, match="momentum or clip"):
        list(engine.updates(parts.server.broadcast([0])))


@pytest.mark.parametrize(
    ("local", "steps"),
    [
        ("local={batch=7, epochs=2}", lambda sizes: 2 * -(-max(sizes) // 7)),
        ("local={batch=7, steps=3}", lambda sizes: 3),
    ],
)
def test_server_limits_the_steps_of_a_client(local, steps):
    parts = build(Trial(load_preset("quickstart", [local, "algorithms=['MIFA']"]), 0, 0))
    most, y = steps([len(part) for part in parts.engine.parts]), parts.server.x + np.float32(1)
    report = parts.server.round([Update(0, y, most), Update(1, y, most + 1)])
    ((client, reason),) = report.rejected
    assert client == 1
    assert re.match(rf"steps={most + 1}\b.*\b{most}\b", reason)
