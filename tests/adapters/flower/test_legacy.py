"""The older Strategy API: the same server under aggregate_fit."""

from dataclasses import replace

import numpy as np
import pytest
from flwr.common import Code, EvaluateRes, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.client_manager import SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import DifferentialPrivacyServerSideFixedClipping

from fedcore import Server
from fedcore.adapters import npy
from fedcore.adapters.flower.legacy import LegacyStrategy
from fedcore.errors import ArrayError, CheckpointError, RangeError

MODEL = [np.ones((3, 2), np.float32), np.zeros(2, np.float32)]
STEPS = 4


class Proxy(ClientProxy):
    """A client in this process; its gradient is y - target."""

    get_properties = get_parameters = evaluate = reconnect = None

    def __init__(self, cid):
        super().__init__(cid)
        self.target = np.float32(int(cid))

    def fit(self, ins, timeout=None, group_id=None):
        said = ins.config
        y = np.concatenate([a.reshape(-1) for a in parameters_to_ndarrays(ins.parameters)])
        x = y.copy()
        offset = npy.read(said["fedcore.offset"]) if "fedcore.offset" in said else 0
        control = np.zeros(8, np.float32)
        for _ in range(STEPS):
            grad = y - self.target
            control += grad / STEPS
            y = y - said["lr"] * (said["fedcore.a"] * grad + offset + said["fedcore.mu"] * (y - x))
        y = y.astype(np.float32)
        metrics = {"fedcore.steps": STEPS}
        if said["fedcore.second_vector"]:
            metrics["fedcore.control"] = npy.write(control)
        return FitRes(Status(Code.OK, ""), ndarrays_to_parameters([y[:6].reshape(3, 2), y[6:]]), 5, metrics)


Proxy.__abstractmethods__ = frozenset()


@pytest.mark.parametrize("method", ["FedAvg", "FedProx", "MIFA", "MimiC", "SCAFFOLD", "FedAvgM"])
def test_equals_a_plain_server(method):
    manager = SimpleClientManager()
    for cid in "123":
        manager.register(Proxy(cid))
    strategy = LegacyStrategy(
        method, lr=0.1, initial_parameters=ndarrays_to_parameters(MODEL), min_available_clients=3, min_fit_clients=3
    )
    server = Server(method, MODEL, ["1", "2", "3"], lr=0.1)
    parameters = strategy.initialize_parameters(manager)
    for t in range(4):
        asked = strategy.configure_fit(t + 1, parameters, manager)
        results = [(proxy, proxy.fit(ins)) for proxy, ins in asked if t != 1 or proxy.cid != "2"]
        failures = [RuntimeError("gone")] * (len(asked) - len(results))
        parameters, _ = strategy.aggregate_fit(t + 1, results, failures)
        with server.open_round() as opened:
            for proxy, result in results:
                opened.add(proxy.cid, parameters_to_ndarrays(result.parameters), steps=STEPS, examples=5)
        np.testing.assert_array_equal(strategy.server.x, server.x)
    assert [len(report.heard) for report in strategy.reports] == [3, 2, 3, 3]
    np.testing.assert_array_equal(parameters_to_ndarrays(parameters)[0], server.tensors()[0])


def legacy(method, **more):
    return LegacyStrategy(
        method,
        lr=0.1,
        initial_parameters=ndarrays_to_parameters(MODEL),
        min_available_clients=3,
        min_fit_clients=3,
        **more,
    )


def fit(strategy, rounds):
    """Rounds as Flower's own loop does them, the second client away in every other one."""
    manager = SimpleClientManager()
    for cid in "123":
        manager.register(Proxy(cid))
    parameters = strategy.initialize_parameters(manager)
    for t in rounds:
        asked = strategy.configure_fit(t + 1, parameters, manager)
        results = [(proxy, proxy.fit(ins)) for proxy, ins in asked if t % 2 == 0 or proxy.cid != "2"]
        results.sort(key=lambda pair: pair[0].cid)  # Flower's draw is from a generator that nobody can save
        parameters, _ = strategy.aggregate_fit(t + 1, results, [])
    return parameters_to_ndarrays(parameters)


