"""Rounds on two Ray nodes of this machine: a node comes in a round, and in a later one a node is gone.

    machines.py MODEL METHOD...

With one method the node that came is the one that goes. With several each finds the node that the one before has left,
and it is the older one that goes.
"""

import sys
import warnings

import torch

from tests.ray_machines import Machines
from tests.simulation.engines.ray.problems import Problem


def main(model, *methods):
    """Print for each method whether the bits are those of one process, and how many machines took part."""
    short = len(methods) == 1
    with Machines(num_cpus=int(short)) as machines:
        run(machines, short, model, methods)


def run(machines, short, model, methods):
    import ray

    nodes = [] if short else [machines.add()]
    with Problem(model, clients=6, examples=8, address=machines.address) as problem:
        for method in methods:
            seen, due, lost = set(), [1, 2], problem.there.stats.lost

            def change(t, _, seen=seen, due=due):
                seen.update(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU"))
                if due[:1] != [t]:
                    return
                due.pop(0)
                if t == 1:
                    nodes.append(machines.add())
                    problem.there.processes()  # the second worker has its place at last
                else:
                    machines.lose(nodes.pop(0))

            same = problem.run(problem.there, method, seen=change) == problem.run(problem.here, method)
            gone = problem.there.stats.lost - lost
            print(
                f"{method}: {'the same' if same else 'other'} bits, {len(seen)} machines, {gone} worker lost",
                flush=True,
            )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(*sys.argv[1:])
