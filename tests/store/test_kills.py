"""SIGKILL at any moment leaves the last committed round, from which the next process goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("killed.py")
UNDO_PROGRAM = Path(__file__).with_name("undo_killed.py")
OPTIONS = {
    "cwd": PROGRAM.parents[2],
    "env": os.environ | {"PYTHONPATH": str(PROGRAM.parents[2])},
    "capture_output": True,
    "text": True,
}


@pytest.mark.parametrize(
    ("durability", "undoable"),
    [("round", ()), ("checkpoint", ()), ("none", ()), ("round", ["undoable"]), ("none", ["undoable"])],
    ids=["round", "checkpoint", "none", "round-undoable", "none-undoable"],
)
@pytest.mark.parametrize("kills", [70, pytest.param(2000, marks=pytest.mark.endurance)])
def test_killed_at_any_moment(tmp_path, kills, durability, undoable):
    run = subprocess.run(
        [sys.executable, PROGRAM, tmp_path, durability, str(kills), "1", *undoable],
        timeout=400 + 2 * kills,
        **OPTIONS,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert sum(result["places"].values()) == kills
    assert len(result["places"]) >= 4  # while rows were written, committed, compacted, saved
    assert result["rounds"] > 0  # and it got on between the kills
    assert result["left"] == ["copy", "store"]


@pytest.mark.parametrize(
    ("durability", "stride"),
    [
        ("round", 1),
        ("checkpoint", 4),
        ("none", 4),
        pytest.param("checkpoint", 1, marks=pytest.mark.endurance),
        pytest.param("none", 1, marks=pytest.mark.endurance),
    ],
)
def test_killed_at_every_call_of_what_can_be_undone(tmp_path, durability, stride):
    command = [sys.executable, UNDO_PROGRAM, tmp_path, durability, str(stride)]
    run = subprocess.run(command, timeout=900, **OPTIONS)
    assert run.returncode == 0, run.stderr
    kills = json.loads(run.stdout)
    assert min(kills.values()) > 5 / stride
    assert sum(kills.values()) * stride > 100
