"""FedAvg inside Flower against Flower's own, and other methods, on client apps without fedcore."""

from inspect import Parameter, signature

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp import strategy as strategies
from flwr.serverapp.strategy import FedAvg

from fedcore import Compute, Server
from fedcore.adapters import flower
from fedcore.adapters.flower import Task
from fedcore.errors import ArrayError, RangeError
from fedcore.rules import Mean
from tests.adapters.flower.local_grid import LocalGrid, trains

ROUNDS, STEPS = 3, 4
MODEL = {"w": np.ones((7, 12), np.float32), "b": np.zeros(7, np.float32), "scale": np.float32([2, 3])}
COUNTER = "norm.num_batches_tracked"
results = []
"""Of the runs of this file, the last one last."""


def app_of(seed, seen, mods=()):
    """A client app that goes half-way to a model of its own, with seed + 1 examples."""
    rng, app = np.random.default_rng(seed), ClientApp(mods=[*mods])
    target = {name: rng.normal(size=x.shape).astype(np.float32) for name, x in MODEL.items()}

    @app.train()
    def train(message, context):
        sent = message.content["arrays"]
        seen.append({name: dict(record) for name, record in message.content.config_records.items()})
        record = ArrayRecord({name: Array((sent[name].numpy() + target[name]) / 2) for name in sent})
        metrics = MetricRecord({"num-examples": seed + 1, "batches": STEPS, "loss": float(seed)})
        return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        metrics = MetricRecord({"num-examples": seed + 1, "accuracy": 1 / (1 + seed)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def run(strategy, nodes, seen=None, mods=()):
    """The model of each round; ``seen`` takes the configurations that the client apps get."""
    models, seen = [], [] if seen is None else seen

    def keep(_, arrays):
        models.append(np.concatenate([array.ravel() for array in arrays.to_numpy_ndarrays()]))

    grid = LocalGrid({17 + seed: (app_of(seed, seen, mods), {}) for seed in range(nodes)})
    first = ArrayRecord({name: Array(x) for name, x in MODEL.items()})
    results.append(strategy.start(grid, first, ROUNDS, evaluate_fn=keep))
    return np.array(models)


@pytest.mark.parametrize(("nodes", "batch_size"), [(1, None), (4, None), (5, None), (5, 2)])
def test_fedavg_is_flower_s_own(nodes, batch_size):
    how = dict(fraction_evaluate=0.0, min_available_nodes=nodes, min_train_nodes=nodes)
    theirs = run(FedAvg(**how), nodes)
    ours = run(flower.FedAvg(lr=0.1, compute=Compute(batch_size=batch_size), poll=0.001, **how), nodes)
    assert len(theirs) == 1 + ROUNDS
    assert np.abs(np.diff(theirs, axis=0)).max(axis=0).min() > 1e-3  # each element changed
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("FedAdam", {}),
        ("FedAdam", {"eta": 0.3, "beta_1": 0.5, "beta_2": 0.8, "tau": 0.1, "eta_l": 0.2}),
        ("FedYogi", {}),
        ("FedYogi", {"eta": 0.2, "beta_1": 0.3, "beta_2": 0.9, "tau": 0.01}),
        ("FedAvgM", {}),
        ("FedAvgM", {"server_learning_rate": 0.5, "server_momentum": 0.7}),
        ("FedProx", {"proximal_mu": 0.3}),
        ("FedAdagrad", {}),
        ("FedAdagrad", {"eta": 0.02, "tau": 0.05}),
    ],
)
def test_flower_s_other_strategies_by_their_names(name, options):
    how, sent_by_them, sent_by_us = dict(fraction_evaluate=0.0, min_available_nodes=3, min_train_nodes=3), [], []
    theirs = run(getattr(strategies, name)(**how, **options), 3, sent_by_them)
    ours = run(getattr(flower, name)(poll=0.001, **how, **options), 3, sent_by_us)
    assert sent_by_us == sent_by_them  # FedProx sends "proximal-mu"
    assert np.abs(np.diff(theirs, axis=0)).max(axis=0).min() > 1e-3
    np.testing.assert_allclose(ours, theirs, rtol=3e-6, atol=3e-6)


