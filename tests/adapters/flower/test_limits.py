"""Rules and limits over several runs, and the log of a round's rejections."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedcore.adapters import flower
from fedcore.errors import UnknownNameError
from fedcore.rules import RejectLong
from tests.adapters.flower.federation import NODES, make_app, make_data, make_strategy, run
from tests.adapters.flower.local_grid import LocalGrid

LIAR = 2


def make_grid(factor=1000):
    """Five nodes, one of which steps ``factor`` times as far as its training, except for variances."""
    dataset, parts = make_data()
    honest = make_app(LIAR, dataset, parts)

    def liar(message, context):
        sent, reply = message.content["arrays"].copy(), honest(message=message, context=context)
        arrays = reply.content["arrays"]
        for name, array in arrays.items():
            if array.dtype == "float32" and not name.endswith("running_var"):
                x = sent[name].numpy()
                arrays[name] = Array(x + np.float32(factor) * (array.numpy() - x))
        return reply

    return LocalGrid({NODES[i]: (liar if i == LIAR else make_app(i, dataset, parts), {}) for i in range(5)})


def test_a_later_run_has_the_rules_of_the_first_or_its_own(tmp_path, caplog):
    storage = tmp_path / "state"
    first, _ = run("MIFA", make_grid(), 1, storage=storage, aggregation=[RejectLong(30)])
    first.server.close()
    for how in ({}, {"aggregation": [RejectLong(30)]}):
        again, _ = run("MIFA", make_grid(), 2 + len(how), storage=storage, **how)
        assert [[node for node, _ in report.rejected] for report in again.reports] == [[NODES[LIAR]]]
        again.server.close()
    changed, _ = run("MIFA", make_grid(), 4, storage=storage, aggregation="mean", lr=0.05)
    assert [report.changed for report in changed.reports] == [{"lr": 0.05, "aggregation": ["Mean(weights=None)"]}]
    assert changed.reports[0].rejected == ()
    assert "lr=0.05, aggregation=" in caplog.text
    with pytest.raises(UnknownNameError, match="'limits'"):
        make_strategy("MIFA", limtis=None)


def test_a_round_of_500_rejections_is_one_line_of_the_level_error(caplog):
    app = ClientApp()

    @app.train()
    def stock(message, context):
        content = {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 3})}
        return Message(RecordDict(content), reply_to=message)

    strategy = flower.MimiC(lr=0.1, fraction_evaluate=0.0, poll=0.001, abort_after=None)
    strategy.start(
        LocalGrid({node: (app, {}) for node in range(1, 501)}), ArrayRecord([np.ones((3, 2), np.float32)]), 2
    )
    assert [len(report.rejected) for report in strategy.reports] == [500, 500]
    lines = [record for record in caplog.records if "rejected" in record.message and record.name == "flwr"]
    assert [record.levelname for record in lines] == ["ERROR", "ERROR"]
    assert "round 0: rejected 500 (1, 2, 3, 4, 5, ...), accepted 0: 500 x steps: " in lines[0].message
    assert len(lines[0].message) < 500
