"""Use sessions, a pool and a server in shards after their Ray has ended; print their errors and open ports."""

import warnings

import numpy as np

from fedcore import Compute, Server
from fedcore.cluster.on_ray import OnRay
from fedcore.cluster.workers import Pool, Session, Worker
from fedcore.errors import FedcoreError
from tests.sim.engines.ray.light import light
from tests.sim.engines.ray.problems import listening

X0 = np.zeros(40_000, np.float32)


def print_errors(when, uses):
    for name, use in uses.items():
        try:
            print(f"{when}: {name}: it returned {use()}")
        except FedcoreError as error:
            how = str(error).removeprefix("connection to Ray: ").partition(";")[0]
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
    """End a Ray by ``ray.shutdown()``, and then another by its sessions."""
    import ray

    session, placement = Session(cpus=2, object_store_memory=100 << 20), OnRay(cpus=0)
    reference, pool = session.put(1), Pool(session, light(), 1, cpus=0, gpus=0, arguments=())
    pool.close()
    actor = session.start(light(), cpus=0)
    server = Server(X0, "FedAvg", 2, lr=0.1, compute=Compute(executor=placement))
    before = server.broadcast([0])
    ray.shutdown()
    print_errors(
        "shut down",
        methods(session, reference)
        | {
            "fill": pool.fill,
            "train": lambda: pool.submit(Worker(actor, 0.0), "train", 1),
            "broadcast": lambda: server.broadcast([0]),
            "x": lambda: server.x,
            "broadcast.x": lambda: before.x,
            "open_round": server.open_round,
            "make": lambda: Server(X0, "FedAvg", 2, lr=0.1, compute=Compute(executor=placement)),
        },
    )
    newer = Session(cpus=1, object_store_memory=100 << 20)
    server.close()
    placement.close()
    session.close()
    reference = newer.put(7)
    print("the newer session works:", newer.result(reference))
    newer.close()
    newer.close()
    newer.kill(actor)
    print_errors("closed", methods(newer, reference))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