def test_fedprox_without_a_rate_is_flower_s_own():
    how = dict(fraction_evaluate=0.0, min_available_nodes=3, min_train_nodes=3)
    sent_by_them, sent_by_us = [], []
    theirs = run(strategies.FedProx(proximal_mu=0.3, **how), 3, sent_by_them)
    np.testing.assert_allclose(run(flower.FedProx(mu=0.3, **how), 3, sent_by_us), theirs, rtol=1e-6, atol=1e-6)
    assert sent_by_us == sent_by_them
    assert sent_by_us[0]["config"]["proximal-mu"] == 0.3
    with pytest.raises(RangeError, match="mu"):
        flower.FedProx(proximal_mu=-1.0)


@pytest.mark.parametrize("nodes", [2, 5])
def test_without_arguments_it_is_flower_s_fedavg(nodes):
    theirs, ours = FedAvg(), flower.FedAvg()
    assert {name: getattr(ours, name) for name in vars(theirs)} == vars(theirs)
    sent_by_them, sent_by_us = [], []
    due = run(theirs, nodes, sent_by_them)
    np.testing.assert_allclose(run(ours, nodes, sent_by_us), due, rtol=1e-6, atol=1e-6)
    assert sent_by_us == sent_by_them
    mine, flowers = results[-1], results[-2]
    for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp"):
        got, due = getattr(mine, name), getattr(flowers, name)
        assert got.keys() == due.keys() == {1, 2, 3}
        for number in got:
            assert dict(got[number]) == pytest.approx(dict(due[number]))


@pytest.mark.parametrize(
    ("method", "how"),
    [("FedAvg", {}), ("FedAdam", {}), ("MIFA", {"lr": 0.5, "steps": STEPS}), ("MimiC", {"units": "update"})],
)
def test_noise_of_the_clients(method, how):
    strategy = getattr(flower, method)(poll=0.001, **how)
    mods = [LocalDpMod(clipping_norm=0.1, sensitivity=0.01, epsilon=1.0, delta=1e-5)]
    run(strategy, 3, mods=mods)
    assert [len(report.accepted) for report in strategy.reports] == [3] * ROUNDS


def test_local_clipping_is_flower_s_own():
    mods = [LocalDpMod(clipping_norm=0.1, sensitivity=0.0, epsilon=1.0, delta=1e-5)]
    ours, theirs = (run(strategy, 3, mods=mods) for strategy in (flower.FedAvg(poll=0.001), FedAvg()))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert np.linalg.norm(np.diff(ours, axis=0), axis=1).max() < 0.11


@pytest.mark.parametrize("method", ["FedAvg", "LocalDescent", "FlexibleFedAvg", "MimiC"])
def test_averaging_needs_no_rate(method):
    how = {"FlexibleFedAvg": {"client_sizes": lambda node: 5, "steps": 1}, "MimiC": {"units": "update"}}.get(method, {})
    strategy = getattr(flower, method)(poll=0.001, **how)
    assert np.isfinite(run(strategy, 3)).all()
    assert [len(report.accepted) for report in strategy.reports] == [3] * ROUNDS


@pytest.mark.parametrize(
    ("method", "how"),
    [("MimiC", {}), ("MIFA", {}), ("SCAFFOLD", {}), ("FedProx", {"server_lr": 1.0}), ("FedAvg", {"server_lr": 1.0})],
)
def test_other_methods_need_a_rate(method, how):
    with pytest.raises(RangeError, match=r"^lr\b"):
        getattr(flower, method)(**how)


def test_a_client_of_fedcore_needs_a_rate():
    def look(message):
        with pytest.raises(ArrayError, match=r"^message\b"):
            Task.of(message)
        return Message(RecordDict(), reply_to=message)

    strategy = flower.FedAvg(fraction_evaluate=0.0, poll=0.001, abort_after=None)
    strategy.start(LocalGrid({1: trains(look), 2: trains(look)}), ArrayRecord([MODEL["w"]]), 1)
    assert strategy.failures == []


