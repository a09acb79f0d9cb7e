"""A Ray cluster whose machines are processes of this one, on the loopback interface alone."""

import os
from contextlib import suppress

import psutil

STORE_BYTES = 100 << 20
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
"""The environment of programs that connect to them: else Ray takes 127.0.0.1 for the machine's outer address."""


class Machines:
    """A head without cores, to which programs connect, and machines that come and are lost.

    Attributes:
        address: the head's.
    """

    def __init__(self, **head):
        os.environ.update(LOOPBACK)
        import ray._private.ray_constants
        from ray.cluster_utils import Cluster

        ray._private.ray_constants.ENABLE_RAY_CLUSTER = False  # so that they listen on the loopback interface alone
        quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES} | head
        self._cluster = Cluster(initialize_head=True, head_node_args=head | {"_system_config": quick})
        self.address = self._cluster.address

    def add(self, **options):
        """A new machine, with one core."""
        return self._cluster.add_node(**{"num_cpus": 1, "object_store_memory": STORE_BYTES} | options)

    def lose(self, machine):
        """End a machine, as a power cut would: all of its processes at once."""
        family = []
        for entries in machine.all_processes.values():
            for entry in entries:
                with suppress(psutil.NoSuchProcess):
                    own = psutil.Process(entry.process.pid)
                    family += [own, *own.children(recursive=True)]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._cluster.remove_node(machine, allow_graceful=False)

    def close(self):
        """End all machines, the head too."""
        self._cluster.shutdown()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
