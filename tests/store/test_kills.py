"""SIGKILL at any moment leaves the last committed round, from which the next process goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = int(os.environ.get("FEDCORE_KILLS", "200"))
"""How many in all; set it higher for a longer test."""

PROGRAM = Path(__file__).with_name("killed.py")


@pytest.mark.parametrize(("durability", "share"), [("round", 0.4), ("checkpoint", 0.3), ("none", 0.3)])
def test_killed_at_any_moment(tmp_path, durability, share):
    run = subprocess.run(
        [sys.executable, PROGRAM, tmp_path, durability, str(round(KILLS * share)), "1"],
        cwd=PROGRAM.parents[2],
        env=os.environ | {"PYTHONPATH": str(PROGRAM.parents[2])},
        capture_output=True,
        text=True,
        timeout=2 * KILLS,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert sum(result["places"].values()) == round(KILLS * share)
    assert len(result["places"]) >= 4  # while rows were written, committed, compacted, saved
    assert result["rounds"] > 0  # and it got on between the kills
    assert result["left"] == ["copy", "store"]
