"""Every bound of the gate names an existing benchmark."""

import os
import tomllib
from pathlib import Path

from bench import gate
from tests.kit import python

ROOT = Path(__file__).parent.parent.parent


def test_every_bound_names_a_benchmark_and_a_rival(monkeypatch):
    # In a process, since modules of bench would stay imported. Its environment does not mark it as a worker.
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST")]:
        monkeypatch.delenv(name)
    lines = tomllib.loads(gate.ALLOWED.read_text())["line"]
    files = sorted({line["bench"].partition("::")[0] for line in lines})
    found = python("-m", "pytest", *files, "--collect-only").stdout.splitlines()
    for line in lines:
        assert line["bench"] in found
        assert f'"{line["against"]}"' in (ROOT / line["bench"].split("::")[0]).read_text()
