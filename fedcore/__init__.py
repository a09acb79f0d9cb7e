"""fedcore: the server side of federated learning at memory speed."""

from fedcore import algorithms, cluster, errors, kernels, rules, sampling
from fedcore.model import Layout, aggregate
from fedcore.network import Network, NetworkReport, NetworkRound, topology
from fedcore.options import Compute, Limits, Storage
from fedcore.profiling import profile, profile_program
from fedcore.runtime import __version__, build_info, isa, set_threads, threads
from fedcore.server import Broadcast, EdgeAggregator, PartialSum, Report, Round, Server, Update
from fedcore.simulation import participation
from fedcore.store import ClientStore

__all__ = [
    "Broadcast",
    "ClientStore",
    "Compute",
    "EdgeAggregator",
    "Layout",
    "Limits",
    "Network",
    "NetworkReport",
    "NetworkRound",
    "PartialSum",
    "Report",
    "Round",
    "Server",
    "Storage",
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
    "profile",
    "rules",
    "sampling",
    "set_threads",
    "threads",
    "topology",
]

profile_program()
del profile_program
