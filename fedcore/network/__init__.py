"""Models that are mixed between neighbours, without a server."""

from fedcore.network.network import Network
from fedcore.network.report import NetworkReport
from fedcore.network.round import NetworkRound

__all__ = ["Network", "NetworkReport", "NetworkRound"]
