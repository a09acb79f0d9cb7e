"""Commands and experiments hide warnings of packages that torch imports."""

import subprocess
import sys

import pytest

from tests.cli.command import SMALL

WARNS = """
import warnings

warnings.warn("this package is deprecated", FutureWarning, stacklevel=2)
"""
RUN = ["run", "quickstart", *SMALL, "--workers", "1"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs Python with a package that warns."""
    (tmp_path / "pynvml.py").write_text(WARNS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)

    def run(*options):
        done = subprocess.run([sys.executable, *options], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stderr

    return run


def test_warnings_are_hidden(run):
    assert run("-m", "fedcore", *RUN) == ""


@pytest.mark.endurance
def test_warnings_on_request(run):
    assert run("-W", "default", "-m", "fedcore", *RUN).count("FutureWarning: this package is deprecated") == 2


@pytest.mark.parametrize(("options", "shown"), [([], False), (["-W", "default"], True)], ids=["hidden", "on request"])
def test_warnings_of_a_program(run, options, shown):
    program = "import warnings; from fedcore.sim.experiment.schema import Model; Model.registry()"
    program += "; warnings.warn('own', FutureWarning)"
    errors = run(*options, "-c", program)
    assert "own" in errors
    assert ("deprecated" in errors) == shown
