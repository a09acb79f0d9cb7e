"""Workers and shards on two Ray nodes of this machine; a worker's node is lost while its slices are not folded yet.

It prints the server's error, and whether the repeated rounds have the bits of one process.
"""

import tempfile
import warnings

import torch
from torch import nn

from fedcore import Compute, Server
from fedcore.cluster.on_ray import OnRay
from fedcore.errors import ClusterError
from tests.ray_machines import Machines
from tests.sim.engines.ray.problems import Problem


def wide():
    """A model whose slices are too long for Ray's messages."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 1200), nn.ReLU(), nn.Linear(1200, 10))


def main():
    with Machines(num_cpus=1, resources={"disk": 1}) as machines:
        far = machines.add()
        with (
            Problem("mlp", clients=6, examples=8, module=wide, together=False, address=machines.address) as problem,
            OnRay(["disk", "disk"], cpus=0, address=machines.address) as shards,
        ):
            assert len(set(problem.there.processes())) == 2
            run(problem, shards, lambda: machines.lose(far))


def run(problem, shards, lose):
    def losing(updates):
        for update in updates:
            if update.client == 5:
                lose()  # The slices of earlier clients are not folded yet.
            yield update

    with tempfile.TemporaryDirectory() as folder:
        compute = Compute(shards=2, executor=shards, batch_size=6)
        server = Server(wide(), "SCAFFOLD", clients=6, lr=0.1, storage=f"{folder}/run", compute=compute)
        server.round(problem.there.updates(server.broadcast(range(6))))
        try:
            server.round(losing(problem.there.updates(server.broadcast(range(6)))))
        except ClusterError as error:
            print(f"round {server.round_number}: {str(error).splitlines()[0]}", flush=True)
        server.round(problem.there.updates(server.broadcast(range(6))))
        x = server.x.tobytes()
        server.close()
    with Server(wide(), "SCAFFOLD", clients=6, lr=0.1) as one:
        for _ in range(2):
            one.round(problem.here.updates(one.broadcast(range(6))))
        print("the same" if x == one.x.tobytes() else "other", "bits", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main()
