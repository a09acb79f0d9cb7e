"""A cluster has the memory of all its shards' machines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("limited.py")


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a process's memory are Linux's")
def test_a_model_larger_than_one_shards_memory_runs_on_two():
    environment = os.environ | {"PYTHONPATH": str(PROGRAM.parents[2])}
    run = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, timeout=300, env=environment)
    assert run.returncode == 0, run.stderr
    in_one, in_two, whole = run.stdout.splitlines()
    assert "the system has no memory for" in in_one
    assert in_two == whole
