"""A node that scales its update is refused by name, and the others' result stands; a round says it in one line."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.server.client_manager import SimpleClientManager
from flwr.server.client_proxy import ClientProxy

from fedcore import Server
from fedcore.adapters import flower
from fedcore.adapters.flower.legacy import LegacyStrategy
from fedcore.errors import UnknownNameError
from tests.adapters.flower.federation import METHODS, NODES, make_app, make_data, make_strategy, run
from tests.adapters.flower.federation import simulate as simulated
from tests.adapters.flower.local_grid import LocalGrid

LIAR, ROUNDS = 2, 3
ORDER = sorted(range(5), key=lambda i: NODES[i])


def make_grid(factor=1000):
    """Five nodes, one of which goes ``factor`` times as far as its training took it, but for variances, which it would
    make negative: another lie."""
    dataset, parts = make_data()

    def liar(message, context):
        sent, reply = message.content["arrays"].copy(), honest(message=message, context=context)
        arrays = reply.content["arrays"]
        for name, array in arrays.items():
            if array.dtype == "float32" and not name.endswith("running_var"):
                x = sent[name].numpy()
                arrays[name] = Array(x + np.float32(factor) * (array.numpy() - x))
        return reply

    honest = make_app(LIAR, dataset, parts)
    apps = {NODES[i]: (make_app(i, dataset, parts), {}) for i in range(5)}
    apps[NODES[LIAR]] = (liar, {})
    return LocalGrid(apps), {NODES[i]: len(part) for i, part in enumerate(parts)}


@pytest.mark.parametrize("method", METHODS)
def test_a_node_that_scales_its_update_is_refused_by_name(method):
    grid, sizes = make_grid()
    examples = sizes if method == "FlexibleFedAvg" else None
    strategy, _ = run(method, grid, ROUNDS, client_sizes=examples, max_norm_ratio=30)
    assert strategy.failures == []
    for report in strategy.reports:
        [(node, reason)] = report.refused
        assert node == NODES[LIAR]
        assert "the median of those heard (max_norm_ratio)" in reason
        assert len(report.heard) == 4
    due = simulated(method, METHODS[method], ROUNDS * [[i for i in ORDER if i != LIAR]])
    # Shares of an objective that the liar was to come into, and then did not: the others' rounding differs.
    tolerance = 1e-6 if method == "FlexibleFedAvg" else 0
    np.testing.assert_allclose(strategy.server.x, due.x, rtol=tolerance, atol=tolerance)


def test_a_length_in_numbers():
    grid, _ = make_grid()
    strategy, _ = run("MimiC", grid, 1, max_norm=50.0)
    [(node, reason)] = strategy.reports[0].refused
    assert node == NODES[LIAR]
    assert "of at most 50 (max_norm)" in reason


def test_a_later_run_has_the_limits_of_the_first_or_its_own(tmp_path, caplog):
    store = f"mmap:{tmp_path / 'state'}"
    first, _ = run("MIFA", make_grid()[0], 1, store=store, max_norm_ratio=30)
    first.server.close()
    for how in ({}, {"max_norm_ratio": 30}):
        again, _ = run("MIFA", make_grid()[0], 2 + len(how), store=store, **how)
        assert [[node for node, _ in report.refused] for report in again.reports] == [[NODES[LIAR]]]
        again.server.close()
    changed, _ = run("MIFA", make_grid()[0], 4, store=store, max_norm_ratio=None, lr=0.05)
    assert [report.changed for report in changed.reports] == [{"lr": 0.05, "max_norm_ratio": None}]
    assert changed.reports[0].refused == ()
    assert "changed these options of the saved one: lr=0.05, max_norm_ratio=None" in caplog.text
    with pytest.raises(UnknownNameError, match="max_norm"):
        make_strategy("MIFA", max_nrom=5)


class Proxy(ClientProxy):
    get_properties = get_parameters = evaluate = reconnect = fit = None


Proxy.__abstractmethods__ = frozenset()
MODEL = [np.ones((3, 2), np.float32), np.zeros(2, np.float32)]


@pytest.mark.parametrize(
    "method", ["FedAvg", "FedProx", "MIFA", "MimiC", "SCAFFOLD", "SCAFFOLDM", "FedAvgM", "FedAvgMVR"]
)
def test_a_client_of_the_older_api_that_scales_its_update_is_refused_by_name(method, caplog):
    manager, cids = SimpleClientManager(), "1234"
    for cid in cids:
        manager.register(Proxy(cid))
    strategy = LegacyStrategy(
        method,
        lr=0.1,
        server={"max_norm_ratio": 30},
        initial_parameters=ndarrays_to_parameters(MODEL),
        min_available_clients=4,
        min_fit_clients=4,
    )
    server = Server(method, MODEL, list(cids[1:]), lr=0.1)
    for t in range(ROUNDS):
        results = []
        asked = sorted(strategy.configure_fit(t + 1, None, manager), key=lambda pair: pair[0].cid)
        with server.open_round() as opened:
            for proxy, _ in asked:
                step = np.float32(0.1 * int(proxy.cid) * (1000 if proxy.cid == "1" else 1))
                tensors = [array - step for array in server.tensors()]
                says = FitRes(Status(Code.OK, ""), ndarrays_to_parameters(tensors), 5, {"fedcore.steps": 2})
                results.append((proxy, says))
                if proxy.cid != "1":
                    opened.add(proxy.cid, tensors, steps=2, examples=5)
        strategy.aggregate_fit(t + 1, results, [])
        np.testing.assert_array_equal(strategy.server.x, server.x)
    assert [[client for client, _ in report.refused] for report in strategy.reports] == [["1"]] * ROUNDS
    lines = [record for record in caplog.records if "refused 1 ('1') and heard 3: 1 x update:" in record.message]
    assert [record.levelname for record in lines] == ["WARNING"] * ROUNDS


def test_a_round_that_refused_500_says_it_in_one_line_and_shouts(caplog):
    app = ClientApp()

    @app.train()
    def stock(message, context):
        content = {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 3})}
        return Message(RecordDict(content), reply_to=message)

    strategy = flower.MimiC(lr=0.1, fraction_evaluate=0.0, poll=0.001)
    strategy.start(LocalGrid({node: (app, {}) for node in range(1, 501)}), ArrayRecord([MODEL[0]]), 2)
    assert [len(report.refused) for report in strategy.reports] == [500, 500]
    lines = [record for record in caplog.records if "refused" in record.message and record.name == "flwr"]
    assert [record.levelname for record in lines] == ["ERROR", "ERROR"]
    assert "round 0: refused 500 (1, 2, 3, 4, 5, ...) and HEARD NOBODY: 500 x steps: expected" in lines[0].message
    assert len(lines[0].message) < 500


@pytest.mark.parametrize("how", [{"steps": 4}, {"max_steps": 4}, {"steps": 9, "max_steps": 4}])
def test_a_node_says_no_more_steps_than_it_was_asked_for(how):
    grid, _ = make_grid(factor=1)
    grid.spoil = lambda node, reply: reply.content["fedcore"].update({"steps": 5}) if node == NODES[LIAR] else None
    strategy, _ = run("MIFA", grid, 1, **how)
    assert strategy.reports[0].refused == ((NODES[LIAR], "steps: expected an integer in 1..4, got 5"),)
    assert len(strategy.reports[0].heard) == 4
