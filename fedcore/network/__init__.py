"""Models that are mixed between neighbours, without a server."""

from fedcore.network.network import Network
from fedcore.network.round import NetworkReport, NetworkRound

__all__ = ["Network", "NetworkReport", "NetworkRound"]
