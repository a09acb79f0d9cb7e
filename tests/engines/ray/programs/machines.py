"""Rounds on two Ray nodes of this machine: a node comes in a round, and in a later one a node is gone.

    machines.py MODEL METHOD...

With one method the node that came is the one that goes. With several each finds the node that the one before has left,
and it is the older one that goes.
"""

import sys
import warnings

import torch

from tests.engines.ray.problems import Problem

STORE_BYTES = 100 << 20


def main(model, *methods):
    """Print for each method whether the bits are those of one process, and how many machines took part."""
    import ray._private.ray_constants
    from ray.cluster_utils import Cluster

    ray._private.ray_constants.ENABLE_RAY_CLUSTER = False  # so that they listen on the loopback interface alone
    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
    head = {"include_dashboard": False, "object_store_memory": STORE_BYTES, "_system_config": quick}
    short = len(methods) == 1
    cluster = Cluster(initialize_head=True, head_node_args=head | {"num_cpus": int(short)})

    def one_more():
        return cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)

    nodes = [] if short else [one_more()]
    with Problem(model, clients=6, examples=8, address=cluster.address) as problem:
        for method in methods:
            seen, due, lost = set(), [1, 2], problem.there.stats.lost

            def change(t, _, seen=seen, due=due):
                seen.update(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU"))
                if due[:1] != [t]:
                    return
                due.pop(0)
                if t == 1:
                    nodes.append(one_more())
                    problem.there.processes()  # the second worker has its place at last
                else:
                    cluster.remove_node(nodes.pop(0), allow_graceful=False)

            same = problem.run(problem.there, method, seen=change) == problem.run(problem.here, method)
            gone = problem.there.stats.lost - lost
            print(
                f"{method}: {'the same' if same else 'other'} bits, {len(seen)} machines, {gone} worker lost",
                flush=True,
            )
    cluster.shutdown()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(*sys.argv[1:])
