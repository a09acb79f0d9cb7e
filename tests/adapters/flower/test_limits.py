"""The log of a round's rejections."""

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from fedcore.adapters import flower
from tests.adapters.flower.local_grid import LocalGrid, trains


def test_a_round_of_500_rejections_is_one_line_of_the_level_error(caplog):
    def stock(message):
        content = {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 3})}
        return Message(RecordDict(content), reply_to=message)

    strategy = flower.MimiC(lr=0.1, fraction_evaluate=0.0, poll=0.001, abort_after=None)
    grid = LocalGrid(dict.fromkeys(range(1, 501), trains(stock)))
    strategy.start(grid, ArrayRecord([np.ones((3, 2), np.float32)]), 2)
    assert [len(report.rejected) for report in strategy.reports] == [500, 500]
    lines = [record for record in caplog.records if "rejected" in record.message and record.name == "flwr"]
    assert [record.levelname for record in lines] == ["ERROR", "ERROR"]
    assert "round 0: rejected 500 (1, 2, 3, 4, 5, ...), accepted 0: 500 x steps: " in lines[0].message
    assert len(lines[0].message) < 500
