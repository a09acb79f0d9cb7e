"""Rounds on two Ray nodes of this machine: a node joins in one round, and a node is lost in a later round.

    machines.py MODEL METHOD...

With one method, the new node is lost. With several methods, each loses the node that the previous method added.
"""

import sys
import warnings

import torch

from tests.ray_machines import Machines
from tests.sim.engines.ray.problems import Problem


def main(model, *methods):
    """Print for each method whether its bits are those of one process, and the number of machines."""
    short = len(methods) == 1
    with Machines(num_cpus=int(short)) as machines:
        run(machines, short, model, methods)


def run(machines, short, model, methods):
    import ray

    nodes = [] if short else [machines.add()]
    with Problem(model, clients=6, examples=8, address=machines.address) as problem:
        for method in methods:
            seen, rounds, lost = set(), [1, 2], problem.there.stats.lost

            def change(t, _, seen=seen, rounds=rounds):
                seen.update(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU"))
                if rounds[:1] != [t]:
                    return
                rounds.pop(0)
                if t == 1:
                    nodes.append(machines.add())
                    problem.there.processes()  # Wait for the second worker.
                else:
                    machines.lose(nodes.pop(0))

            same = problem.run(problem.there, method, seen=change) == problem.run(problem.here, method)
            lost = problem.there.stats.lost - lost
            bits = "the same" if same else "other"
            print(f"{method}: {bits} bits, {len(seen)} machines, {lost} worker lost", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(*sys.argv[1:])
