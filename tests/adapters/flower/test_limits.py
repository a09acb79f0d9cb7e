"""A node that scales its update is refused by name, and the others' result stands; a round says it in one line."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedcore import Limits
from fedcore.adapters import flower
from fedcore.errors import UnknownNameError
from fedcore.rules import RejectLong
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
    strategy, _ = run(method, grid, ROUNDS, client_sizes=examples, aggregation=[RejectLong(30)])
    assert strategy.failures == []
    for report in strategy.reports:
        [(node, reason)] = report.rejected
        assert node == NODES[LIAR]
        assert "(RejectLong)" in reason
        assert len(report.accepted) == 4
    due = simulated(method, METHODS[method], ROUNDS * [[i for i in ORDER if i != LIAR]])
    # Shares of an objective that the liar was to come into, and then did not: the others' rounding differs.
    tolerance = 1e-6 if method == "FlexibleFedAvg" else 0
    np.testing.assert_allclose(strategy.server.x, due.x, rtol=tolerance, atol=tolerance)


def test_a_length_in_numbers():
    grid, _ = make_grid()
    strategy, _ = run("MimiC", grid, 1, limits=Limits(max_norm=50.0))
    [(node, reason)] = strategy.reports[0].rejected
    assert node == NODES[LIAR]
    assert "max_norm" in reason


def test_a_later_run_has_the_limits_of_the_first_or_its_own(tmp_path, caplog):
    storage = tmp_path / "state"
    first, _ = run("MIFA", make_grid()[0], 1, storage=storage, aggregation=[RejectLong(30)])
    first.server.close()
    for how in ({}, {"aggregation": [RejectLong(30)]}):
        again, _ = run("MIFA", make_grid()[0], 2 + len(how), storage=storage, **how)
        assert [[node for node, _ in report.rejected] for report in again.reports] == [[NODES[LIAR]]]
        again.server.close()
    changed, _ = run("MIFA", make_grid()[0], 4, storage=storage, aggregation="mean", lr=0.05)
    assert [report.changed for report in changed.reports] == [{"lr": 0.05, "aggregation": ["Mean(weights=None)"]}]
    assert changed.reports[0].rejected == ()
    assert "lr=0.05, aggregation=" in caplog.text
    with pytest.raises(UnknownNameError, match="'limits'"):
        make_strategy("MIFA", limtis=None)


def test_a_round_that_refused_500_says_it_in_one_line_and_shouts(caplog):
    app = ClientApp()

    @app.train()
    def stock(message, context):
        content = {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 3})}
        return Message(RecordDict(content), reply_to=message)

    strategy = flower.MimiC(lr=0.1, fraction_evaluate=0.0, poll=0.001)
    strategy.start(
        LocalGrid({node: (app, {}) for node in range(1, 501)}), ArrayRecord([np.ones((3, 2), np.float32)]), 2
    )
    assert [len(report.rejected) for report in strategy.reports] == [500, 500]
    lines = [record for record in caplog.records if "refused" in record.message and record.name == "flwr"]
    assert [record.levelname for record in lines] == ["ERROR", "ERROR"]
    assert "round 0: refused 500 (1, 2, 3, 4, 5, ...) and HEARD NOBODY: 500 x steps: expected" in lines[0].message
    assert len(lines[0].message) < 500


@pytest.mark.parametrize(
    "how", [{"steps": 4}, {"limits": Limits(max_steps=4)}, {"steps": 9, "limits": Limits(max_steps=4)}]
)
def test_a_node_says_no_more_steps_than_it_was_asked_for(how):
    grid, _ = make_grid(factor=1)
    grid.spoil = lambda node, reply: reply.content["fedcore"].update({"steps": 5}) if node == NODES[LIAR] else None
    strategy, _ = run("MIFA", grid, 1, **how)
    assert strategy.reports[0].rejected == ((NODES[LIAR], "steps: expected an integer in 1..4, got 5"),)
    assert len(strategy.reports[0].accepted) == 4
