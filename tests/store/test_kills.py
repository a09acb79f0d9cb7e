"""SIGKILL at any moment leaves the last committed round, from which the next process goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("killed.py")


@pytest.mark.parametrize("durability", ["round", "checkpoint", "none"])
@pytest.mark.parametrize("kills", [70, pytest.param(2000, marks=pytest.mark.endurance)])
def test_killed_at_any_moment(tmp_path, kills, durability):
    run = subprocess.run(
        [sys.executable, PROGRAM, tmp_path, durability, str(kills), "1"],
        cwd=PROGRAM.parents[2],
        env=os.environ | {"PYTHONPATH": str(PROGRAM.parents[2])},
        capture_output=True,
        text=True,
        timeout=400 + 2 * kills,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert sum(result["places"].values()) == kills
    assert len(result["places"]) >= 4  # while rows were written, committed, compacted, saved
    assert result["rounds"] > 0  # and it got on between the kills
    assert result["left"] == ["copy", "store"]
