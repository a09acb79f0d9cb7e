"""The app in examples/flower under a real SuperLink and SuperNodes, started by ``flwr run``; a second run resumes."""

import subprocess
import sys
from pathlib import Path

import pytest

from fedcore import Server, Storage
from tests.adapters.wire.deployment import LOOPBACK, Deployment, wait_for

pytestmark = pytest.mark.deployment
ROOT = Path(__file__).parents[3]
NODES = 2


def play(home):
    state = Path(home) / "state"
    with Deployment(home) as deployment:
        for number in range(NODES):
            deployment.start_node(number)
        for rounds in (1, 2):
            run = deployment.start_run(
                f"run{rounds}", ROOT / "examples" / "flower", rounds=rounds, nodes=NODES, state=str(state)
            )
            wait_for(lambda run=run: run.poll() is not None, 300, f"the run of {rounds} rounds")


def test_flwr_run(tmp_path):
    command = [*LOOPBACK, sys.executable, "-m", "tests.adapters.wire.test_example", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=900)
    logs = [(tmp_path / f"run{rounds}.log").read_text() for rounds in (1, 2)]
    for log in logs:
        assert f"Received {NODES} results and 0 failures" in log
        assert "rejected ()" in log
        assert "'accuracy': 0." in log
    assert "Resuming after round 1" in logs[1]
    server = Server.load(tmp_path / "state", storage=Storage(medium="ram"))
    assert server.round_number == 2
    assert len(server.clients) == NODES


if __name__ == "__main__":
    play(sys.argv[1])
