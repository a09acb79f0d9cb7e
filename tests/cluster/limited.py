"""A model that is larger than one shard's memory may be, and not than two shards' together.

Run as a program, because it forks. It has a round of MIFA in one process, in two, each of which may take LIMIT bytes
more than it begins with, and without a limit; and prints a digest of each model, or what went wrong.
"""

import hashlib
import re
import resource
from pathlib import Path

import numpy as np

from fedcore import Compute, Server, set_threads
from fedcore.cluster.placement import ShardLostError
from tests.cluster.processes import Processes

CLIENTS, n = 4, 2**22
ZEROS = np.zeros(n, np.float32)
LIMIT = 2**20 * 250
"""A server of MIFA takes 44 n bytes, 185 MB, and 4 n for each of its rows, 67 MB, in addition to the updates."""


def limit():
    """Let this process take no more than LIMIT bytes from now on."""
    taken = int(re.search(r"VmData:\s+([0-9]+) kB", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (taken + LIMIT, taken + LIMIT))


def digest(server):
    """A round of a server, and its model as one number."""
    with server.open_round() as opened:
        for client in range(CLIENTS):
            opened.add(client, np.random.default_rng(client).normal(size=n).astype(np.float32), steps=1 + client)
    assert not opened.report.rejected, opened.report
    return hashlib.sha256(server.x.tobytes()).hexdigest()


def in_shards(shards):
    """The model after a round in so many processes with limited memory, or the error."""
    compute = Compute(batch_size=1, shards=shards, executor=Processes(begin=limit))
    try:
        with Server(ZEROS, "MIFA", CLIENTS, lr=0.1, compute=compute) as server:
            return digest(server)
    except (MemoryError, ShardLostError) as error:  # a process that runs out of it while it receives is lost
        return repr(error)


if __name__ == "__main__":
    set_threads(1)
    print(in_shards(1), in_shards(2), digest(Server(ZEROS, "MIFA", CLIENTS, lr=0.1)), sep="\n")
