"""Rounds on two Ray nodes of this machine: one more comes, and then the first is gone in the middle of a round."""

import warnings

import torch

from tests.engines.ray.problems import Problem

STORE_BYTES = 100 << 20


def main():
    """Print whether the bits are those of one process, and how many machines took part."""
    import ray._private.ray_constants
    from ray.cluster_utils import Cluster

    ray._private.ray_constants.ENABLE_RAY_CLUSTER = False  # so that they listen on the loopback interface alone
    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES, "_system_config": quick}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    left = [cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)]
    with Problem("lenet", clients=6, examples=8, address=cluster.address) as problem:
        seen = set()

        def change(t, _):
            seen.update(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU"))
            if t == 1 and len(seen) == 1:
                cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
                problem.there.processes()  # the second worker has its place at last
            if t == 2 and left:
                cluster.remove_node(left.pop(), allow_graceful=False)

        got = problem.run(problem.there, "MimiC", rounds=5, seen=change)
        same, lost = got == problem.run(problem.here, "MimiC", rounds=5), problem.there.stats.lost
    cluster.shutdown()
    print("the same bits," if same else "other bits,", len(seen), "machines,", lost, "worker lost")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main()
