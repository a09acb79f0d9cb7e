"""fedcore: the server side of federated learning at memory-bandwidth speed."""

from fedcore import algorithms, cluster, errors, kernels, rules, sampling
from fedcore.model import Layout, Model, Safetensors, aggregate, read_model, write_model
from fedcore.model.merging import merge
from fedcore.options import Compute, Limits, RoundPolicy, Storage
from fedcore.profiling import profile, profile_program
from fedcore.runtime import __version__, build_info, isa, set_threads, threads
from fedcore.server import Broadcast, EdgeAggregator, PartialSum, Reply, Report, Round, Server, Update
from fedcore.server.compatibility import combines
from fedcore.sim import participation
from fedcore.sim.network import Network, NetworkReport, NetworkRound, topology
from fedcore.store import ClientStore

__all__ = [
    "Broadcast",
    "ClientStore",
    "Compute",
    "EdgeAggregator",
    "Layout",
    "Limits",
    "Model",
    "Network",
    "NetworkReport",
    "NetworkRound",
    "PartialSum",
    "Reply",
    "Report",
    "Round",
    "RoundPolicy",
    "Safetensors",
    "Server",
    "Storage",
    "Update",
    "__version__",
    "aggregate",
    "algorithms",
    "build_info",
    "cluster",
    "combines",
    "errors",
    "isa",
    "kernels",
    "merge",
    "participation",
    "profile",
    "read_model",
    "rules",
    "sampling",
    "set_threads",
    "threads",
    "topology",
    "write_model",
]

profile_program()
del profile_program
