"""flower-supernode that polls for work every 0.3 s instead of 3 s, with a heartbeat every 10 s instead of 30 s.

A SuperLink accepts no shorter interval.
"""

import time
from types import SimpleNamespace

import flwr.supercore.heartbeat as heartbeat
import flwr.supernode.fleet_http_connection as connection
import flwr.supernode.start_client_internal as loop
from flwr.supernode.cli import flower_supernode

if __name__ == "__main__":
    loop.time = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, 0.3)), time=time.time)
    heartbeat.HEARTBEAT_DEFAULT_INTERVAL = connection.HEARTBEAT_DEFAULT_INTERVAL = 10
    flower_supernode()
