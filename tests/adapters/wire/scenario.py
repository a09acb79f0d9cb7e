"""Four SuperNodes train; one is killed in round 1, one joins after round 2; the ServerApp is killed in round 4.

``python -m tests.adapters.wire.scenario METHOD ACCUMULATE FOLDER``. The results are in FOLDER/out: rounds.jsonl,
node-ID files with the clients' numbers, and the server's store. A METHOD "Secure..." runs ``play_masked``.
"""

import os
import signal
import sys
import time
from pathlib import Path

from tests.adapters.wire.app.fedapp.task import save_data
from tests.adapters.wire.deployment import HERE, Deployment, wait_for

ROUNDS = 6


def play(method, accumulate, home):
    out = Path(home) / "out"
    out.mkdir()
    save_data(out)
    for held in ("hold-1-1", "hold-0-4"):
        (out / held).touch()
    began = time.monotonic()

    def log(event):
        print(f"{time.monotonic() - began:6.1f} s  {event}", flush=True)

    config = {"method": method, "accumulate": accumulate, "rounds": ROUNDS, "out": str(out)}
    with Deployment(home) as deployment:
        log("SuperLink is up")
        nodes = [deployment.start_node(number) for number in range(4)]
        deployment.start_run("run1", HERE / "app", **config)
        wait_for((out / "at-work-1-1").exists, 300, "client 1 at work in round 1")
        deployment.kill(nodes[1])
        log("SuperNode 1 was killed at work in round 1")
        wait_for((out / "finished-3").exists, 300, "three rounds")
        deployment.start_node(4)
        log("SuperNode 4 joins")
        wait_for((out / "at-work-0-4").exists, 300, "client 0 at work in round 4")
        os.kill(int((out / "pid").read_text()), signal.SIGKILL)
        log("the ServerApp was killed in round 4")
        (out / "hold-0-4").unlink()
        deployment.start_run("run2", HERE / "app", **config)
        wait_for((out / "end").exists, 300, "the end")
        log("the resumed ServerApp has finished")
    log("everything is down")


def play_masked(method, accumulate, home):
    """Three rounds of four SuperNodes under masks; one is killed in round 1, after it has sent its shares."""
    out = Path(home) / "out"
    out.mkdir()
    save_data(out)
    (out / "hold-1-1").touch()
    config = {"method": method, "accumulate": accumulate, "rounds": 3, "out": str(out)}
    with Deployment(home) as deployment:
        nodes = [deployment.start_node(number) for number in range(4)]
        deployment.start_run("run", HERE / "app", **config)
        wait_for((out / "at-work-1-1").exists, 300, "client 1 at work in round 1")
        deployment.kill(nodes[1])
        wait_for((out / "end").exists, 600, "the end")


if __name__ == "__main__":
    (play_masked if sys.argv[1].startswith("Secure") else play)(*sys.argv[1:])
