"""Sessions, a pool and a server in shards that are used when their Ray is gone: what they say, and who listens then."""

import warnings

import numpy as np

from fedcore import Compute, Server
from fedcore.cluster.on_ray import OnRay
from fedcore.errors import FedcoreError
from fedcore.simulation.executor import Pool, Session, Worker
from tests.simulation.engines.ray.light import light
from tests.simulation.engines.ray.problems import listening

X0 = np.zeros(40_000, np.float32)


def refused(when, uses):
    """Print what each use says."""
    for name, use in uses.items():
        try:
            print(f"{when}: {name}: it returned {use()}")
        except FedcoreError as error:
            how = str(error).removeprefix("connection to Ray: ").partition(":")[0]
            print(f"{when}: {name}: {type(error).__name__}, {how}")
    print("listening:", sorted(listening()), flush=True)


def methods(session, reference):
    return {
        "put": lambda: session.put(1),
        "pickled": lambda: session.pickled(1),
        "start": lambda: session.start(light(), cpus=0),
        "wait": lambda: session.wait([reference], 1),
        "result": lambda: session.result(reference),
        "room": session.room,
        "require_open": session.require_open,
    }


def main():
    """End a Ray as somebody else does, and then one by its sessions."""
    import ray

    session, there = Session(cpus=2, object_store_memory=100 << 20), OnRay(cpus=0)
    reference, pool = session.put(1), Pool(session, light(), 1, cpus=0, gpus=0, arguments=())
    pool.close()
    actor = session.start(light(), cpus=0)
    server = Server(X0, "FedAvg", 2, lr=0.1, compute=Compute(executor=there))
    before = server.broadcast([0])
    ray.shutdown()
    refused(
        "ended by somebody",
        methods(session, reference)
        | {
            "fill": pool.fill,
            "train": lambda: pool.submit(Worker(actor, 0.0), "train", 1),
            "slices": server._backend.slices,
            "x": lambda: server.x,
            "broadcast.x": lambda: before.x,
            "open_round": server.open_round,
            "make": lambda: Server(X0, "FedAvg", 2, lr=0.1, compute=Compute(executor=there)),
        },
    )
    newer = Session(cpus=1, object_store_memory=100 << 20)
    server.close()
    there.close()
    session.close()
    reference = newer.put(7)
    print("the newer session's Ray is there:", newer.result(reference))
    newer.close()
    newer.close()
    newer.kill(actor)
    refused("closed", methods(newer, reference))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
