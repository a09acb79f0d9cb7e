"""What somebody else's package warns of when torch imports it is nothing that the user of a command can mend."""

import subprocess
import sys

import pytest

WARNS = """
import warnings

warnings.warn("this package is deprecated", FutureWarning, stacklevel=2)
"""
RUN = ["run", "quickstart", "--rounds", "1", "--seeds", "1", "--workers", "1", "--set", "algorithms=['FedAvg']"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the quickstart where torch finds a package that warns, in the command's process and in its worker."""
    (tmp_path / "pynvml.py").write_text(WARNS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)

    def run(*options):
        command = [sys.executable, *options, "-m", "fedcore", *RUN]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stderr

    return run


def test_a_command_does_not_begin_with_somebody_else_s_warning(run):
    assert run() == ""


def test_who_asks_for_warnings_gets_them(run):
    assert run("-W", "default").count("FutureWarning: this package is deprecated") == 2
