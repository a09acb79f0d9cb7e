"""fedcore: the server side of federated learning at memory-bandwidth speed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedcore import algorithms, errors, kernels, rules, sampling
from fedcore.model import Layout, Model, Safetensors, aggregate, read_model, write_model
from fedcore.options import Compute, Limits, RoundPolicy, Storage
from fedcore.profiling import profile, profile_program
from fedcore.runtime import __version__, build_info, isa, set_threads, threads
from fedcore.server import Broadcast, EdgeAggregator, PartialSum, Reply, Report, Round, Server, Update
from fedcore.server.compatibility import combines
from fedcore.store import ClientStore

if TYPE_CHECKING:
    from fedcore import cluster
    from fedcore.model.merging import merge
    from fedcore.sim import participation
    from fedcore.sim.network import Network, NetworkReport, NetworkRound, topology
    from fedcore.totals import Totals

__all__ = ["Broadcast", "ClientStore", "Compute", "EdgeAggregator", "Layout", "Limits", "Model", "Network"]
__all__ += ["NetworkReport", "NetworkRound", "PartialSum", "Reply", "Report", "Round", "RoundPolicy", "Safetensors"]
__all__ += ["Server", "Storage", "Totals", "Update", "__version__", "aggregate", "algorithms", "build_info", "cluster"]
__all__ += ["combines", "errors", "isa", "kernels", "merge", "participation", "profile", "read_model", "rules"]
__all__ += ["sampling", "set_threads", "threads", "topology", "write_model"]

_LATER = dict.fromkeys(("Network", "NetworkReport", "NetworkRound"), "fedcore.sim.network") | {
    "Totals": "fedcore.totals",
    "cluster": "fedcore.cluster",
    "merge": "fedcore.model.merging",
    "participation": "fedcore.sim.participation",
    "topology": "fedcore.sim.network.topology",
}
"""What many programs do not use, and the module that is imported at the first use."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_LATER[name])
    return getattr(module, name, module)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


profile_program()
del profile_program
