"""Commands hide warnings of packages that torch imports."""

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
    """Runs the quickstart with a package that warns in the command's process and in its worker."""
    (tmp_path / "pynvml.py").write_text(WARNS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)

    def run(*options):
        command = [sys.executable, *options, "-m", "fedcore", *RUN]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stderr

    return run


def test_warnings_are_hidden(run):
    assert run() == ""


def test_warnings_on_request(run):
    assert run("-W", "default").count("FutureWarning: this package is deprecated") == 2