@pytest.mark.parametrize("steps", [STEPS, "batches"])
@pytest.mark.parametrize("method", ["MimiC", "MIFA"])
def test_steps_of_client_apps_that_do_not_report_them(method, steps):
    strategy = getattr(flower, method)(lr=0.5, steps=steps, poll=0.001)
    x = run(strategy, 3)
    assert [len(report.accepted) for report in strategy.reports] == [3] * ROUNDS
    server = Server(x[0], method, [17, 18, 19], lr=0.5)
    targets = [np.random.default_rng(seed) for seed in range(3)]
    targets = [np.concatenate([rng.normal(size=value.shape).ravel() for value in MODEL.values()]) for rng in targets]
    for t in range(ROUNDS):
        with server.open_round() as opened:
            for node, target in zip((17, 18, 19), targets, strict=True):
                opened.add(node, ((server.x + target.astype(np.float32)) / 2).astype(np.float32), steps=STEPS)
        np.testing.assert_allclose(x[t + 1], server.x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({}, 'or use units="update"'),
        ({"steps": "num-batches"}, "'num-batches'"),
        ({"steps": "loss"}, "steps=0: must be an integer in 1..1000000"),
    ],
)
def test_a_rejection_without_steps_names_the_options(how, reason):
    strategy = flower.MimiC(lr=0.5, abort_after=None, poll=0.001, **how)
    run(strategy, 2)
    for report in strategy.reports:
        assert report.rejected[0][1].endswith(reason)


@pytest.mark.parametrize(("steps", "hints"), [(6, ["2.5", "steps=15"]), (15, []), ("batches", [])])
def test_a_hint_if_batchnorm_counted_more_steps(steps, hints, caplog):
    def train(message):
        sent = message.content["arrays"]
        record = ArrayRecord(
            {"w": Array(sent["w"].numpy() / 2), COUNTER: Array(np.asarray(sent[COUNTER].numpy() + 15))}
        )
        metrics = MetricRecord({"num-examples": 4, "batches": 15})
        return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)

    strategy = flower.MimiC(lr=0.5, steps=steps, fraction_evaluate=0.0, poll=0.001)
    first = ArrayRecord({"w": Array(MODEL["w"]), COUNTER: Array(np.array(30, np.int64))})
    strategy.start(LocalGrid({1: trains(train), 2: trains(train)}), first, 2)
    assert strategy.server.tensors()[COUNTER] == 60
    lines = [record.message for record in caplog.records if "BatchNorm" in record.message]
    assert len(lines) == bool(hints)  # in the first round only
    assert all(hint in line for hint in hints for line in lines)


def test_start_has_flower_s_own_defaults():
    ours, theirs = (signature(each.start).parameters for each in (flower.FedAvg, FedAvg))
    given = {name: each.default for name, each in theirs.items() if each.default is not Parameter.empty}
    assert {name: ours[name].default for name in given} == given


def test_a_later_flower_asks_whether_to_stop(tmp_path):
    """Flower 1.43 has ``should_stop``. It gets the server's round, also after a resume."""

    class Later(FedAvg):
        def start(self, grid, arrays, rounds, *args, should_stop, **more):
            self.stops = [should_stop(number, None) for number in range(1, rounds + 1)]
            return super().start(grid, arrays, self.stops.index(True) + 1, *args, **more)

    class Strategy(flower.FedAvg, Later):
        """Of fedcore's strategy in that version."""

    for last in (2, 4):
        strategy = Strategy(fraction_evaluate=0.0, poll=0.001, storage=tmp_path)
        grid = LocalGrid({17 + seed: (app_of(seed, []), {}) for seed in range(2)})
        arrays = ArrayRecord({name: Array(x) for name, x in MODEL.items()})
        strategy.start(grid, arrays, 5, should_stop=lambda round, result: round == last)  # noqa: B023
        assert strategy.server.round_number == last
        strategy.server.close()


@pytest.mark.parametrize("weights", [{17: 1, 18: 2, 19: 3}, "uniform"], ids=["by node", "of FedAvg"])
def test_weights_of_the_caller(weights):
    how = {"weights": weights} if isinstance(weights, str) else {"aggregation": [Mean(weights)]}
    strategy = flower.FedAvg(fraction_evaluate=0.0, **how)
    run(strategy, 3)
    due = [1, 1, 1] if weights == "uniform" else [1, 2, 3]
    assert [sorted(report.weights.tolist()) for report in strategy.reports] == [due] * ROUNDS
