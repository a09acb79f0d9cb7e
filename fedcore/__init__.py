"""fedcore: the server side of federated learning at memory speed."""

from fedcore import algorithms, cluster, errors, kernels, participation, sampling, topology
from fedcore.averaging import aggregate
from fedcore.frames import read_records
from fedcore.layout import Layout
from fedcore.network import Network, NetworkReport, NetworkRound
from fedcore.runtime import __version__, build_info, isa, set_threads, threads
from fedcore.server import Broadcast, Edge, Partial, Round, RoundReport, Server, Update
from fedcore.store import ClientStore
from fedcore.tracing import profile, trace

__all__ = [
    "Broadcast",
    "ClientStore",
    "Edge",
    "Layout",
    "Network",
    "NetworkReport",
    "NetworkRound",
    "Partial",
    "Round",
    "RoundReport",
    "Server",
    "Update",
    "__version__",
    "aggregate",
    "algorithms",
    "build_info",
    "cluster",
    "errors",
    "isa",
    "kernels",
    "participation",
    "read_records",
    "sampling",
    "set_threads",
    "threads",
    "topology",
    "trace",
]

profile()
del profile
