"""Every bound of the gate names an existing benchmark."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from bench import gate

ROOT = Path(__file__).parent.parent.parent
ALLOWED = gate.ALLOWED.read_text()


def test_every_bound_names_a_benchmark_and_a_rival():
    # In a process, since modules of bench would stay imported. Its environment does not mark it as a worker.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "bench", "--collect-only"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for line in tomllib.loads(ALLOWED)["line"]:
        assert line["bench"] in found
        assert f'"{line["against"]}"' in (ROOT / line["bench"].split("::")[0]).read_text()
