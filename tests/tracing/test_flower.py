"""A run of Flower's strategy, traced."""

import json

import pytest

pytest.importorskip("flwr")

import fedcore
from tests.adapters.flower.federation import NODES, initial_arrays, make_app, make_data, make_strategy
from tests.adapters.flower.local_grid import LocalGrid
from tests.tracing.rounds import calls
from tests.tracing.test_chrome import assert_is_in_the_format


def test_the_phases_of_a_strategy_s_rounds(tmp_path):
    dataset, parts = make_data()
    grid = LocalGrid({node: (make_app(i, dataset, parts), {}) for i, node in enumerate(NODES)})
    with fedcore.trace() as trace:
        make_strategy("MIFA").start(grid, initial_arrays(), num_rounds=2)
    done = calls(trace)
    assert (done["open"], done["finish"], done["broadcast"]) == (2, 2, 2)
    assert done["add"] == 2 * len(NODES)
    assert done["read"] == 2 * 2 * len(NODES)  # Flower's records, and then what is in them
    assert done["wait"] == 2 * len(NODES)
    assert done["send"] >= 4  # a model and messages
    assert [one[:2] for one in trace.rounds] == [(0, 0), (0, 1)]
    trace.save(tmp_path / "trace.json")
    assert_is_in_the_format(json.loads((tmp_path / "trace.json").read_text()))


def test_what_is_imported_within_a_trace_is_timed(tmp_path):
    """As under FEDCORE_PROFILE, where nothing is imported when it begins."""
    import os
    import subprocess
    import sys

    code = (
        "import sys, fedcore\n"
        "assert 'flwr' not in sys.modules\n"
        "from tests.tracing import test_flower as t\n"
        "dataset, parts = t.make_data()\n"
        "grid = t.LocalGrid({node: (t.make_app(i, dataset, parts), {}) for i, node in enumerate(t.NODES)})\n"
        "t.make_strategy('FedAvg').start(grid, t.initial_arrays(), num_rounds=1)"
    )
    environment = {**os.environ, "FEDCORE_PROFILE": str(tmp_path / "trace.json")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = {line.split("  ")[0]: line.split() for line in done.stderr.splitlines() if line}
    assert rows["wait"][1] == rows["add"][1] == str(len(NODES))
