"""Memory and store after random signals, and without memory or descriptors."""

import subprocess
import sys
from pathlib import Path

import pytest

LONG = pytest.mark.endurance


@pytest.mark.parametrize(
    ("signals", "starvations"),
    [(24, 0), (0, 8), pytest.param(3000, 0, marks=LONG), pytest.param(0, 2000, marks=LONG)],
)
def test_memory_and_store_agree_after_random_interruptions(signals, starvations):
    """In a separate process, for its limits of memory and descriptors."""
    command = [sys.executable, "-m", "tests.server.storms", str(signals), str(starvations)]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("memory and store differ in 0\n") == 2, ended.stdout
    assert "open it again" not in ended.stdout or starvations
