"""A killed ServerApp resumes after its last finished round, with the method's state, and ends with the same model."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedcore import Server, Storage
from tests.adapters.flower.federation import NODES, initial_arrays, make_grid, make_strategy, run
from tests.adapters.flower.local_grid import LocalGrid

ROUNDS = 6
ROOT = Path(__file__).parents[3]


def drop_out(grid):
    """A before_round whose failing nodes depend only on the round."""

    def before_round(t):
        grid.dead = {NODES[i] for i in range(5) if (i * 7 + t * 3) % 4 == 0}

    return before_round


def straight(method, **options):
    grid = make_grid()
    return run(method, grid, ROUNDS, before_round=drop_out(grid), fraction_train=0.6, **options)


@pytest.mark.parametrize("method", ["MimiC", pytest.param("FlexibleFedAvg", marks=pytest.mark.endurance)])
def test_after_kill_9_in_the_middle_of_a_round(method, tmp_path):
    """The first process kills itself at the third reply of round 3."""
    code = f"""
import os, signal
import torch
from tests.adapters.flower.test_resume import *
torch.set_num_threads(1)  # as in the process that resumes
grid, asked = make_grid(), []
def spoil(node, reply):
    asked.append(node)
    if len(strategy_rounds()) == 3 and len(asked) % 3 == 0:
        os.kill(os.getpid(), signal.SIGKILL)
def strategy_rounds():
    import gc
    from fedcore.adapters.flower import ServerStrategy
    [strategy] = [thing for thing in gc.get_objects() if isinstance(thing, ServerStrategy)]
    return strategy.reports
grid.spoil = spoil
run({method!r}, grid, ROUNDS, before_round=drop_out(grid), fraction_train=0.6, storage="{tmp_path}/state")
"""
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ, timeout=120, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-2000:]
    assert Server.load(tmp_path / "state", storage=Storage(medium="ram")).round_number == 3
    grid = make_grid()
    resumed, result = run(
        method, grid, ROUNDS, before_round=drop_out(grid), fraction_train=0.6, storage=f"{tmp_path}/state"
    )
    expected, _ = straight(method)
    assert [report.round for report in resumed.reports] == [3, 4, 5]
    assert result.train_metrics_clientapp.keys() <= {4, 5, 6}
    np.testing.assert_array_equal(resumed.server.x, expected.server.x)


def test_from_a_saved_copy_and_nothing_left_to_do(tmp_path):
    grid = make_grid()
    first, _ = run("MIFA", grid, 4, before_round=drop_out(grid), fraction_train=0.6)
    first.server.save(tmp_path / "copy")
    grid = make_grid()
    second, result = run(
        "MIFA", grid, ROUNDS, before_round=drop_out(grid), fraction_train=0.6, resume=tmp_path / "copy"
    )
    expected, _ = straight("MIFA")
    np.testing.assert_array_equal(second.server.x, expected.server.x)
    second.server.save(tmp_path / "end")
    third, again = run("MIFA", make_grid(), ROUNDS, resume=tmp_path / "end")
    assert third.reports == []
    for name, array in result.arrays.items():
        assert again.arrays[name].data == array.data


@pytest.mark.parametrize(("ids", "lines"), [([1, 2], 1), ([NODES[0], 2], 0)])
def test_a_warning_if_no_node_is_registered(ids, lines, tmp_path, caplog):
    run("MIFA", make_grid(), 1, storage=tmp_path / "state")[0].server.close()
    apps = [app for app, _ in make_grid().nodes.values()]
    strategy, _ = run("MIFA", LocalGrid({id: (apps[i], {}) for i, id in enumerate(ids)}), 3, storage=tmp_path / "state")
    found = [record.getMessage() for record in caplog.records if "is registered" in record.getMessage()]
    assert len(found) == lines  # in the first round only
    assert all("none of the 2 connected" in line and "keeps 5 clients" in line for line in found)
    assert len(strategy.server.clients) == len({*NODES, *ids})


def test_a_changed_working_directory_changes_no_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    strategy = make_strategy("MIFA", storage="state")
    monkeypatch.chdir("/")
    strategy.start(make_grid(), initial_arrays(), 1)
    strategy.server.save("~/copy")
    strategy.server.close()
    for how in ({"storage": "~/state"}, {"resume": "~/copy"}):
        strategy, _ = run("MIFA", make_grid(), 2, **how)
        assert [report.round for report in strategy.reports] == [1]
        strategy.server.close()
