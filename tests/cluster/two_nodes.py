"""Shards on two Ray machines of this one, while shards, coordinators and machines end at random moments.

    two_nodes.py FOLDER SEED LAST COORDINATORS MACHINES METHOD...

Run as a program, because it begins machines. For each method it begins coordinators (``coordinating.py``), one after
another, up to the transaction LAST; so many of them are killed, and so many times a machine is lost and comes back,
with its disk. Wherever a coordinator has found its shards together, they are compared with a run that nobody kills.
It prints, as JSON, what has happened.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from pathlib import Path

from fedcore import Server, Storage, set_threads
from tests.cluster.coordinating import folders_of
from tests.cluster.killed import Straight, told
from tests.ray_machines import LOOPBACK, Machines

HEARD = {"killed": "shards killed", "recovered:": "recovered", "once": "loaded once more"}
ROOT = Path(__file__).parents[2]
AWAY = 1.0
"""Seconds at most that a machine is away; Ray takes 1.5 to notice, by ``Machines``."""


class Disks:
    """Two machines, each of which has a disk; one may be lost, and come back."""

    def __init__(self, machines):
        self._machines = machines
        self._there = [self._begun(k) for k in range(2)]

    def lose(self, k, seconds):
        """Lose a machine, and have it back after so long."""
        self._machines.lose(self._there[k])
        time.sleep(seconds)
        self._there[k] = self._begun(k)

    def _begun(self, k):
        return self._machines.add(resources={f"disk{k}": 1})


def coordinator(*words):
    command = [sys.executable, "-m", "tests.cluster.coordinating", *map(str, words)]
    environment = os.environ | LOOPBACK | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)


class Run:
    """A method's run, over its coordinators' lives.

    Args:
        coordinators, machines: how many are to die.
    """

    def __init__(self, folder, method, chance, last, coordinators, machines):
        self._folder, self._method, self._chance, self._last = folder, method, chance, last
        self._coordinators, self._straight = coordinators, Straight(method)
        # each at a different transaction, so that work remains after it
        self._machines = sorted(chance.sample(range(1, last - 1), machines))
        self._at, self.seen = 0, Counter()

    def live(self, address, disks):
        """One coordinator's life; whether it has come to the end."""
        due = self.seen["coordinators killed"] < self._coordinators
        kill_at = self._at + self._chance.randrange(3) if due else None
        seed, timer, over = self._chance.randrange(2**31), None, False
        self.seen["coordinators"] += 1
        running = coordinator(address, self._folder, self._method, seed, self._last)
        try:
            for line in running.stdout:
                print(line, end="", file=sys.stderr, flush=True)
                word, *rest = line.split()
                self._hear(word, rest)
                over |= word == "over"
                if word not in ("open", "at"):
                    continue
                if kill_at is not None and self._at >= kill_at and timer is None:
                    timer = threading.Timer(self._chance.uniform(0, 0.2), running.send_signal, [signal.SIGKILL])
                    timer.start()
                if self._machines and self._at >= self._machines[0]:
                    self._machines.pop(0)
                    self.seen["machines lost"] += 1
                    time.sleep(self._chance.uniform(0, 0.1))
                    disks.lose(self._chance.randrange(2), self._chance.uniform(0, AWAY))
            if timer is not None:
                timer.join()
            status = running.wait()
        finally:
            running.kill()
        self.seen["coordinators killed"] += status == -signal.SIGKILL
        assert over or status == -signal.SIGKILL, status
        return over

    def _hear(self, word, rest):
        """Note and compare the output of a coordinator."""
        if word in ("open", "together"):
            self._at = int(rest[1])
            assert rest[2] == self._straight.after(self._at), (word, rest)
            self.seen["compared"] += 1
        elif word == "at":
            self._at = int(rest[0])
        elif word in HEARD:
            self.seen[HEARD[word]] += 1

    def end(self):
        """Check the content of the disks."""
        with Server.load(self._folder, storage=Storage(folders=folders_of(self._folder))) as server:
            assert server.verify() == []
            assert server.transactions == self._last
            assert told(server) == self._straight.after(self._last)
        notes = Path(f"{self._folder}-notes").read_text().splitlines()
        self.seen["taken back"] = sum("rolling back" in line for line in notes)
        return dict(self.seen)


def main(folder, seed, last, coordinators, machines, *methods):
    set_threads(1)
    with Machines() as there:
        disks, found = Disks(there), {}
        for method in methods:
            run = Run(f"{folder}/{method}", method, random.Random(f"{method} {seed}"), last, coordinators, machines)
            while not run.live(there.address, disks):
                pass
            found[method] = run.end()
    print(json.dumps(found))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    folder, seed, last, coordinators, machines, *methods = sys.argv[1:]
    main(folder, seed, int(last), int(coordinators), int(machines), *methods)
