"""A coordinator whose shards are on Ray, and which kills them at random moments; ``two_nodes.py`` kills it itself.

    coordinating.py ADDRESS FOLDER METHOD SEED LAST

Goes on with the server of FOLDER, or makes it, up to so many transactions. It says what it does, a line each, and where
the server is: its transactions, and everything that it knows, as one number.
"""

import json
import os
import random
import signal
import sys
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np

from fedcore import Compute, Server, Storage, cluster
from fedcore.cluster import OnRay
from fedcore.errors import ClusterError
from tests.cluster.killed import N, change, n, noting, remembering, told

CHANCE, LATE = 0.5, 0.02
"""Of a kill while something is changed; and how long after the usual end of that it may come, in seconds."""


def processes(placement):
    """The number of each shard's process; none where a machine is lost just now."""
    import ray

    try:
        return ray.get([actor.__ray_call__.remote(lambda self: os.getpid()) for actor in placement._actors])
    except ray.exceptions.RayError:
        return []


def sliced(opened, client, y, steps):
    """Add an update by references to its slices, as a client's worker would have put them."""
    import ray

    slices = [y[span.start : span.stop] for span in opened._ranges]
    digests = [cluster.digest_of(one) for one in slices]
    opened.add(client, cluster.Slices(list(map(ray.put, slices)), digests), steps=steps)


class Deaths:
    """Kills a shard in some of the changes, at any moment of it; how long one takes is learnt from those before."""

    def __init__(self, placement, seed):
        self._placement, self._random, self._usual = placement, random.Random(seed), 0.1

    def __call__(self, act):
        """Do something during which a process may be killed."""
        timer = None
        if self._random.random() < CHANCE and (there := processes(self._placement)):
            victim = self._random.choice(there)
            timer = threading.Timer(self._random.uniform(0, self._usual + LATE), self._kill, [victim])
            timer.start()
        began = time.monotonic()
        try:
            act()
            self._usual = 0.5 * (self._usual + time.monotonic() - began)
        finally:
            if timer is not None:
                timer.join()

    def _kill(self, victim):
        with suppress(ProcessLookupError):  # it has ended with its machine
            os.kill(victim, signal.SIGKILL)
            say("killed a shard")


def say(what):
    print(what.splitlines()[0], flush=True)


def folders_of(home):
    """The folders of the shards of a cluster of this test's own, which lie elsewhere."""
    return [one["folder"] for one in json.loads((Path(home) / "cluster.json").read_text())["shards"]]


def opened(folder, method, placement):
    """The server of a folder, or a new one if no manifest was written."""
    if (Path(folder) / "cluster.json").exists():
        return Server.load(folder, storage=Storage(folders=folders_of(folder)), compute=Compute(executor=placement))
    home = Path(f"{folder}-{os.getpid()}")  # a coordinator that is killed before leaves a folder that no other uses
    zeros, folders = np.zeros(n, np.float32), [home / "disk0", home / "disk1"]
    return Server(
        zeros,
        remembering(method),
        N,
        lr=0.1,
        storage=Storage(path=folder, folders=folders),
        compute=Compute(shards=2, executor=placement),
    )


def run(server, deaths, last):
    """Change a server so many times; changes that a kill undoes are repeated.

    Raises:
        ClusterError: a shard was lost while all were brought together: it is for the next ``load`` to do.
    """
    say(f"open at {server.transactions} {told(server)}")
    while (before := server.transactions) < last:
        add = [None, sliced][before % 2]
        try:
            deaths(lambda add=add: change(server, add))
        except ClusterError as error:
            say(f"recovered: {str(error)[:200]}")
            assert server.transactions in (before, before + 1)
            say(f"together at {server.transactions} {told(server)}")
        say(f"at {server.transactions}")


def main(address, folder, method, seed, last):
    noting(f"{folder}-notes")
    with OnRay(["disk0", "disk1"], address=address) as there:
        deaths = Deaths(there, seed)
        while True:
            try:
                with opened(folder, method, there) as server:
                    run(server, deaths, last)
                break
            except ClusterError as error:
                say(f"once more: {str(error)[:200]}")
    say("over")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    address, folder, method, seed, last = sys.argv[1:]
    main(address, folder, method, int(seed), int(last))
