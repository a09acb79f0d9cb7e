"""The server, its rounds, updates, broadcasts and reports."""

from fedcore.server.broadcast import Broadcast
from fedcore.server.partial import PartialSum
from fedcore.server.report import Report, rejection_summary
from fedcore.server.round import Round
from fedcore.server.server import EdgeAggregator, Server
from fedcore.server.update import Reply, Update

__all__ = [
    "Broadcast",
    "EdgeAggregator",
    "PartialSum",
    "Reply",
    "Report",
    "Round",
    "Server",
    "Update",
    "rejection_summary",
]
