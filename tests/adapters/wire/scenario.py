"""Four SuperNodes train; one is killed in round 1, one joins after round 2; the ServerApp is killed in round 4.

``python -m tests.adapters.wire.scenario play METHOD ACCUMULATE FOLDER``. The results are in FOLDER/out: rounds.jsonl,
node-ID files with the clients' numbers, and the server's store. ``play_masked`` and ``play_buffered`` are shorter.
"""

import os
import signal
import sys
import time
from pathlib import Path

from tests.adapters.wire.app.fedapp.task import save_data
from tests.adapters.wire.deployment import HERE, Deployment, wait_for

ROUNDS = 6


def folder_with(home, *held):
    out = Path(home) / "out"
    out.mkdir()
    save_data(out)
    for name in held:
        (out / name).touch()
    return out


def play(method, accumulate, home):
    out = folder_with(home, "hold-1-1", "hold-0-4")
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
    out = folder_with(home)
    (out / "hold-1-1").touch()
    config = {"method": method, "accumulate": accumulate, "rounds": 3, "out": str(out)}
    with Deployment(home) as deployment:
        nodes = [deployment.start_node(number) for number in range(4)]
        deployment.start_run("run", HERE / "app", **config)
        wait_for((out / "at-work-1-1").exists, 300, "client 1 at work in round 1")
        deployment.kill(nodes[1])
        wait_for((out / "end").exists, 600, "the end")


def play_buffered(method, accumulate, home):
    """Six rounds of two replies each; client 2 sleeps in its first task until the others have finished three rounds.

    Client 0 sleeps in round 3, so that this round closes with client 2.
    """
    out = folder_with(home, "hold-2-0", "hold-0-3")
    config = {"method": method, "accumulate": accumulate, "rounds": ROUNDS, "buffer": 2, "out": str(out)}
    with Deployment(home) as deployment:
        for number in range(3):
            deployment.start_node(number)
        deployment.start_run("run", HERE / "app", **config)
        for finished, held in ((3, "hold-2-0"), (4, "hold-0-3")):
            wait_for((out / f"finished-{finished}").exists, 300, f"{finished} rounds")
            (out / held).unlink()
        wait_for((out / "end").exists, 300, "the end")


if __name__ == "__main__":
    {scenario.__name__: scenario for scenario in (play, play_masked, play_buffered)}[sys.argv[1]](*sys.argv[2:])
