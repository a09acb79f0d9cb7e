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


LONG = pytest.mark.endurance
WAYS = [("round", 70), ("checkpoint", 70), ("none", 70), ("round", 12, "undoable"), ("none", 12, "undoable")]


@pytest.mark.parametrize(
    ("durability", "kills", "undoable"),
    [(durability, kills, undoable) for durability, kills, *undoable in WAYS]
    + [pytest.param(durability, 2000, undoable, marks=LONG) for durability, _, *undoable in WAYS],
    ids=lambda value: "undoable" if value == ["undoable"] else "" if value == [] else None,
)
def test_killed_at_any_moment(tmp_path, durability, kills, undoable):
    run = subprocess.run(
        [sys.executable, PROGRAM, tmp_path, durability, str(kills), "1", *undoable],
        timeout=400 + 2 * kills,
        **OPTIONS,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert sum(result["places"].values()) == kills
    assert len(result["places"]) >= 4  # while rows were written, committed, compacted, saved
    assert {"c", "s", "p", *("u" for _ in undoable)} <= set(result["places"])  # however busy the machine
    assert result["rounds"] > 0  # and it got on between the kills
    assert result["left"] == ["copy", "store"]


@pytest.mark.parametrize(
    "strides",
    [
        {"round": 12, "checkpoint": 24, "none": 24},
        pytest.param({"round": 1, "checkpoint": 1, "none": 1}, marks=LONG),
    ],
    ids=["some", "every"],
)
def test_killed_at_the_calls_of_what_can_be_undone(folder_in_memory, strides):
    ways = [f"{durability}={stride}" for durability, stride in strides.items()]
    run = subprocess.run([sys.executable, UNDO_PROGRAM, folder_in_memory, *ways], timeout=1800, **OPTIONS)
    assert run.returncode == 0, run.stderr
    kills = json.loads(run.stdout)
    assert len(kills) == 18
    assert min(kills.values()) >= 2  # opening makes one call, before and behind which it is killed
    assert strides["round"] > 1 or sum(kills.values()) > 300
