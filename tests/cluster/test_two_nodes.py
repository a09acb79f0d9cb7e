"""Two machines of Ray's, on this one: kills of everybody, and the tutorial's own lines.

It takes minutes and is left out unless asked for: ``pytest -m deployment tests/cluster``. As root the tutorial runs in
a network namespace that has loopback alone.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from shutil import which
from uuid import uuid4

import psutil
import pytest

pytest.importorskip("ray", reason="needs Ray: pip install 'fedcore-fl[ray]'")
pytestmark = pytest.mark.deployment
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "cluster.md"
LOOPBACK_ALONE = ["unshare", "-n", "bash", "-c", 'ip link set lo up; exec "$@"', "_"]
METHODS = ("MIFA", "MimiC", "SCAFFOLD")
MARK = "FEDCORE_TEST_OF_THE_TUTORIAL"


def run(folder, last, coordinators, machines, *methods):
    """What ``two_nodes.py`` has seen of each method."""
    words = map(str, (folder, 1, last, coordinators, machines))
    result = subprocess.run(
        [sys.executable, "-m", "tests.cluster.two_nodes", *words, *methods],
        stdout=subprocess.PIPE,
        text=True,
        timeout=3600,
        cwd=ROOT,
    )
    assert result.returncode == 0
    return json.loads(result.stdout.splitlines()[-1])


def test_shards_coordinators_and_machines_end(tmp_path):
    """The bits of one server, all shards at one transaction, and no damage, whichever process ends and when."""
    seen = run(tmp_path, 16, 3, 1, *METHODS)
    print(seen)
    assert set(seen) == set(METHODS)
    for method, of in seen.items():
        assert of["coordinators killed"] == 3, method
        assert of["machines lost"] == 1, method
        assert of["shards killed"] >= 2, method
        assert of["compared"] >= 4, method
    assert sum(of["recovered"] for of in seen.values()) >= 6


@pytest.fixture
def ray_command():
    """The environment in which ``ray`` is this Python's, and its processes are known; they are ended."""
    mark = uuid4().hex
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:  # short, for its sockets
        command = Path(folder) / "ray"
        command.write_text(f"#!{sys.executable}\nfrom ray.scripts.scripts import main\nmain()\n")
        command.chmod(0o755)
        yield os.environ | {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "RAY_TMPDIR": f"{folder}/tmp",
            "RAY_USAGE_STATS_ENABLED": "0",
            MARK: mark,
        }
        processes = [one for one in psutil.process_iter() if marked(one, mark)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                for one in [process, *process.children(recursive=True)]:
                    one.kill()
        psutil.wait_procs(processes, timeout=60)


def marked(process, mark):
    with suppress(psutil.Error):
        return process.environ().get(MARK) == mark
    return False


def test_the_tutorial_runs_on_two_machines(tmp_path, ray_command):
    """Its tests: some for the terminal, and some in Python."""
    page = PAGE.read_text()
    lines = re.findall(r"^(ray start .*)$", page, re.MULTILINE)
    first, second, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(lines) == 2
    assert "OnRay" in second
    (tmp_path / "tutorial.py").write_text(first + second)
    words = "\n".join(["set -e", *lines, f"{sys.executable} tutorial.py"])
    alone = LOOPBACK_ALONE if os.geteuid() == 0 and which("unshare") and which("ip") else []
    result = subprocess.run(
        [*alone, "bash", "-c", words], cwd=tmp_path, env=ray_command, stdout=subprocess.PIPE, text=True, timeout=600
    )
    assert result.returncode == 0, result.stdout
    print(result.stdout)
    assert result.stdout.rstrip().endswith("4 []")