@pytest.mark.parametrize("method", ["FedAvg", "MIFA", "MimiC", "SCAFFOLD", "FedAvgM"])
@pytest.mark.parametrize("medium", ["saved", "mmap"])
def test_a_resumed_run_ends_where_an_unbroken_one_does(method, medium, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    whole = legacy(method)
    due = fit(whole, range(6))
    server = {"store": "mmap:rows"} if medium == "mmap" else {}
    first = legacy(method, server=server)
    monkeypatch.chdir("/")
    middle = fit(first, range(3))
    if medium == "saved":
        first.server.save(tmp_path / "rows")
    first.server.close()
    how = {"server": {"store": "mmap:~/rows"}} if medium == "mmap" else {"resume": "~/rows"}
    again = legacy(method, **how)
    for array, left in zip(parameters_to_ndarrays(again.initialize_parameters(None)), middle, strict=True):
        np.testing.assert_array_equal(array, left)
    for array, end in zip(fit(again, range(3, 6)), due, strict=True):
        np.testing.assert_array_equal(array, end)
    assert again.server.round_number == 6
    for client in "123":
        np.testing.assert_array_equal(again.server.store.read(client), whole.server.store.read(client))
    again.server.close()


def test_another_model_or_method_is_not_gone_on_with(tmp_path):
    first = legacy("MimiC")
    fit(first, range(1))
    first.server.save(tmp_path / "rows")
    with pytest.raises(CheckpointError):
        legacy("MIFA", resume=tmp_path / "rows")
    other = ndarrays_to_parameters([np.ones((2, 2), np.float32)])
    with pytest.raises(CheckpointError, match="other tensors"):
        LegacyStrategy("MimiC", lr=0.1, initial_parameters=other, resume=tmp_path / "rows")


def test_a_bad_result_is_refused_and_a_new_client_arrives():
    manager = SimpleClientManager()
    for cid in "12":
        manager.register(Proxy(cid))
    strategy = LegacyStrategy("MIFA", lr=0.1, initial_parameters=ndarrays_to_parameters(MODEL))
    asked = strategy.configure_fit(1, None, manager)
    results = [(proxy, proxy.fit(ins)) for proxy, ins in asked]
    results[0][1].parameters.tensors[0] = b"nothing"
    strategy.aggregate_fit(1, results, [])
    assert [client for client, _ in strategy.reports[0].refused] == [results[0][0].cid]
    manager.register(Proxy("3"))
    while "3" not in {proxy.cid for proxy, _ in strategy.configure_fit(2, None, manager)}:
        pass
    assert set(strategy.server.clients) == {results[1][0].cid}
    asked = strategy.configure_fit(3, None, manager)
    strategy.aggregate_fit(3, [(proxy, proxy.fit(ins)) for proxy, ins in asked], [])
    assert set(strategy.server.clients) == {results[1][0].cid, *(proxy.cid for proxy, _ in asked)}


def round_of_means(strategy, manager, parameters, t):
    """A round after which each result is the cohort's mean, which is what Flower's secure aggregation makes of it."""
    asked = strategy.configure_fit(t + 1, parameters, manager)
    results = [(proxy, proxy.fit(ins)) for proxy, ins in asked]
    models = [parameters_to_ndarrays(result.parameters) for _, result in results]
    mean = ndarrays_to_parameters([np.mean(tensors, axis=0) for tensors in zip(*models, strict=True)])
    return [(proxy, replace(result, parameters=mean)) for proxy, result in results]


@pytest.mark.parametrize(
    ("method", "warned"), [("FedAvg", 0), ("FedProx", 0), ("MIFA", 3), ("MimiC", 3), ("FedVARP", 3)]
)
def test_a_method_with_rows_says_that_results_are_means(method, warned, caplog):
    """All rows are then alike, and the method is FedAvg."""
    manager = SimpleClientManager()
    for cid in "123":
        manager.register(Proxy(cid))
    strategy, plain = legacy(method), legacy("FedAvg")
    parameters = {each: each.initialize_parameters(manager) for each in (strategy, plain)}
    for t in range(3):
        for each in parameters:
            results = round_of_means(each, manager, parameters[each], t)
            parameters[each], _ = each.aggregate_fit(t + 1, results, [])
    assert caplog.text.count(f"from a mean alone, {method} learns nothing about single clients") == warned
    if method != "FedProx":
        np.testing.assert_allclose(strategy.server.x, plain.server.x, rtol=1e-5, atol=1e-6)


def test_metrics_that_are_no_numbers_reach_the_user_s_function_as_they_are():
    manager, seen, said = SimpleClientManager(), [], {"site": "north", "done": True, "raw": b"12", "loss": 0.5}
    for cid in "123":
        manager.register(Proxy(cid))
    strategy = legacy("FedAvg", fit_metrics_aggregation_fn=lambda results: seen.extend(results) or {})
    asked = strategy.configure_fit(1, strategy.initialize_parameters(manager), manager)
    results = [(proxy, proxy.fit(ins)) for proxy, ins in asked]
    for _, result in results:
        result.metrics |= said
    strategy.aggregate_fit(1, results, [])
    assert [{name: metrics[name] for name in said} for _, metrics in seen] == [said] * 3
    assert all(metrics["done"] is True for _, metrics in seen)


def test_two_of_three_results_that_are_alike_are_no_mean(caplog):
    manager = SimpleClientManager()
    for cid in "123":
        manager.register(Proxy(cid))
    strategy = legacy("MIFA")
    asked = strategy.configure_fit(1, strategy.initialize_parameters(manager), manager)
    (first, one), (second, _), (third, other) = ((proxy, proxy.fit(ins)) for proxy, ins in asked)
    strategy.aggregate_fit(1, [(first, one), (second, one), (third, other)], [])
    assert len(strategy.reports[0].heard) == 3
    assert "from a mean alone" not in caplog.text


def test_a_model_that_a_wrapper_has_changed_is_not_left_out_in_silence():
    manager = SimpleClientManager()
    for cid in "123":
        manager.register(Proxy(cid))
    wrapped = DifferentialPrivacyServerSideFixedClipping(legacy("FedAvg"), 1.0, 1.0, 3)
    parameters = wrapped.initialize_parameters(manager)
    results = [(proxy, proxy.fit(ins)) for proxy, ins in wrapped.configure_fit(1, parameters, manager)]
    noisy, _ = wrapped.aggregate_fit(1, results, [])
    with pytest.raises(ArrayError, match=r"model: expected the one that the last round returned, got another.*noise"):
        wrapped.configure_fit(2, noisy, manager)


def test_needs_a_model():
    with pytest.raises(RangeError, match="initial_parameters"):
        LegacyStrategy("MIFA", lr=0.1)


@pytest.mark.parametrize("steps", [STEPS, "batches"])
def test_steps_of_clients_that_do_not_say_them(steps):
    manager = SimpleClientManager()
    for cid in "123":
        manager.register(Proxy(cid))
    strategies = [legacy("MimiC"), legacy("MimiC", steps=steps), legacy("MimiC")]
    for t in range(3):
        for number, strategy in enumerate(strategies):
            results = [(proxy, proxy.fit(ins)) for proxy, ins in strategy.configure_fit(t + 1, None, manager)]
            results.sort(key=lambda pair: pair[0].cid)
            for _, result in results if number else []:
                result.metrics["batches"] = result.metrics.pop("fedcore.steps")
            strategy.aggregate_fit(t + 1, results, [])
    np.testing.assert_array_equal(strategies[1].server.x, strategies[0].server.x)
    for report in strategies[2].reports:
        assert report.heard == ()
        due = "say fedcore.steps among the metrics, or tell the strategy steps= (a number, or a metric's name)"
        assert all(due in reason for _, reason in report.refused)


def test_metrics_that_would_spoil_a_mean_are_left_out_of_it_and_named(caplog):
    def mean(results):
        return {"loss": float(np.mean([metrics["loss"] for _, metrics in results]))}

    parameters, [two, three, four] = ndarrays_to_parameters(MODEL), [Proxy(cid) for cid in "234"]
    strategy = LegacyStrategy(
        "FedAvg",
        lr=0.1,
        initial_parameters=parameters,
        fit_metrics_aggregation_fn=mean,
        evaluate_metrics_aggregation_fn=mean,
    )
    manager = SimpleClientManager()
    for proxy in (two, three, four):
        manager.register(proxy)
    asked = strategy.configure_fit(1, parameters, manager)
    losses = {"2": 1.0, "3": float("nan"), "4": 3.0}
    results = [(proxy, proxy.fit(ins)) for proxy, ins in asked]
    for proxy, result in results:
        result.metrics["loss"] = losses[proxy.cid]
    _, metrics = strategy.aggregate_fit(1, results, [])
    heard = [losses[client] for client in strategy.reports[0].heard if client != "3"]
    assert len(strategy.reports[0].heard) == len(asked)
    assert metrics == {"loss": np.mean(heard)}

    status = Status(Code.OK, "")
    evaluated = [(proxy, EvaluateRes(status, losses[proxy.cid], 5, {"loss": 2.0})) for proxy in (two, three, four)]
    evaluated.append((Proxy("5"), EvaluateRes(status, 1.0, -15, {"loss": 2.0})))
    evaluated.append((Proxy("6"), EvaluateRes(status, 1.0, 5, {"loss": float("inf")})))
    evaluated.append((Proxy("7"), EvaluateRes(status, 1e305, 5, {"loss": 2.0})))
    evaluated.append((Proxy("8"), EvaluateRes(status, 1.0, 5, {"loss": 10**400})))
    loss, metrics = strategy.aggregate_evaluate(1, evaluated, [])
    assert (loss, metrics) == (2.0, {"loss": 2.0})
    line = caplog.records[-1].message
    assert "aggregate_evaluate: of the metrics alone: refused 5 ('3', '5', '6', '7', '8') and heard 2" in line
    assert "4 x metric 'loss': expected finite numbers" in line


@pytest.mark.parametrize("what", ["fit", "evaluate"])
def test_a_claim_of_examples_weighs_up_to_10_medians_in_a_mean_too(what, caplog):
    seen = []
    mean = lambda results: seen.extend(results) or {}  # noqa: E731
    aggregates = {"fit_metrics_aggregation_fn": mean, "evaluate_metrics_aggregation_fn": mean}
    strategy = legacy("FedAvg", server={"max_examples_ratio": 10}, **aggregates)
    manager = SimpleClientManager()
    for cid in "123":
        manager.register(Proxy(cid))
    asked = strategy.configure_fit(1, None, manager)
    results = sorted(((proxy, proxy.fit(ins)) for proxy, ins in asked), key=lambda pair: pair[0].cid)
    results[0][1].num_examples = 10**9
    if what == "fit":
        strategy.aggregate_fit(1, results, [])
    else:
        said = [
            EvaluateRes(Status(Code.OK, ""), float(proxy.cid), result.num_examples, {}) for proxy, result in results
        ]
        loss, _ = strategy.aggregate_evaluate(
            1, [(proxy, res) for (proxy, _), res in zip(results, said, strict=True)], []
        )
        assert loss == pytest.approx((50 * 1 + 5 * 2 + 5 * 3) / 60)
    assert [examples for examples, _ in seen] == [50, 5, 5]
    assert results[0][1].num_examples == 10**9
    assert "max_examples_ratio is 10" in caplog.text


@pytest.mark.parametrize("how", [{"steps": STEPS}, {"server": {"max_steps": STEPS}}])
def test_a_client_says_no_more_steps_than_it_was_asked_for(how):
    manager = SimpleClientManager()
    for cid in "123":
        manager.register(Proxy(cid))
    strategy = legacy("MIFA", **how)
    results = [(proxy, proxy.fit(ins)) for proxy, ins in strategy.configure_fit(1, None, manager)]
    results[0][1].metrics["fedcore.steps"] = STEPS + 1
    strategy.aggregate_fit(1, results, [])
    due = f"steps: expected an integer in 1..{STEPS}, got {STEPS + 1}"
    assert strategy.reports[0].refused == ((results[0][0].cid, due),)
    assert len(strategy.reports[0].heard) == 2


@pytest.mark.parametrize("lie", [{"accuracy": "abc"}, {}, {"accuracy": b"1"}, {"lie": 1.0}])
@pytest.mark.parametrize("liar_first", [False, True])
def test_a_function_that_metrics_make_raise_ends_no_round(lie, liar_first):
    def mean(results):
        return {"accuracy": sum(count * metrics["accuracy"] for count, metrics in results)}

    strategy = LegacyStrategy(
        "FedAvg",
        lr=0.1,
        initial_parameters=ndarrays_to_parameters(MODEL),
        evaluate_metrics_aggregation_fn=mean,
    )
    results = [
        (Proxy(cid), EvaluateRes(Status(Code.OK, ""), 1.0, 5, metrics))
        for cid, metrics in (("2", lie), ("3", {"accuracy": 0.5}))
    ]
    assert strategy.aggregate_evaluate(1, results[:: 1 if liar_first else -1], []) in [
        (None, {}),
        (1.0, {"accuracy": 2.5}),
    ]
