"""Memory and store under storms of signals and of starvation; FEDCORE_STORMS=1 for 3,000 and 2,000 of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LONG = "FEDCORE_STORMS" in os.environ


@pytest.mark.parametrize(("signals", "starvations"), [(3000, 0), (0, 2000)] if LONG else [(60, 0), (0, 20)])
def test_no_server_s_memory_and_store_differ(signals, starvations):
    """In a process of its own, whose limits on memory and descriptors are nobody else's."""
    command = [sys.executable, "-m", "tests.server.storms", str(signals), str(starvations)]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("memory and store differ in 0\n") == 2, ended.stdout
    assert "open it again" not in ended.stdout or starvations
